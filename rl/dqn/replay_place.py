"""Location of a run's replay: the trunk for the first half, the run's own folder for what is added later."""

import shutil
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fire_core.errors import UserError
from harness.runs import Run
from rl.frame_file import free_memory, require_disk
from rl.replay import FrameReplay

FOLDER = "replay"


def open_replay(run: Run, cfg: DictConfig, saved: dict[str, Any] | None) -> FrameReplay:
    """Return the replay for the state that `run.resume()` returned: a new one, the run's own, or a fork of the
    trunk's. Prints a note if it does not fit into memory. Raises UserError if the disk is too small or files are
    missing."""
    if saved is None:
        replay = _new_replay(run, cfg)
    elif run.trunk is not None and run.place == run.folder:
        replay = _fork(run, cfg, saved["replay"])
    else:
        replay = _replay(cfg, run.place, existing=True)
        replay.load_state_dict(saved["replay"])
    if replay.bytes > free_memory():
        sizes = f"{replay.bytes / 1e9:.1f} GB, free memory {free_memory() / 1e9:.1f} GB"
        print(f"note: the replay does not fit into memory ({sizes}): batches come from the disk, slowly")
    return replay


def leave_trunk(run: Run, cfg: DictConfig, replay: FrameReplay) -> FrameReplay:
    """Return the replay of the second half, a fork of the trunk's replay that writes to the run's own folder. Call this
    after the trunk is published."""
    return _fork(run, cfg, replay.state_dict())


def _fork(run: Run, cfg: DictConfig, state: dict[str, Any]) -> FrameReplay:
    """Return the fork with this state, or a new one if it is the state of the trunk."""
    assert run.trunk is not None
    parent = run.trunk / FOLDER
    if not parent.is_dir():
        raise UserError(
            f"the replay of the first half, {parent}, is gone: delete {run.trunk} and {run.folder}, "
            "and the same command trains both halves"
        )
    existing = state["fork_time"] > 0
    fork_time = state["fork_time"] if existing else state["count"]
    replay = _replay(
        cfg, run.folder, existing, parent=parent, fork_time=fork_time, most_new_rows=_rows_of_second_half(cfg)
    )
    replay.load_state_dict(state)
    return replay


def _new_replay(run: Run, cfg: DictConfig) -> FrameReplay:
    """Return the replay of the first half. Raises UserError already now, and not at the midpoint, if the disk is too
    small for both halves."""
    try:
        replay = _replay(cfg, run.place, existing=False)
        if run.trunk is not None:
            rows = min(len(replay.frames), _rows_of_second_half(cfg) + 1)
            require_disk(rows * replay.frames[0].nbytes, run.place)
    except UserError:
        shutil.rmtree(run.place / FOLDER, ignore_errors=True)  # it may be incomplete
        raise
    return replay


def _rows_of_second_half(cfg: DictConfig) -> int:
    return (cfg.total_steps - cfg.midpoint) // cfg.env.environments


def _replay(cfg: DictConfig, place: Path, existing: bool, **fork: Any) -> FrameReplay:
    return FrameReplay(
        cfg.replay_capacity,
        cfg.env.environments,
        (cfg.env.frame_size, cfg.env.frame_size),
        place / FOLDER,
        checkpoints=cfg.run.keep,
        existing=existing,
        channels_last=cfg.channels_last,
        n_step=cfg.n_step or 1,
        discount=cfg.discount,
        **fork,
    )
