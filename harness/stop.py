"""Handlers of Ctrl-C and other signals to stop while no run is open. An open run has handlers of its own, which save."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

# Signals that ask to stop. SIGHUP, a lost terminal, is one of them unless nohup has it ignored.
SIGNALS = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, n))
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    SIGNALS += (signal.SIGHUP,)
STOPPED_TEXT = "stopped; the same command resumes\n"


def say_stopped() -> None:
    """Write to stderr that the process stops, if anybody reads it still."""
    with suppress(OSError):
        os.write(2, STOPPED_TEXT.encode())


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


DRIVER = "FIRE_DRIVER"  # environment variable: host and process that started a sweep
ALIVE_SECONDS = 1.0  # between two looks at that process


def name_driver() -> None:
    """Name this process in the environment as the one that its workers must not outlive."""
    os.environ[DRIVER] = f"{socket.gethostname()} {os.getpid()}"


@functools.cache
def end_with_driver() -> None:
    """From now on send this process SIGTERM when the process that started it is gone, killed for instance.

    That is the driver of a sweep on this host, or torchrun. A process that a user started outlives its shell.
    """
    host, _, driver = os.environ.get(DRIVER, "").partition(" ")
    if host == socket.gethostname() and driver != str(os.getpid()) and _exists(int(driver)):
        alive = functools.partial(_exists, int(driver))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        alive = lambda: os.getppid() == parent  # noqa: E731
    else:
        return
    threading.Thread(target=_wait_while, args=(alive,), daemon=True).start()


def _wait_while(alive: Callable[[], bool]) -> None:
    while alive():
        time.sleep(ALIVE_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _exists(process: int) -> bool:
    """Return whether a process of this host is there and visible; those of other containers are not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _exit(number: int, frame: FrameType | None) -> None:
    say_stopped()
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def ignore() -> None:
    """From now on ignore signals, in a process whose leader handles them."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
