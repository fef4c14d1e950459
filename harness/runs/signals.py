"""Signals that ask a run to save and stop."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

# exit code of a run that saved and stopped on SIGTERM, SIGINT or SIGUSR1: the same command resumes it
STOPPED = 75
SIGNALS = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, n))


class StopRequest:
    """Notes the `name` of a signal between `watch` and `unwatch`; a Ctrl-C after that raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, Any] = {}

    def watch(self) -> None:
        """Install the handlers."""
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)

    def unwatch(self) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        print(f"\n{self.name}: saving at the next step (Ctrl-C again to stop at once)", flush=True)
