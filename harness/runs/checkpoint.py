"""Checkpoints of runs: one file each, written under another name and renamed, loaded with weights_only=True."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from fire_core.errors import UserError, first_line, printable
from fire_core.files import load_torch, remove_torn, written_aside
from harness.runs.folders import fingerprint, read_config, read_meta

Parts = dict[str, Any]  # of a checkpoint, with its path
PREFIX = "step_"
START_OVER = "delete its run folder to start over"


def save(folder: Path, step: int, parts: dict[str, Any], *, name: str | None = None, keep: int = 2) -> Path:
    """Save `parts` (tensors, plain values, containers of them) as `step_<n>.pt` or `<name>.pt`, and return the path.

    Named checkpoints stay, and the last `keep` unnamed ones. Raises UserError if the file cannot be written (disk full,
    no permission); older checkpoints are then untouched.
    """
    path = folder / f"{name or f'{PREFIX}{step:012d}'}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_torn(folder)
        with written_aside(path) as aside, aside.open("wb") as file:
            torch.save(parts, file)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        free = shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.is_dir())).free
        raise UserError(
            f"cannot write checkpoint {path} ({first_line(error)}; {free / 1e6:,.0f} MB of disk are free): earlier "
            "checkpoints are intact, free space or permissions there and run the same command again"
        ) from error
    for old in _numbered(folder)[:-keep]:
        old.unlink()
    return path


def load_latest(folder: Path) -> Parts | None:
    """Return the newest unnamed checkpoint that can be read, None if there is none; print which are left out."""
    oldest, *newer = _numbered(folder) or [None]
    for path in reversed(newer):
        try:
            return load(path)
        except UserError as error:
            print(printable(f"note: {error}; it is left out"), flush=True)
    return load(oldest) if oldest else None


def load(path: Path, remedy: str = "") -> Parts:
    """Return the parts of a checkpoint. Raises UserError if it is missing, damaged or unsafe, with `remedy` as advice."""
    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist: {remedy or START_OVER}")
    remedy = remedy or f"delete it to resume from the one before, or {START_OVER}"
    return load_torch(path, remedy, mapped=False) | {"_path": path}


def _numbered(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*.pt"))


def check_owner(parts: Parts, owner: str | None) -> None:
    """Raise UserError if a checkpoint is not that of a run of this config."""
    path = parts["_path"]
    if parts["_identity"] != owner:
        raise UserError(
            f"checkpoint {path} belongs to config {parts['_identity']}, this run is {owner}: "
            f"delete {path.parent.parent}, or choose another run.root"
        )


def identity_of(folder: Path) -> str | None:
    """Return the identity of the run in `folder`, from meta.json, else from its settings; None if it has neither."""
    if identity := read_meta(folder).get("identity"):
        return identity
    return fingerprint(config) if (config := read_config(folder)) else None
