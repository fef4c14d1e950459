"""Ctrl-C and SIGTERM where no run is open: one line and an exit code. An open run has handlers of its own, which save."""

from __future__ import annotations

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAID = "stopped; the same command resumes\n"


def exit_at_once() -> None:
    """For the seconds in which torch is imported: nothing is open yet, and an exception would be lost in C code."""
    for number in SIGNALS:
        signal.signal(number, _exit)


def raise_interrupt() -> None:
    """From then on: KeyboardInterrupt with the signal's number, so that files that are half-written are removed."""
    for number in SIGNALS:
        signal.signal(number, _raise)


def _exit(number: int, frame: FrameType | None) -> None:
    os.write(2, SAID.encode())
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)
