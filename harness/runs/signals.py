"""Signals that ask a run to save and stop."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, ClassVar
from weakref import WeakSet

from harness.stop import SIGNALS

STOPPED = 75  # exit code of a run that saved and stopped on a signal: the same command resumes it


class StopRequest:
    """Notes the `name` of a signal from `watch` to `unwatch`. A later Ctrl-C is `urgent` and raises KeyboardInterrupt.

    Handlers belong to the main thread. What it notes reaches the runs of a stack, which are other threads, too.
    """

    all: ClassVar[WeakSet[StopRequest]] = WeakSet()  # of this process

    def __init__(self) -> None:
        self.all.add(self)
        self.name: str | None = None
        self.urgent = False
        self._before: dict[int, Any] = {}

    def watch(self) -> None:
        """Install the handlers."""
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            self._before[number] = signal.signal(number, self._note)

    def unwatch(self) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            self.urgent = True
            raise KeyboardInterrupt
        for request in self.all:
            request.name = signal.Signals(number).name
        say(f"\n{self.name}: saving at the next step, or at the end (Ctrl-C again to stop at once)")


def say(line: str) -> None:
    """Print a line. If nobody reads on, as where Ctrl-C has ended `tee` too, what comes later is not printed either."""
    try:
        print(line, flush=True)
    except RuntimeError:  # the handler has interrupted another print, which waits for a slow reader
        pass
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
