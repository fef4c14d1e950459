"""Runs that one process trains together, as a stack. Each is a thread with the script's own loop, and one works at a time:
until it needs what is computed for all at once (`meet`, once all that do not wait have asked), waits (`pause`), or ends."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.stop import STOPPED, StopRequest

POLL_SECONDS = 0.05  # while all runs wait for other processes
Work = Callable[[list[Any]], Sequence[Any]]  # from the arguments of each run to the answer for each
Request = tuple[int, Work, tuple[Any, ...]]  # stage, work, arguments of this run


class Member(threading.Thread):
    """A run of a stack. `sys.stdout` and `sys.stderr` are its own while it works."""

    def __init__(self, run: Callable[[], int]) -> None:
        super().__init__(daemon=True)  # a second Ctrl-C ends the process at once
        self.code: int | None = None  # its exit code, when it has ended
        self.request: Request | None = None
        self.answer: Any = None
        self.ready: Callable[[], bool] = lambda: True  # whether it can work on
        self._run, self._streams = run, (sys.stdout, sys.stderr)
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        self._turn.acquire()
        code: Any = 1
        try:
            code = self._run()
        except SystemExit as end:
            code = end.code or 0
        finally:
            self.code = code
            self._back.release()

    def resume(self) -> None:
        """Let the run work until it waits or ends. For the main thread."""
        kept, (sys.stdout, sys.stderr) = (sys.stdout, sys.stderr), self._streams
        self._turn.release()
        self._back.acquire()
        self._streams, (sys.stdout, sys.stderr) = (sys.stdout, sys.stderr), kept

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let the others work until `ready()`. For the thread of the run."""
        self.ready = ready
        self._back.release()
        self._turn.acquire()


def member() -> Member | None:
    """Return the run of a stack that calls this, None in a process with one run."""
    current = threading.current_thread()
    return current if isinstance(current, Member) else None


def meet(stage: int, work: Work, *arguments: Any) -> Any:
    """Return the entry of this run in `work([arguments of each run])`, when all have asked. Raises what `work` raises. Runs
    that have asked for a later stage go first, so that those that are out of step wait for them."""
    own = member()
    own.request = stage, work, arguments
    own.wait(lambda: own.request is None)
    if isinstance(own.answer, Exception):
        raise own.answer
    return own.answer


def others_first() -> None:
    """Let each other run of a stack that can have a turn first."""
    if own := member():
        own.wait(lambda: True)


def pause(seconds: float, until: Path | None) -> None:
    """Sleep. The other runs of a stack work meanwhile, and the file `until` ends it early there."""
    own, over = member(), time.monotonic() + seconds
    if own is None:
        time.sleep(seconds)
    else:
        own.wait(lambda: time.monotonic() >= over or (until is not None and until.exists()))


def take_turns(runs: Sequence[Callable[[], int]]) -> int:
    """Train runs, functions that return an exit code, as a stack. Return 75 if one was stopped, else the largest code."""
    stop = StopRequest()
    stop.watch()
    members = [Member(run) for run in runs]
    for each in members:
        each.start()
    while working := [each for each in members if each.code is None]:
        ready = [each for each in working if each.ready()]
        for each in ready:
            each.resume()
        if not ready:
            asked = [each for each in working if each.request]
            _answer(asked) if asked else time.sleep(POLL_SECONDS)
    stop.unwatch()
    codes = [each.code for each in members]
    return STOPPED if STOPPED in codes else max(codes)


def _answer(asked: Sequence[Member]) -> None:
    """Compute what the runs have asked for, the latest stage of it."""
    stage, work, _ = max((each.request for each in asked), key=lambda request: request[0])
    chosen = [each for each in asked if each.request[0] == stage]
    try:
        answers = work([each.request[2] for each in chosen])
    except Exception as error:  # of all runs: each ends with it
        answers = [error] * len(chosen)
    for each, answer in zip(chosen, answers, strict=True):
        each.answer, each.request = answer, None
