"""metrics.jsonl, the log of a run. On resuming, lines that are newer than the checkpoint are cut off."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fire_core.errors import UserError

METRICS = "metrics.jsonl"


def finite(value: float, what: str, cfg: DictConfig) -> float:
    """Return `value`. Raises UserError, which stops the run, if it is NaN or infinite."""
    if not math.isfinite(value):
        also = "" if cfg.precision == "fp32" else ", or precision=fp32"
        raise UserError(f"{what} is {value}: try a learning_rate below {cfg.learning_rate}{also}")
    return value


class MetricsFile:
    """The metrics of one folder. `open_at` or `open_copy` opens the file for appending."""

    def __init__(self) -> None:
        self._file: Any = None

    def open_at(self, folder: Path, size: int) -> None:
        """Open the file for appending after its first `size` bytes; cut off the rest. Raises UserError for fewer."""
        self.close()
        path = folder / METRICS
        path.touch()
        first_bytes(path, size)
        self._file = path.open("r+b")
        self._file.truncate(size)
        self._file.seek(size)

    def open_copy(self, source: Path, folder: Path, size: int) -> None:
        """Open the file for appending after a copy of the first `size` bytes of the metrics in `source`."""
        (folder / METRICS).write_bytes(first_bytes(source / METRICS, size))
        self.open_at(folder, size)

    def append(self, values: dict[str, Any]) -> None:
        """Append one line, with null for NaN and infinity."""
        self._file.write(as_line(values, allow_nan=False).encode())
        self._file.flush()

    def to_disk(self) -> int:
        """Wait until every line is on the disk and return the size in bytes, which the next checkpoint stores."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def first_bytes(path: Path, size: int) -> bytes:
    """Return the first `size` bytes of a file, which a checkpoint counts. Raises UserError if the file has fewer."""
    found = path.read_bytes()[:size] if path.is_file() else b""
    if len(found) < size:
        raise UserError(
            f"{path} has {len(found)} bytes, but its checkpoint counts {size}: lines are lost; "
            f"put the file back, or delete {path.parent} to start over"
        )
    return found


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
