"""metrics.jsonl, the log of a run. On resuming, lines that are newer than the checkpoint are cut off."""

import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

from omegaconf import DictConfig

from fire_core.errors import UserError

METRICS = "metrics.jsonl"


def finite(value: float, what: str, cfg: DictConfig) -> float:
    """Return `value`. Raises UserError, which stops the run, if it is NaN or infinite."""
    if not math.isfinite(value):
        also = "" if cfg.precision == "fp32" else ", or precision=fp32"
        raise UserError(f"{what} is {value}: try a learning_rate below {cfg.learning_rate}{also}")
    return value


def open_metrics(folder: Path, size: int, source: Path | None = None) -> BinaryIO:
    """Open the metrics of `folder` for appending after their first `size` bytes, which a checkpoint counts, and cut off the
    rest; with `source`, after a copy of those of this folder. Raises UserError if there are fewer."""
    path, counted = folder / METRICS, (source or folder) / METRICS
    found = counted.read_bytes()[:size] if counted.is_file() else b""
    if len(found) < size:
        wrong = f"{counted} has {len(found)} bytes, but its checkpoint counts {size}: lines are lost"
        raise UserError(f"{wrong}; put the file back, or delete {counted.parent} to start over")
    if source is not None:
        path.write_bytes(found)
    path.touch()
    os.truncate(path, size)
    return path.open("ab")


def as_line(values: dict[str, Any]) -> str:
    """Return the values as one line of JSON, with null for NaN and infinity."""
    return json.dumps({name: plain(value) for name, value in values.items()}, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """Return a tensor or numpy value as Python numbers, and NaN or infinity as None (null in JSON)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return None if isinstance(value, float) and not math.isfinite(value) else value
