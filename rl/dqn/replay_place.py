"""Location of a run's replay: the trunk for the first half, the run's own folder for what is added later."""

import shutil
from typing import Any

from omegaconf import DictConfig

from fire_core.errors import UserError
from harness.runs import Run
from rl.columns import free_memory, require_disk
from rl.replay import FrameReplay

FOLDER = "replay"


def open_replay(run: Run, cfg: DictConfig, saved: dict[str, Any] | None) -> FrameReplay:
    """Return the replay for the state that `run.resume()` returned: a new one, the run's own, or a fork of the
    trunk's. Prints a note if it does not fit into memory. Raises UserError if the disk is too small or files are
    missing."""
    if saved is None:
        replay = _new_replay(run, cfg)
    elif run.trunk is not None and run.place == run.folder:
        replay = _fork(run, cfg, saved["replay"], existing=saved["replay"]["fork_time"] > 0)
    else:
        replay = _replay(cfg, run.place, existing=True)
        replay.load_state_dict(saved["replay"])
    needed = replay.bytes + (replay.parent.bytes if replay.parent else 0)
    if needed > free_memory():
        sizes = f"{needed / 1e9:.1f} GB, free memory {free_memory() / 1e9:.1f} GB"
        print(
            f"note: the replay does not fit into memory ({sizes}): batches come from the disk, which is slow"
        )
    return replay


def leave_trunk(run: Run, cfg: DictConfig, replay: FrameReplay) -> FrameReplay:
    """Return the replay of the second half, which writes to the run's own folder: a fork of the trunk's replay, or
    `replay` itself if there is no trunk. Call this after the trunk is published."""
    if run.trunk is None:
        return replay
    return _fork(run, cfg, replay.state_dict(), existing=False)


def _fork(run: Run, cfg: DictConfig, state: dict[str, Any], existing: bool) -> FrameReplay:
    assert run.trunk is not None
    if not (run.trunk / FOLDER).is_dir():
        raise UserError(
            f"the replay of the first half, {run.trunk / FOLDER}, is gone: delete {run.trunk} and {run.folder}, "
            "and the same command trains both halves"
        )
    base = _replay(cfg, run.trunk, existing=True, read_only=True)
    if existing:
        base.count = state["fork_time"]
    else:
        base.load_state_dict(state)
    fork = base.fork(run.folder / FOLDER, new_rows=_new_rows(cfg), existing=existing)
    if existing:
        fork.load_state_dict(state)
    return fork


def _new_replay(run: Run, cfg: DictConfig) -> FrameReplay:
    """Return the replay of the first half. Raises UserError already now, and not at the midpoint, if the disk is too
    small for both halves."""
    try:
        replay = _replay(cfg, run.place, existing=False)
        if run.trunk is not None:
            require_disk(replay.fork_bytes(_new_rows(cfg)), run.place)
    except UserError:
        shutil.rmtree(run.place / FOLDER, ignore_errors=True)  # it may be incomplete
        raise
    return replay


def _new_rows(cfg: DictConfig) -> int:
    return (cfg.total_steps - cfg.midpoint) // cfg.env.environments


def _replay(cfg: DictConfig, place: Any, existing: bool, read_only: bool = False) -> FrameReplay:
    return FrameReplay(
        cfg.replay_capacity,
        cfg.env.environments,
        (cfg.env.frame_size, cfg.env.frame_size),
        folder=place / FOLDER,
        checkpoints=cfg.run.keep,
        existing=existing,
        read_only=read_only,
        channels_last=cfg.channels_last,
        n_step=cfg.n_step or 1,
        discount=cfg.discount,
    )
