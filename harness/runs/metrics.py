"""metrics.jsonl, the log of a run. On resuming, lines that are newer than the checkpoint are cut off."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fire_core.errors import UserError

METRICS = "metrics.jsonl"


class MetricsFile:
    """The metrics of one folder, opened for appending.

    `append` and `to_disk` raise RuntimeError before `open_at` or `open_copy`.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def open_at(self, folder: Path, size: int) -> None:
        """Open the file for appending after its first `size` bytes, the number in the checkpoint; cut off the rest.

        Raises UserError if the file is shorter.
        """
        self.close()
        path = folder / METRICS
        path.touch()
        check_size(path, size)
        self._handle = path.open("r+b")
        self._handle.truncate(size)
        self._handle.seek(size)

    def open_copy(self, source: Path, folder: Path, size: int) -> None:
        """Open the file for appending after a copy of the first `size` bytes of the metrics in `source`."""
        check_size(source / METRICS, size)
        with (source / METRICS).open("rb") as lines:
            (folder / METRICS).write_bytes(lines.read(size))
        self.open_at(folder, size)

    def append(self, values: dict[str, Any]) -> None:
        """Append one line, with null for NaN and infinity."""
        self._file.write(as_line(values, allow_nan=False).encode())
        self._file.flush()

    def to_disk(self) -> int:
        """Wait until every line is on the disk and return the size in bytes, which the next checkpoint stores."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    @property
    def _file(self) -> Any:
        if self._handle is None:
            raise RuntimeError("call Run.resume() before logging or saving")
        return self._handle


def check_size(path: Path, size: int) -> None:
    """Raise UserError if the file has fewer than the `size` bytes that a checkpoint counts."""
    actual = path.stat().st_size if path.is_file() else 0
    if actual < size:
        raise UserError(
            f"{path} has {actual} bytes, but its checkpoint counts {size}: lines are lost; "
            f"put the file back, or delete {path.parent} to start over"
        )


def as_line(values: dict[str, Any], *, allow_nan: bool = True) -> str:
    """Return the values as one line of JSON."""
    return json.dumps({name: plain(value) for name, value in values.items()}, allow_nan=allow_nan) + "\n"


def plain(value: Any) -> Any:
    """Return a tensor or numpy value as Python numbers, and NaN or infinity as None (null in JSON)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
