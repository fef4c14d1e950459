"""Copies of metrics.jsonl in wandb or trackio. Off by default; the file stays the record.

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


class Tracker:
    """A run in wandb or in trackio, which has the same three calls; the package is imported only here."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        self.package = importlib.import_module(name)
        self.package.init(project="fire", name="/".join(folder.parts[-4:]), config=config)

    def log(self, values: dict[str, Any]) -> None:
        self.package.log({k: v for k, v in values.items() if isinstance(v, int | float)})

    def close(self) -> None:
        self.package.finish()
