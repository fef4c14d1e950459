"""Training rates of cells: measured by a probe on this machine, or else assumed or from the experiment's file."""

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
START_SECONDS = 900  # limit for the first step, which waits for data and compilation
# Overrides of a probe, with which it reaches full training soon.
PROBE = {
    "vision": [],
    "language": ["eval_windows=8"],
    "dqn": ["random_episodes=4", "eval_steps=100", "eval_episodes=4"],
    "sac": ["random_episodes=1", "eval_episodes=1", "eval_limit=20"],
}
LEARNING_STARTS = {"dqn": 200, "sac": 100}
WARM_STEPS = 40  # steps of an agent between the start of learning and the measurement


@dataclass(frozen=True)
class Rate:
    """Units per second of one process, and the source of the number."""

    per_second: float
    source: str


def rate_of(job: Job, probes: Mapping[str, float], processes: int) -> Rate:
    """Return the best known rate of a job's cell.

    Args:
        probes: units per second measured on this machine, by `probe_key`.
        processes: runs at a time. They share the assumed rate of a whole machine.
    Raises: UserError if nothing is assumed about the precision of the job.
    """
    if (measured := probes.get(probe_key(job, processes))) is not None:
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


def probe_key(job: Job, copies: int) -> str:
    """Return the key of a job's measured rate: experiment, settings that change the speed, runs at a time, hardware."""
    typed = [a for a in job.arguments if a.split("=")[0] in ("size", "precision", "compile", "channels_last")]
    return " ".join([job.experiment, *typed, f"x{copies}", "on", hardware()])


def probes_in(path: Path) -> dict[str, float]:
    """Return the measured rates of a file, {} if it does not exist. Raises UserError if it is damaged."""
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
    """Measure the rate of every cell that has none in `path`, add it to that file, and return all rates.

    A probe trains `at_a_time` copies of one job for `seconds` and takes the rate of the slowest copy.
    """
    rates = probes_in(path)
    for job in one_of_each(jobs):
        copies = at_a_time[job.domain]
        if (key := probe_key(job, copies)) in rates:
            continue
        print(f"probe of {job.experiment}, {seconds:.0f} s", flush=True)
        rates[key] = probe(job, copies, seconds)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(rates, indent=1))
    return rates


def one_of_each(jobs: Sequence[Job]) -> list[Job]:
    """Return the first job of each cell."""
    found: dict[str, Job] = {}
    for job in jobs:
        found.setdefault(job.experiment, job)
    return list(found.values())


def probe(job: Job, copies: int, seconds: float) -> float:
    """Return the units per second of the slowest of `copies` identical trainings that run at the same time.

    Raises UserError if one of them fails or finishes no step within `seconds`.
    """
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
    """Return `learning_starts` for a probe of an agent; None for vision and language.

    It comes soon, before the boundary, and is a multiple of 4, for up to four environments.
    """
    limit = LEARNING_STARTS.get(job.domain)
    return None if limit is None else min(limit, job.work.trunk // 8 * 4)


def first_step(job: Job) -> int:
    """Return the step from which on a probe trains at full speed."""
    begins = learning_starts(job)
    return 1 if begins is None else begins + min(WARM_STEPS, job.work.trunk // 8 * 4)


def start(job: Job, home: Path, more: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the script of a job in the new folder `home`, with its output in `home`/log. Returns (process, `home`)."""
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
    """Wait for a checkpoint at `step` or later; return its step and the time at which it was written.

    For a run that has ended and left no such checkpoint, return 0 and the time at which it started. Raises UserError if
    the script fails or needs more than START_SECONDS.
    """
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if (found := newest(home)) and found[0] >= step:
            return found
        if process.poll() == 0 and (started := next(home.rglob("config.yaml"), None)):
            return 0, started.stat().st_mtime
        if process.poll() is not None:
            end = (home / "log").read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise UserError(f"a probe ended with exit code {process.returncode}: {end[0]}")
        time.sleep(POLL_SECONDS)
    raise UserError(f"a probe reached no step {step} within {START_SECONDS} s")


def end_of(job: Job, home: Path) -> tuple[int, float] | None:
    """Return the steps of a finished run and the time at which it ended; None while it is unfinished."""
    done = next(home.rglob("seed_*/DONE"), None)
    return done and ((job.work.trunk + job.work.fork) // job.work.per_step, done.stat().st_mtime)


def newest(home: Path) -> tuple[int, float] | None:
    """Return step and time of the newest checkpoint below a folder, None if there is none."""
    found = []
    for path in home.rglob("checkpoint/step_*.pt"):
        try:
            found.append((int(path.stem.removeprefix("step_")), path.stat().st_mtime))
        except (FileNotFoundError, ValueError):  # replaced meanwhile, or still being written
            continue
    return max(found, default=None)


def stop(process: subprocess.Popen[bytes], patience: float = 60) -> int:
    """Send SIGTERM, on which a run saves and ends, and SIGKILL after `patience` seconds; return the exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return process.returncode
