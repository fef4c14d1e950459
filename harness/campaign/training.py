"""Train the jobs of a campaign: start what is ready, stop cleanly, draw tables and figures after each cell."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from harness.campaign.manifest import SCRIPTS, Job, Manifest
from harness.campaign.rates import stop
from harness.campaign.schedule import ready, spent_trunks
from harness.config import CONF
from harness.runs.signals import STOPPED
from harness.runs.trunk import FolderLock

POLL_SECONDS = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_SECONDS = 300  # time in which a run that is asked to stop can save


class Stopped(Exception):
    """Raised after SIGINT or SIGTERM, once every run has been stopped."""


def train(
    manifest: Manifest,
    jobs: Sequence[Job],
    root: Path,
    budget: float | None = None,
    gpus: int = 1,
    launcher: Sequence[str] = (),
) -> tuple[list[str], list[str]]:
    """Train every job that is not done; return the names of those that failed and of those that were stopped.

    Args:
        budget: seconds after which no further run starts.
        gpus: processes of a language run.
        launcher: overrides that choose a Hydra launcher, as in "hydra/launcher=submitit_slurm".
    Raises: Stopped after SIGINT or SIGTERM.
    """
    began, failed, stopped = time.monotonic(), list[str](), list[str]()
    waiting = [job for job in jobs if not job.done]
    running: dict[Job, subprocess.Popen[bytes]] = {}
    drawing = Drawing(root, manifest.size)
    total, said = len(waiting), False
    with asked_to_stop() as asked:
        while waiting or running:
            if budget is not None and time.monotonic() - began > budget and waiting:
                print(f"the budget is used up: {len(waiting)} runs are left for another time", flush=True)
                waiting.clear()
            trunks = {
                job.trunk for job in [*waiting, *running] if job.trunk and (job.trunk / "DONE").exists()
            }
            free = [job for job in waiting if not held(job.folder)]
            own = {job.trunk for job in running}
            busy = {
                job.trunk for job in free if job.trunk and job.trunk not in trunks | own and held(job.trunk)
            }
            for job in ready(free, running, manifest.at_a_time, trunks, busy):
                waiting.remove(job)
                running[job] = start(job, root, command(job, gpus, launcher))
                print(f"started  {job.name}", flush=True)
            if waiting and not running and not said:
                print("waiting for runs that another process trains", flush=True)
                said = True
            time.sleep(POLL_SECONDS)
            if asked:
                for process in running.values():
                    process.send_signal(signal.SIGTERM)
                for process in running.values():
                    stop(process, PATIENCE_SECONDS)
                drawing.finish()
                raise Stopped(f"{len(running)} runs were stopped and {len(waiting)} not started")
            for job in [job for job, process in running.items() if process.poll() is not None]:
                code = running.pop(job).returncode
                if not job.done:
                    (stopped if code == STOPPED else failed).append(job.name)
                ended = "finished" if job.done else "stopped " if code == STOPPED else "FAILED  "
                print(f"{ended} {job.name} ({total - len(waiting) - len(running)} of {total})", flush=True)
                unfinished = [*waiting, *running]
                if job.domain in manifest.delete_trunks and job.trunk is not None and job.done:
                    delete_spent([job.trunk], unfinished)
                if not any(same_cell(job, other) for other in unfinished):
                    drawing.want(job.experiment)
            drawing.go()
        drawing.finish()
    return failed, stopped


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Yield a list to which SIGINT and SIGTERM are appended. Runs have their own sessions and do not receive them."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        print("\nstopping: every run saves first", flush=True)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def same_cell(one: Job, other: Job) -> bool:
    """Return whether two jobs have the same experiment, turn among the seeds and part of the methods."""
    return one.experiment == other.experiment and one.rank[:2] == other.rank[:2]


def held(folder: Path) -> bool:
    """Return whether another process is training in this folder."""
    if not folder.exists():
        return False
    lock = FolderLock(folder)
    if not lock.acquire(wait=False):
        return True
    lock.release()
    return False


def command(job: Job, gpus: int = 1, launcher: Sequence[str] = ()) -> list[str]:
    """Return the command line of a run; with a launcher, that of a sweep of one run, which ends with its run."""
    script = [str(CONF.parent / SCRIPTS[job.domain]), *job.arguments]
    if launcher:
        return [sys.executable, *script, "-m", *launcher]
    if job.domain == "language" and gpus > 1:
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={gpus}",
            *script,
        ]
    return [sys.executable, *script]


def start(job: Job, root: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a run, with its output in <root>/campaign/logs/, and return its process."""
    log = root / "campaign" / "logs" / f"{job.name.replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, "run.progress=false"],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def delete_spent(trunks: Collection[Path], unfinished: Collection[Job]) -> None:
    """Delete the trunks that no unfinished job starts from and that no other process uses."""
    for trunk in spent_trunks(trunks, unfinished):
        if trunk.exists() and not held(trunk):
            shutil.rmtree(trunk)
            print(f"deleted  {trunk}, from which no run is left to start", flush=True)


class Drawing:
    """A queue of tables and figures, drawn by one process at a time while training continues."""

    def __init__(self, root: Path, size: str) -> None:
        self.root, self.size = root, size
        self.wanted: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None

    def want(self, experiment: str) -> None:
        """Add the tables and the figure of this experiment to the queue."""
        inputs = ["--root", str(self.root), "--size", self.size]
        self.wanted.append(" ".join(["tables", "--experiment", experiment, *inputs]))
        figure = f"fig{experiment.removeprefix('fig')[:1]}" if experiment.startswith("fig") else "probes"
        self.wanted.append(" ".join(["figures", figure, "--formats", "png", *inputs]))
        self.wanted = list(dict.fromkeys(self.wanted))

    def go(self) -> None:
        """Start the next drawing, unless one is running."""
        if (self.process is not None and self.process.poll() is None) or not self.wanted:
            return
        arguments = self.wanted.pop(0).split(" ")
        with (self.root / "campaign" / "logs" / "analysis.log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "analysis", *arguments],
                cwd=CONF.parent, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def finish(self) -> None:
        """Draw everything that is left in the queue."""
        while self.wanted or self.process is not None:
            self.go()
            if self.process is not None:
                self.process.wait()
                self.process = None
