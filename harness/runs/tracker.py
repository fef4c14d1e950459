"""One-way mirrors of metrics.jsonl to a tracker. Off by default; the file stays the record.

A mirror begins with its process: a run that is resumed, or forked from a trunk, is a new run there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fire_core.errors import UserError


class Tracker(Protocol):
    """What a mirror must do."""

    def log(self, values: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


def open_tracker(name: str, folder: Path, config: dict[str, Any]) -> Tracker:
    """Mirror `name`: tensorboard, trackio or wandb; the package is imported only here."""
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
    """wandb, and trackio, which has the same three calls."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        import importlib

        self.package = importlib.import_module(name)
        self.package.init(project="fire", name="/".join(folder.parts[-4:]), config=config)

    def log(self, values: dict[str, Any]) -> None:
        self.package.log({k: v for k, v in values.items() if isinstance(v, int | float)})

    def close(self) -> None:
        self.package.finish()
