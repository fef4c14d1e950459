"""Copies of metrics.jsonl in a tracker. Off by default; the file stays the record.

A tracker gets only the lines that its own process logs, so none from before a resume or from a trunk of another run.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from fire_core.errors import UserError


def check_tracker(name: str) -> None:
    """Raise UserError if the package of a tracker is missing."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(f"run.tracker={name} needs a package: pip install {name}")


def open_tracker(name: str, folder: Path, config: dict[str, Any]) -> TensorBoard | Project | None:
    """Return the tracker of this name, whose package is imported only here; None for "none"."""
    if name == "none":
        return None
    return TensorBoard(folder) if name == "tensorboard" else Project(name, folder, config)


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, int | float) and key != "step":
                self.writer.add_scalar(key, value, values.get("step"))

    def close(self) -> None:
        self.writer.close()


class Project:
    """wandb or trackio, which has the same three calls."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        self.package = importlib.import_module(name)
        self.package.init(project="fire", name="/".join(folder.parts[-4:]), config=config)

    def log(self, values: dict[str, Any]) -> None:
        self.package.log({k: v for k, v in values.items() if isinstance(v, int | float)})

    def close(self) -> None:
        self.package.finish()
