"""Handlers of Ctrl-C and SIGTERM while no run is open. An open run has handlers of its own, which save."""

from __future__ import annotations

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAID = "stopped; the same command resumes\n"


def exit_at_once() -> None:
    """From now on exit with 128 + the signal's number.

    For the import of torch, when no file is open and C code may swallow an exception.
    """
    for number in SIGNALS:
        signal.signal(number, _exit)


def raise_interrupt() -> None:
    """From now on raise KeyboardInterrupt with the signal's number, so that half-written files are removed."""
    for number in SIGNALS:
        signal.signal(number, _raise)


def _exit(number: int, frame: FrameType | None) -> None:
    os.write(2, SAID.encode())
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)
