"""A journal that the runs of a sweep share across processes: how many are done, and what failed.

The command that starts the sweep creates the journal and names it in the environment. Each run appends a line when it
begins and when it ends, and prints the progress of the sweep.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

JOURNAL = "FIRE_SWEEP_JOURNAL"  # environment variable: path of the journal
ENDS = ("done", "failed")


@contextmanager
def journal(runs: int) -> Iterator[Path]:
    """Create the journal of a sweep and yield its path, which child processes find in the environment."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        os.environ[JOURNAL] = str(path)
        _append(path, {"event": "start", "runs": runs, "time": time.time()})
        try:
            yield path
        finally:
            del os.environ[JOURNAL]


def note(event: str, run: str, message: str = "") -> bool:
    """Note that a run began or ended ("running", "done", "failed"); at its end, print the sweep's progress.

    Returns False if there is no journal: the run is not part of a sweep, or its machine does not see the file.
    """
    path = Path(os.environ.get(JOURNAL, ""))
    if not path.is_file():
        return False
    _append(path, {"event": event, "run": run, "message": message, "time": time.time()})
    if event in ENDS:
        print(progress(entries(path)), flush=True)
    return True


def said_before(message: str) -> bool:
    """Return whether another run of the sweep has failed with the same message, its first line."""
    path = Path(os.environ.get(JOURNAL, ""))
    return path.is_file() and any(
        entry["event"] == "failed" and entry["message"] == message for entry in entries(path)[1:]
    )


def entries(path: Path) -> list[dict[str, Any]]:
    """Return all lines of the journal, parsed."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def progress(noted: list[dict[str, Any]]) -> str:
    """Return one line: how many runs are done, running and failed, their total, and the time left."""
    runs, began, durations, failed = noted[0]["runs"], {}, [], 0
    for entry in noted[1:]:
        if entry["event"] == "running":
            began[entry["run"]] = entry["time"]
        else:
            durations.append(entry["time"] - began.pop(entry["run"], entry["time"]))
            failed += entry["event"] == "failed"
    ended = len(durations)
    line = f"sweep: {ended - failed} done, {len(began)} running, {failed} failed, of {runs or '?'}"
    # runs that were finished before the sweep end at once; their duration says nothing about the others
    trained = [seconds for seconds in durations if seconds >= 0.1 * max(durations)]
    if runs > ended and trained:
        left = sum(trained) / len(trained) * (runs - ended) / (len(began) + 1)
        line += f"; about {_duration(left)} left"
    return line


def failures(noted: list[dict[str, Any]]) -> str:
    """Return each message of failure once, with its runs; "" if no run failed."""
    runs: dict[str, list[str]] = {}
    for entry in noted:
        if entry["event"] == "failed":
            runs.setdefault(entry["message"], []).append(entry["run"])
    lines = []
    for message, which in runs.items():
        more = f" and {len(which) - 3} more" if len(which) > 3 else ""
        lines.append(f"  {'; '.join(which[:3])}{more}: {message}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _append(path: Path, entry: dict[str, Any]) -> None:
    with path.open("a") as handle:  # a single short write, so that lines of several processes do not mix
        handle.write(json.dumps(entry) + "\n")
