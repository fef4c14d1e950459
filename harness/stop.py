"""Handlers of Ctrl-C and SIGTERM while no run is open. An open run has handlers of its own, which save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def postponed() -> Iterator[None]:
    """Hold back signals until the end of the block, for imports of C code that turn an exception into another one."""
    if threading.current_thread() is not threading.main_thread():
        yield  # the main thread alone gets signals
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def _exit(number: int, frame: FrameType | None) -> None:
    os.write(2, SAID.encode())
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)
