"""The runs of a sweep on this machine: each in a process of its own, several at a time."""

import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from harness import stop

POLL_SECONDS = 0.05


class Pool:
    """At most `places` processes at a time. A signal that asks to stop is passed on to each, and no other one starts. They
    are forked from one that has imported `modules`, so they start at once; it holds no GPU and no threads."""

    def __init__(self, places: int, modules: Sequence[str]) -> None:
        self.places = places
        self.running: list[Any] = []
        self.codes: list[int] = []  # exit codes of those that have ended
        self.asked: list[int] = []  # signals that have come
        self._passed_on = 0
        self._handlers: dict[int, Any] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(modules))
        multiprocessing.resource_tracker.ensure_running()  # its start would end the block of signals in `start`

    def __enter__(self) -> "Pool":
        note = lambda number, frame: self.asked.append(number)  # noqa: E731
        self._handlers = {number: signal.signal(number, note) for number in stop.SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in a new process, as soon as there is a place."""
        self.wait(fewer_than=self.places)
        if not self.asked:
            process = self._context.Process(target=_call, args=(function, *arguments))
            # until it has handlers of its own
            before = signal.pthread_sigmask(signal.SIG_BLOCK, stop.SIGNALS)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self.running.append(process)

    def wait(self, fewer_than: int = 1) -> None:
        """Wait until fewer processes than this run: by default, until all have ended."""
        while True:
            new = self.asked[self._passed_on :]
            self._passed_on += len(new)
            for number in new:
                for each in [process for process in self.running if process.exitcode is None]:
                    with suppress(ProcessLookupError):  # it ends just now
                        os.kill(each.pid, number)
            codes = {process: process.exitcode for process in self.running}
            self.codes += [code for code in codes.values() if code is not None]
            self.running = [process for process, code in codes.items() if code is None]
            if len(self.running) < fewer_than:
                return
            time.sleep(POLL_SECONDS)

    def exit_code(self) -> int:
        """Return 0 if all processes ended well; 75, or 128 + the signal, if they were stopped; else 1."""
        if stop.STOPPED in self.codes:
            return stop.STOPPED
        if self.asked:
            return 128 + self.asked[0]
        return max((stop.STOPPED if was_stopped(code) else 1 for code in self.codes if code), default=0)


def was_stopped(code: int) -> bool:
    """Return whether a process with this exit code was stopped by a signal."""
    return code == stop.STOPPED or (code - 128 if code > 128 else -code) in stop.SIGNALS


def _call(function: Callable[..., object], *arguments: object) -> None:
    """Call the function in a session of its own, so that Ctrl-C reaches it once, through the pool."""
    os.setsid()
    stop.handle(stop.interrupt)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop.SIGNALS)
        code = function(*arguments)
    except KeyboardInterrupt as interrupt:
        sys.exit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))
    sys.exit(code)  # type: ignore[arg-type]
