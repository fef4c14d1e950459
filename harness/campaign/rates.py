"""How fast each cell trains: measured by a probe on this machine, else from its file, else assumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fire_core.checkpoints.atomic import write_atomic
from fire_core.errors import UserError
from harness.campaign.manifest import SCRIPTS, Job
from harness.campaign.work import assumed
from harness.config import CONF
from harness.runs.machine import hardware

POLL_SECONDS = 0.2
START_SECONDS = 900  # until the first steps: data, compiling
# What a probe changes, so that it reaches full training soon.
PROBE = {
    "vision": [],
    "language": ["eval_windows=8"],
    "dqn": ["random_episodes=4", "eval_steps=100", "eval_episodes=4"],
    "sac": ["random_episodes=1", "eval_episodes=1", "eval_limit=20"],
}
LEARNING_STARTS = {"dqn": 200, "sac": 100}
WARM_STEPS = 40  # after that


@dataclass(frozen=True)
class Rate:
    """Units per second of one process, and where the number is from."""

    per_second: float
    source: str


def rate_of(job: Job, probes: Mapping[str, float], processes: int) -> Rate:
    """The best known rate of a job's cell.

    Args:
        probes: measured on this machine, by `probe_key`.
        processes: runs at a time, which share an assumed rate.
    """
    if (measured := probes.get(probe_key(job))) is not None:
        return Rate(measured, "measured by a probe on this machine")
    known, work = assumed(), job.work
    if work.operations is not None:
        peak, share = known["peak"][work.precision], known["share"][job.domain].get(work.precision)
        if share is None:
            raise UserError(
                f"precision={work.precision}: conf/campaign/assumed.yaml has no share of {job.domain}"
            )
        share *= known["compiled"][job.domain] if work.compile else 1
        source = f"assumed: {share:.0%} of {peak} TFLOP/s of {known['machine']}"
        return Rate(share * peak * 1e12 / work.operations / processes, source)
    if "size=paper" in job.arguments:
        source = f"assumed: a guess for all processes together beside {known['machine']}"
        return Rate(known["steps"][job.domain] / processes, source)
    units = work.trunk_units + work.fork_units
    if job.minutes:
        return Rate(units / (60 * job.minutes), "the minutes in the experiment's file, on a CPU")
    return Rate(
        units / (60 * known["minutes"]), f"unknown, taken as {known['minutes']} minutes a run: use --probe"
    )


def probe_key(job: Job) -> str:
    """Cells of one kind of network and one precision train at one rate on one machine."""
    typed = [a for a in job.arguments if a.split("=")[0] in ("size", "precision", "compile", "channels_last")]
    return " ".join([job.experiment, *typed, "on", hardware()])


def probes_in(path: Path) -> dict[str, float]:
    """The rates measured so far."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): delete it, and --probe measures again") from error
    return {key: float(value) for key, value in found.items()}


def measure(
    jobs: Sequence[Job], path: Path, at_a_time: Mapping[str, int], seconds: float
) -> dict[str, float]:
    """Train one job of each cell for `seconds`, as many copies at once as the campaign will, and note the rate of one."""
    rates = probes_in(path)
    for job in one_of_each(jobs):
        if probe_key(job) in rates:
            continue
        print(f"probe of {job.experiment}, {seconds:.0f} s", flush=True)
        rates[probe_key(job)] = probe(job, at_a_time[job.domain], seconds)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(rates, indent=1))
    return rates


def one_of_each(jobs: Sequence[Job]) -> list[Job]:
    """The first job of each cell."""
    found: dict[str, Job] = {}
    for job in jobs:
        found.setdefault(job.experiment, job)
    return list(found.values())


def probe(job: Job, copies: int, seconds: float) -> float:
    """Units per second of one of `copies` identical trainings that run side by side."""
    with tempfile.TemporaryDirectory() as folder:
        often = [f"run.checkpoint_seconds={seconds / 4}", "run.checkpoint_share=1"]
        running = [start(job, Path(folder) / str(copy), often) for copy in range(copies)]
        try:
            marks = [wait_for_step(process, home, first_step(job)) for process, home in running]
            until = time.monotonic() + seconds
            while time.monotonic() < until and any(process.poll() is None for process, _ in running):
                time.sleep(POLL_SECONDS)
            rates = []
            for (_, home), (step, at) in zip(running, marks, strict=True):
                last, then = end_of(job, home) or newest(home) or (step, at)
                if last <= step:
                    raise UserError(
                        f"{job.name}: no step was finished in {seconds:.0f} s; give more, as in --probe 300"
                    )
                rates.append((last - step) / (then - at))
        finally:
            for process, _ in running:
                stop(process)
    return min(rates) * job.work.per_step


def learning_starts(job: Job) -> int | None:
    """Where learning begins in a probe of an agent: soon, and before the boundary; a multiple of four environments."""
    limit = LEARNING_STARTS.get(job.domain)
    return None if limit is None else min(limit, job.work.trunk // 8 * 4)


def first_step(job: Job) -> int:
    """The step from which on a probe shows full training."""
    begins = learning_starts(job)
    return 1 if begins is None else begins + min(WARM_STEPS, job.work.trunk // 8 * 4)


def start(job: Job, home: Path, more: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
    """The script of a job in a folder of its own, output to `log`."""
    home.mkdir(parents=True)
    typed = [a for a in job.arguments if not a.startswith("run.root=")]
    if (begins := learning_starts(job)) is not None:
        typed.append(f"learning_starts={begins}")
    command = [sys.executable, str(CONF.parent / SCRIPTS[job.domain]), *typed, *PROBE[job.domain], *more]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"run.root={home}", "run.progress=false"],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return process, home


def wait_for_step(process: subprocess.Popen[bytes], home: Path, step: int) -> tuple[int, float]:
    """The first checkpoint at `step` or later, and when it was written; of a run that has ended before that, its start.

    UserError where the script fails.
    """
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if (found := newest(home)) and found[0] >= step:
            return found
        if process.poll() == 0 and (started := next(home.rglob("config.yaml"), None)):
            return 0, started.stat().st_mtime
        if process.poll() is not None:
            end = (home / "log").read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise UserError(f"a probe ended with exit code {process.returncode}: {end[0]}")
        time.sleep(POLL_SECONDS)
    raise UserError(f"a probe reached no step {step} within {START_SECONDS} s")


def end_of(job: Job, home: Path) -> tuple[int, float] | None:
    """Steps of a whole run, and when it ended; None while it has not."""
    done = next(home.rglob("seed_*/DONE"), None)
    return done and ((job.work.trunk + job.work.fork) // job.work.per_step, done.stat().st_mtime)


def newest(home: Path) -> tuple[int, float] | None:
    """Step and time of the newest checkpoint below a folder."""
    found = []
    for path in home.rglob("checkpoint/step_*.pt"):
        try:
            found.append((int(path.stem.removeprefix("step_")), path.stat().st_mtime))
        except (FileNotFoundError, ValueError):  # replaced meanwhile, or still being written
            continue
    return max(found, default=None)


def stop(process: subprocess.Popen[bytes], patience: float = 60) -> int:
    """SIGTERM, on which a run saves and ends; SIGKILL after `patience` seconds."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return process.returncode
