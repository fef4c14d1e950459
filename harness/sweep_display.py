"""A sweep as it is seen on a terminal: one line for each run that ends, and one live line. The state of a run is read from
its folder, so it does not matter where the run is trained. What a run prints is in log.txt in its folder.
"""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from fire_core.errors import UserError, printable
from harness.runs.folders import place_of, read_json, read_meta, read_text, state_of
from harness.runs.machine import describe
from harness.runs.metrics import METRICS
from harness.runs.stack import member

LOG, ENDS = "log.txt", ("DONE", "FAILED")
LOOK_SECONDS = 0.5  # between two looks at the folders
QUIET_SECONDS = 60.0  # between two lines of progress where there is no terminal
SHOWN_RUNNING = 3  # runs whose progress is shown


class Display:
    """Shows the progress of these runs in a thread, within `with`, and `results` of summary.json at their ends."""

    def __init__(self, folders: Sequence[Path], results: Sequence[str]) -> None:
        self.results = results
        several = len({folder.parents[1] for folder in folders}) > 1
        name = "{experiment} {size} {label} seed {seed}" if several else "{label} seed {seed}"
        self.names = {folder: name.format(**place_of(folder)) for folder in folders}
        self.before = {folder: _time(folder, *ENDS) for folder in self.names}
        self.state = {folder: "done" if (folder / "DONE").exists() else "waiting" for folder in self.names}
        self.minutes: list[float] = []  # of the runs that are done
        self.most_running = 1
        self.terminal = sys.stdout.isatty()
        self.said = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Display":
        if done := [folder for folder, state in self.state.items() if state == "done"]:
            here, metas = describe(), [read_meta(folder) for folder in done]
            older = [m for m in metas if here["dirty"] or m.get("dirty") or m.get("commit") != here["commit"]]
            note = f"; the files here may differ from the code of {len(older)} of them" * bool(older)
            print(f"{len(done)} of {len(self.names)} runs are finished already{note}", flush=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()
        self._show("", live=True)
        print(self.summary(), flush=True)

    def count(self, state: str) -> int:
        """Return the number of runs in a state: done, failed, running or waiting."""
        return sum(current == state for current in self.state.values())

    def look(self) -> None:
        """Read the folders, and print a line for each run that has ended since the last look."""
        for folder, name in self.names.items():
            state, mark = state_of(folder) if folder.is_dir() else "waiting", _time(folder, *ENDS)
            if mark == self.before[folder] is not None:
                continue  # no news; a run that failed before the sweep is about to start again
            self.state[folder] = "waiting" if state == "unfinished" else state
            if state not in ("done", "failed") or mark is None:  # which starts again at this moment
                continue
            self.before[folder] = mark
            if state == "failed":
                first = (read_text(folder / "FAILED").strip().splitlines() or ["no message"])[0]
                self._show(f"failed: {name}: {first} ({folder / LOG})")
            else:
                self.minutes.append(max(0, mark - (_time(folder, "meta.json") or mark)) / 6e10)
                self._show(f"{name}: {self._result(folder)}{_duration(self.minutes[-1])}")
        self.most_running = max(self.most_running, self.count("running"))

    def summary(self) -> str:
        """Return how many runs are done, running and failed, and the time left."""
        running = self.count("running")
        line = f"sweep: {self.count('done')} of {len(self.names)} done"
        if running:
            shown = [f for f, state in self.state.items() if state == "running"][:SHOWN_RUNNING]
            progress = ", ".join(f"{self.names[folder]}{_position(folder)}" for folder in shown)
            line += f", {running} running ({progress}{', ...' if running > SHOWN_RUNNING else ''})"
        if failed := self.count("failed"):
            line += f", {failed} failed"
        left = self.count("waiting") + running / 2  # on average, half of a running run is left
        if left and self.minutes:
            minutes = sum(self.minutes) / len(self.minutes) * left / self.most_running
            line += f"; about {_duration(minutes)} left"
        return line

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.look()
            if self.terminal:
                self._show(self.summary(), live=True)
            elif time.monotonic() - self.said >= QUIET_SECONDS:
                self.said = time.monotonic()
                self._show(self.summary())

    def _show(self, line: str, live: bool = False) -> None:
        """Print a line above the live line, or the live line itself, which the next one replaces."""
        text = printable(line)
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r\x1b[K" + (text[:width] if live else f"{text}\n"), end="", flush=True)
        elif line:
            print(text, flush=True)

    def _result(self, folder: Path) -> str:
        summary = read_json(folder / "summary.json") or {}
        found = [(name, summary.get(name)) for name in self.results]
        return "".join(f"{name} {value:.4g}, " for name, value in found if isinstance(value, int | float))


@contextmanager
def output_in(folder: Path) -> Iterator[None]:
    """Append what this process, or the run of a stack, writes to stdout and stderr to log.txt in the folder of a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / LOG).open("a", buffering=1)
    except OSError as error:
        raise UserError(f"cannot write in {folder}: {error.strerror}; choose another run.root") from error
    with log, ExitStack() as undo:  # in the opposite order
        if member() is not None:
            undo.enter_context(redirect_stdout(log))
            undo.enter_context(redirect_stderr(log))
        else:
            for number, stream in ((1, sys.stdout), (2, sys.stderr)):
                copy = os.dup(number)
                undo.callback(os.close, copy)
                undo.callback(os.dup2, copy, number)
                undo.callback(stream.flush)
                os.dup2(log.fileno(), number)
        yield


def _time(folder: Path, *names: str) -> int | None:
    """Return when the first of these files was written, in nanoseconds; None if there is none of them."""
    for name in names:
        with suppress(OSError):
            return (folder / name).stat().st_mtime_ns
    return None


def _duration(minutes: float) -> str:
    if minutes < 1.5:
        return f"{60 * minutes:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _position(folder: Path) -> str:
    """Return where a run stands, by the last line of its metrics or those of its shared first phase."""
    trunk = Path(str(read_meta(folder).get("trunk", ""))).name
    for place in (folder, folder.parents[3] / "trunks" / trunk):
        with suppress(OSError, ValueError, StopIteration, TypeError):
            with (place / METRICS).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                last = json.loads(next(line for line in reversed(file.readlines()) if line.endswith(b"}\n")))
            return "".join(f" {key} {last[key]}" for key in ("phase", "step") if key in last)
    return ""
