"""Copies of metrics.jsonl in a tracker. Off by default; the file stays the record.

A tracker gets only the lines that its own process logs, so none from before a resume or from a trunk of another run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fire_core.errors import UserError


class Tracker(Protocol):
    """The interface of a tracker."""

    def log(self, values: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


def open_tracker(name: str, folder: Path, config: dict[str, Any]) -> Tracker:
    """Return the tracker `name` (tensorboard, trackio or wandb), whose package is imported only here.

    Raises UserError for an unknown name or a missing package.
    """
    kinds: dict[str, Callable[[str, Path, dict[str, Any]], Tracker]]
    kinds = {"tensorboard": _TensorBoard, "trackio": _Project, "wandb": _Project}
    if name not in kinds:
        raise UserError(f"run.tracker={name!r}: choose none, {', '.join(kinds)}")
    try:
        return kinds[name](name, folder, config)
    except ImportError as error:
        raise UserError(f"run.tracker={name} needs a package: pip install {name}") from error


class _TensorBoard:
    def __init__(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, int | float) and key != "step":
                self.writer.add_scalar(key, value, values.get("step"))

    def close(self) -> None:
        self.writer.close()


class _Project:
    """wandb or trackio, which has the same three calls."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        import importlib

        self.package = importlib.import_module(name)
        self.package.init(project="fire", name="/".join(folder.parts[-4:]), config=config)

    def log(self, values: dict[str, Any]) -> None:
        self.package.log({k: v for k, v in values.items() if isinstance(v, int | float)})

    def close(self) -> None:
        self.package.finish()
