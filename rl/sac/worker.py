"""Tasks in worker processes, so that those of a stack of runs are simulated at the same time (`workers=true`)."""

import io
import multiprocessing.util
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from fire_core.errors import UserError
from harness import stop
from harness.runs.stack import others_first


class InWorker:
    """`kind(*arguments)` in a process of its own, which ends with this object, with its methods and attributes.

    Until a call returns, other runs work. It raises what the method raises, and UserError if the process has ended.
    """

    def __init__(self, kind: Callable[..., Any], *arguments: Any):
        self._kind, self._name = kind, f"{kind.__name__}{arguments}"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rl.sac.train"])  # imported once, and forked from there
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, kind, arguments), daemon=True)
        self._process.start()
        theirs.close()
        # At the exit, multiprocessing waits for the process, which ends when this is closed.
        multiprocessing.util.Finalize(self, self._connection.close, exitpriority=0)
        self._receive()

    def __getattr__(self, name: str) -> Any:
        if callable(getattr(self._kind, name, None)):
            return partial(self._call, name)
        return self._call("__getattribute__", name)

    def _call(self, method: str, *arguments: Any) -> Any:
        with suppress(OSError):  # `_receive` tells if the process has ended
            self._connection.send_bytes(pickle.dumps((method, arguments)))
        return self._receive()

    def _receive(self) -> Any:
        others_first()
        try:
            result, error, printed = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._process.join()
            end = f"exit code {self._process.exitcode} (-9 may be want of memory)"
            remedy = "run the same command again to resume, perhaps with workers=false"
            raise UserError(f"the worker process of {self._name} has ended with {end}: {remedy}") from None
        sys.stderr.write(printed)
        if error is not None:
            raise error
        return result


def serve(connection: Connection, kind: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Make the object and call its methods as `connection` asks, until that is closed."""
    stop.handle(stop.IGNORE)  # a run that is asked to stop needs the state of its task
    made, *outcome = attempt(kind, *arguments)
    answer: tuple[Any, ...] = (None, *outcome)
    with suppress(EOFError, OSError):
        while True:
            connection.send_bytes(pickle.dumps(answer))
            method, given = pickle.loads(connection.recv_bytes())
            answer = attempt(getattr(made, method), *given)


def attempt(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None, str]:
    """Return (result, error, what was printed to stderr) of a call."""
    with redirect_stderr(io.StringIO()) as printed:
        try:
            return function(*arguments), None, printed.getvalue()
        except Exception as error:
            error.add_note(f"In the worker process:\n{traceback.format_exc()}")
            return None, error, printed.getvalue()
