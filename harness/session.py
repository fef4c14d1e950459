"""One run of a training script: where it stands, what it saves and logs, and its method.

Unless the session is `finished`, a script calls `attach`, and enters `with session as at`, which loads a checkpoint. In each
step it calls `intervene`, which acts at a boundary or when the trigger has fired, `log` and `save_if_due`; then `finish`.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer
from tqdm import tqdm

from fire_core import Attached, Report, UserError, attach
from fire_core.methods import create
from harness import stop
from harness.device import pick_device, set_precision
from harness.launch import open_run
from harness.runs import seeded
from harness.settings import Domain
from harness.stop import STOPPED
from harness.trial import seed_of
from harness.trigger import RunTrigger

Values = dict[str, Any]
Measure = Callable[[], Values]
Parameters = Callable[[], Iterable[nn.Parameter]]


class OneProcess:
    """The only process of a run. `language.distributed.World` has the same calls for several."""

    is_leader = True
    position: tuple[int, ...] = ()  # of its random stream
    from_leader = staticmethod(lambda value: value)  # the value that process 0 has


class Session:
    """One run of a script. `at` is where it stands: the phase of the data, the step, and what the script puts there. It is
    saved and loaded with everything that was given to `attach` and `keep`.

    world: the processes of the run; only the leader has a run folder. fork: the checkpoint of phase 0 that the other phases
    start from; None is its end. facts: further entries of meta.json.
    """

    def __init__(
        self, domain: Domain, cfg: DictConfig, *, world: Any = None, fork: str | None = None, **facts: Any
    ) -> None:
        self.cfg, self.world, self.fork = cfg, world or OneProcess(), fork
        self.method = create(**cfg.method)
        self.run = open_run(domain, cfg, self.method, **facts) if self.world.is_leader else None
        self.device = pick_device(cfg.device)
        set_precision(cfg)
        self.trigger = RunTrigger(cfg.get("trigger"))
        self.at: Values = {"phase": 0, "step": 0}
        self.resumed = False  # from a checkpoint
        self.forked = False  # from the checkpoint of another run's phase 0
        self.repeat = 1  # environment steps in one step, in what is logged
        self.treatment: Attached
        self.bar = tqdm(disable=True)
        self._kept: Values = {}
        self._started = time.perf_counter()

    @property
    def finished(self) -> bool:
        """Whether this run is complete already; prints that it is."""
        return self.world.from_leader(self.run.finished if self.run else None)

    def attach(
        self, nets: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], **own: Any
    ) -> Attached:
        """Return the method of the run with the nets and optimizers that it works on: `fire_core.attach`."""
        given = {"optimizer_state": self.cfg.optimizer_state, "compiled": bool(self.cfg.compile)} | own
        self.treatment = attach(self.method, nets, optimizers, seed=self.cfg.seed, **given)
        if "trial" in self.cfg:  # its repeats share phase 0
            self.treatment.seed = seed_of(self.cfg, 1)
        return self.treatment

    def keep(self, **parts: Any) -> None:
        """Save and load these objects, by their `state_dict` and `load_state_dict`, with every checkpoint."""
        self._kept |= parts

    def __enter__(self) -> Values:
        with ExitStack() as block:
            if self.run:
                block.enter_context(self.run)
            else:
                stop.handle(stop.IGNORE)  # the leader saves, and tells
            block.enter_context(seeded(self.cfg.seed, "train", *self.world.position))
            saved = self.world.from_leader(self.run.resume(self.fork) if self.run else None)
            if saved is not None:
                self._load(saved)
            self._block = block.pop_all()
        forked = bool(self.run and saved is not None and self.run.trunk not in (None, self.run.place))
        self.resumed, self.forked = saved is not None, self.world.from_leader(forked)
        self._started = time.perf_counter()
        return self.at

    def __exit__(self, *error: Any) -> None:
        self.bar.close()
        self._block.__exit__(*error)

    def _parts(self) -> Values:
        """Return what a checkpoint holds."""
        return {
            "at": dict(self.at),
            "treatment": self.treatment.state_dict(),
            "trigger": self.trigger.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "kept": {name: part.state_dict() for name, part in self._kept.items()},
        }

    def _load(self, saved: Mapping[str, Any]) -> None:
        if (was := saved["at"].get("data")) not in (None, now := self.at.get("data")):
            raise UserError(f"the checkpoint is of data {was}, not {now}: use these, or another run.root")
        for key, value in saved["at"].items():  # a sum of losses goes back to the device that adds to it
            self.at[key] = value.to(self.at[key].device) if isinstance(value, torch.Tensor) else value
        self.treatment.load_state_dict(saved["treatment"])
        self.trigger.load_state_dict(saved["trigger"])
        for name, part in self._kept.items():
            part.load_state_dict(saved["kept"][name])
        if self.world.is_leader:
            torch.set_rng_state(saved["random"])
            if self.device.type == "cuda" and isinstance(saved["random_cuda"], torch.Tensor):
                torch.cuda.set_rng_state(saved["random_cuda"], self.device)

    def intervene(
        self, phase: int, measure: Measure, test: Measure = dict, also: Parameters | None = None
    ) -> Report | None:
        """Let the method act if phase `phase` begins or the trigger has fired. Return the report, None if neither is so.

        The order is that of every script: `measure`, the boundary with `also` (see `Attached.boundary`), `measure` again
        and `test`, and one row of metrics: phase, act, step, cause, before_<metric>, after_<metric>.
        """
        self.at["phase"] = phase
        due = self.trigger.due(phase if phase > self.treatment.state.phase else None)
        if due is None:
            return None
        act, cause = due
        row = {f"before_{name}": value for name, value in measure().items()}
        report = self.treatment.boundary(act, also)
        where = {"phase": phase, "act": act, "step": self.at["step"] * self.repeat, "cause": cause}
        if self.run:
            self.run.boundary(report=report, **where)
            self.run.timing(phase=phase, boundary_seconds=report.seconds)
        row |= {f"after_{name}": value for name, value in (measure() | test()).items()}
        if self.run:
            self.run.log(**where, **row)
        self.say(f"act {act} ({cause}): {self.method.name}, {summary(report)}")
        self._started = time.perf_counter()
        return report

    def log(self, *, watched: bool = True, **values: Any) -> None:
        """Append a row to metrics.jsonl, with the phase and the step, and let the trigger see it if it is `watched`."""
        if "step" not in values:
            values = {"step": self.at["step"] * self.repeat} | values
        if self.run:
            self.run.log(phase=self.at["phase"], **values)
        if watched:
            self.trigger.look(values["step"], self.world.from_leader(values))
        self._started = time.perf_counter()

    def timing(self, **values: Any) -> float:
        """Append a row to timing.jsonl, with the phase, and the seconds since the last row of metrics. Return these."""
        seconds = time.perf_counter() - self._started
        if self.run:
            self.run.timing(phase=self.at["phase"], **values, seconds=seconds)
        return seconds

    def progress(self, total: int, done: int, unit: str, name: str | None = None) -> tqdm:
        """Return a new progress bar, shown on a terminal unless run.progress=false."""
        hidden = None if self.cfg.run.progress and self.world.is_leader else True
        self.bar.close()
        self.bar = tqdm(None, name, total, initial=done, unit=unit, disable=hidden)
        return self.bar

    def say(self, line: str) -> None:
        """Print a line above the progress bar."""
        if self.world.is_leader:
            with tqdm.external_write_mode():
                stop.say(line)

    def save(self, name: str | None = None) -> None:
        """Write a checkpoint, in time that `timing` does not count. One without a name ends the process if a signal asks."""
        started, parts = time.perf_counter(), self._parts()
        if self.run:
            self.run.save(self.at["step"], parts, name)
        self._started += time.perf_counter() - started

    def save_if_due(self) -> None:
        """Write a checkpoint if it is time, or if a signal asks to stop."""
        due = self.run is not None and self.run.due(self.at["step"])
        due, stops = self.world.from_leader((due, due and self.run.stop_signal is not None))
        if due:
            self.save()
        if stops:
            sys.exit(STOPPED)

    def leave_trunk(self) -> None:
        """End phase 0, which other methods may share. With a `fork`, go back to that checkpoint."""
        if not self.world.from_leader(self.run and (self.fork or self.run.trunk is not None)):
            return
        left = self.run.leave_trunk(self.at["step"], self._parts(), self.fork) if self.run else None
        if (saved := self.world.from_leader(left)) is not None:
            self._load(saved)
            for path in self.run.folder.glob("boundary_*.json") if self.run else ():
                if int(path.stem.removeprefix("boundary_")) > self.trigger.acts:  # it came after the fork
                    path.unlink()

    def finish(self, parts: Mapping[str, Any], results: Mapping[str, Any], brief: str) -> None:
        """Save these objects, as they would be evaluated, as final.pt, the results as summary.json; print `brief`."""
        self.bar.close()
        with self.treatment.evaluating():
            if self.run:
                states = {name: part.state_dict() for name, part in parts.items()}
                self.run.save(self.at["step"], states, name="final")
                self.run.finish({"steps": self.at["step"] * self.repeat, **results})
                idle = self.method.name != "none" and self.treatment.state.phase < self.method.first_phase
                self.say(f"{self.method.name}: {brief}{'; never acted' * idle}\nin {self.run.folder}")


def summary(report: Report) -> str:
    """Return how many matrices were treated, in what time, and their mean deviation from isometry before and after."""
    if not (count := (found := report.summary())["targets"]):
        return f"{len(report.changed)} parameters changed" if report.changed else "no matrix treated"
    before, after = (found.get(f"dfi_{when}_mean", math.nan) for when in ("before", "after"))
    return f"{count} matrices in {report.seconds:.3f} s; mean DfI {before:.1f} -> {after:.1f}"
