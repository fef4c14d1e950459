"""Where the replay of a run lies: in the trunk while that is trained, afterwards half there and half in the own folder."""

from typing import Any

from omegaconf import DictConfig

from fire_core.runs import Run
from rl.replay import FrameReplay

FOLDER = "replay"


def open_replay(run: Run, cfg: DictConfig, saved: dict[str, Any] | None) -> FrameReplay:
    """The replay that belongs to what `run.resume()` returned: new, gone on with, or forked from the trunk's end."""
    if saved is None:
        return _replay(cfg, run.place, existing=False)
    forked = saved["replay"]["fork_time"] > 0
    if run.trunk is not None and run.place == run.folder:
        return _fork(run, cfg, saved["replay"], existing=forked)
    replay = _replay(cfg, run.place, existing=True)
    replay.load_state_dict(saved["replay"])
    return replay


def leave_trunk(run: Run, cfg: DictConfig, replay: FrameReplay) -> FrameReplay:
    """After the trunk is published: the same replay, but what comes now is written to the run's own folder."""
    if run.trunk is None:
        return replay
    return _fork(run, cfg, replay.state_dict(), existing=False)


def _fork(run: Run, cfg: DictConfig, state: dict[str, Any], existing: bool) -> FrameReplay:
    assert run.trunk is not None
    base = _replay(cfg, run.trunk, existing=True, read_only=True)
    if existing:
        base.count = state["fork_time"]
    else:
        base.load_state_dict(state)
    new_rows = (cfg.total_steps - cfg.midpoint) // cfg.env.environments
    fork = base.fork(run.folder / FOLDER, new_rows=new_rows, existing=existing)
    if existing:
        fork.load_state_dict(state)
    return fork


def _replay(cfg: DictConfig, place: Any, existing: bool, read_only: bool = False) -> FrameReplay:
    return FrameReplay(
        cfg.replay_capacity,
        cfg.env.environments,
        (cfg.env.frame_size, cfg.env.frame_size),
        folder=place / FOLDER,
        existing=existing,
        read_only=read_only,
    )
