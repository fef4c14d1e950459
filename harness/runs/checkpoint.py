"""Checkpoints of runs: one file each, written under another name and renamed, loaded with weights_only=True."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fire_core.errors import UserError, first_line, printable
from fire_core.files import load_torch, remove_torn, written_aside
from harness.runs.stack import member

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
            torch.save(tree_map_only(torch.Tensor, _alone, parts) if member() else parts, file)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        if isinstance(error, RuntimeError) and "CUDA" in str(error):  # of an earlier call
            raise
        free = shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.is_dir())).free
        raise UserError(
            f"cannot write checkpoint {path} ({first_line(error)}; {free / 1e6:,.0f} MB of disk are free): earlier "
            "checkpoints are intact, free space or permissions there and run the same command again"
        ) from error
    delete_unnamed(folder, keep)
    return path


def _alone(part: torch.Tensor) -> torch.Tensor:
    """Return a view as a tensor of its own: `torch.save` would write its storage, which holds all networks of a stack."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()


def delete_unnamed(folder: Path, keep: int = 0) -> None:
    """Delete the unnamed checkpoints in `folder` but the last `keep`."""
    for path in _unnamed(folder)[: -keep or None]:
        path.unlink()


def _unnamed(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*.pt"))


def load_latest(folder: Path) -> "Parts | None":
    """Return the parts of the newest unnamed checkpoint that can be read, None if there is none. Prints a line about each
    newer one that is damaged. Raises UserError if all are."""
    for path in reversed(paths := _unnamed(folder)):
        try:
            return load(path)
        except UserError as error:
            if path == paths[0]:
                raise
            print(printable(f"note: {error}; it is left out"), flush=True)
    return None


class Parts(dict[str, Any]):
    """The parts of the checkpoint at `path`; one that is not there raises UserError."""

    def __init__(self, parts: dict[str, Any], path: Path) -> None:
        super().__init__(parts)
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise UserError(f"checkpoint {self.path} has no part {name!r}: delete it, or {START_OVER}")

    def check_owner(self, owner: str) -> None:
        """Raise UserError if this is not a checkpoint of the run or trunk with the identity `owner`."""
        if self["_identity"] != owner:
            wrong = f"checkpoint {self.path} belongs to config {self['_identity']}, this run is {owner}"
            raise UserError(f"{wrong}: delete {self.path.parent.parent}, or choose another run.root")


def load(path: Path, remedy: str = "") -> Parts:
    """Return the parts of a checkpoint. Raises UserError if it is missing, damaged or unsafe, with `remedy` as advice."""
    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist: {remedy or START_OVER}")
    remedy = remedy or f"delete it to resume from the one before, or {START_OVER}"
    content = load_torch(path, remedy, mapped=False)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not the parts of a run: {remedy}")
    return Parts(content, path)
