"""metrics.jsonl: lines that are appended, and cut off again after the checkpoint from which a run resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fire_core.errors import UserError

METRICS = "metrics.jsonl"


class MetricsFile:
    """The metrics of one folder, opened for appending. Methods raise RuntimeError before `open_at`."""

    def __init__(self) -> None:
        self._handle: Any = None

    def open_at(self, folder: Path, size: int) -> None:
        """Open the file for appending after its first `size` bytes, which a checkpoint counts. The rest is cut off."""
        self.close()
        path = folder / METRICS
        path.touch()
        check_size(path, size)
        self._handle = path.open("r+b")
        self._handle.truncate(size)
        self._handle.seek(size)

    def open_copy(self, source: Path, folder: Path, size: int) -> None:
        """Begin with the first `size` bytes of the metrics in another folder."""
        check_size(source / METRICS, size)
        with (source / METRICS).open("rb") as lines:
            (folder / METRICS).write_bytes(lines.read(size))
        self.open_at(folder, size)

    def append(self, values: dict[str, Any]) -> None:
        """One line; NaN and infinity become null."""
        self._file.write(as_line(values, allow_nan=False).encode())
        self._file.flush()

    def to_disk(self) -> int:
        """Wait until every line is on the disk, for a checkpoint must not outlive the lines it counts; returns the size."""
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
    """Refuse to resume from a checkpoint whose metrics are lost."""
    actual = path.stat().st_size if path.is_file() else 0
    if actual < size:
        raise UserError(
            f"{path} has {actual} bytes, but its checkpoint counts {size}: lines are lost; "
            f"put the file back, or delete {path.parent} to start over"
        )


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines of a finished run."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def as_line(values: dict[str, Any], *, allow_nan: bool = True) -> str:
    return json.dumps({name: plain(value) for name, value in values.items()}, allow_nan=allow_nan) + "\n"


def plain(value: Any) -> Any:
    """Tensors and numpy scalars as Python numbers; NaN and infinity as null, which JSON has."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
