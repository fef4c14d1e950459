"""Ctrl-C and other signals that ask to stop: handlers while no run is open, and the request that an open run notes."""

import functools
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar
from weakref import WeakSet

# Signals that ask to stop. SIGHUP, a lost terminal, is one of them unless nohup has it ignored.
SIGNALS = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, n))
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    SIGNALS += (signal.SIGHUP,)
STOPPED = 75  # exit code of a run that saved and stopped on a signal: the same command resumes it
DRIVER = "FIRE_DRIVER"  # environment variable: host and process that started a sweep
IGNORE = signal.SIG_IGN
ALIVE_SECONDS = 1.0  # between two looks at that process


def say_stopped() -> None:
    """Write to stderr that the process stops, if anybody reads it still."""
    with suppress(OSError):
        os.write(2, b"stopped; the same command resumes\n")


def handle(handler: Any) -> None:
    """From now on answer SIGNALS with `exit_at_once`, `interrupt`, or IGNORE in a process whose leader handles them."""
    for number in SIGNALS:
        signal.signal(number, handler)


def exit_at_once(number: int, frame: FrameType | None) -> None:
    """Exit with 128 + the signal's number: while torch is imported, C code may swallow an exception."""
    say_stopped()
    os._exit(128 + number)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt with the signal's number, so that half-written files are removed."""
    raise KeyboardInterrupt(number)


def name_driver() -> None:
    """Name this process in the environment as the one that its workers must not outlive."""
    os.environ[DRIVER] = f"{socket.gethostname()} {os.getpid()}"


@functools.cache
def end_with_driver() -> None:
    """From now on send this process SIGTERM when what started it is gone: a sweep's driver on this host, or torchrun."""
    host, _, driver = os.environ.get(DRIVER, "").partition(" ")
    if host == socket.gethostname() and driver != str(os.getpid()) and _exists(int(driver)):
        alive = functools.partial(_exists, int(driver))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        alive = functools.partial(lambda parent: os.getppid() == parent, os.getppid())
    else:
        return

    def watch() -> None:
        while alive():
            time.sleep(ALIVE_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _exists(process: int) -> bool:
    """Return whether a process of this host is there and visible; those of other containers are not."""
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


class StopRequest:
    """Notes the `name` of a signal from `watch` to `unwatch`, in the main thread, for the runs of a stack in others, too. A
    later Ctrl-C is `urgent` and raises KeyboardInterrupt."""

    all: ClassVar[WeakSet["StopRequest"]] = WeakSet()  # of this process

    def __init__(self) -> None:
        self.name: str | None = None
        self.all.add(self)
        member = threading.current_thread() is not threading.main_thread()  # which may begin after the signal
        if name := next((each.name for each in self.all if member and each.name), None):
            self.name = name
        self.urgent = False
        self._before: dict[int, Any] = {}

    def watch(self) -> None:
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            self._before[number] = signal.signal(number, self._note)

    def unwatch(self) -> None:
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
