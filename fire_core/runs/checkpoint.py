"""Checkpoints: one file each, written aside and renamed, read back without executing anything."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from fire_core.errors import UserError

PREFIX = "step_"
START_OVER = "delete its run folder to start over"


def write_atomic(path: Path, text: str) -> None:
    """Write a small text file so that readers see the old or the new content, never a part."""
    with _aside(path) as (handle, temporary):
        handle.write(text.encode())
        _publish(handle, temporary, path)


def save(folder: Path, step: int, parts: dict[str, Any], *, name: str | None = None, keep: int = 2) -> Path:
    """Save `parts` (tensors, plain values, containers of them) as `step_<n>.pt`, or as `<name>.pt`, kept for good.

    Of the unnamed ones the last `keep` stay. A failed write (disk full, no permission) leaves the old ones untouched.
    """
    check_keep(keep)
    path = folder / (f"{name}.pt" if name else f"{PREFIX}{step:012d}.pt")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_torn(folder)
        with _aside(path) as (handle, temporary):
            torch.save(parts, handle)
            _publish(handle, temporary, path)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"cannot write checkpoint {path}: {_reason(error, folder)}; earlier checkpoints are intact, free space or "
            "permissions there and run the same command again"
        ) from error
    for old in _numbered(folder)[:-keep]:
        old.unlink()
    return path


def remove_torn(folder: Path) -> None:
    """Delete what a process that was killed while it wrote has left in `folder`; nobody else may be writing there."""
    for torn in folder.glob(".*.torn"):
        torn.unlink(missing_ok=True)


def _reason(error: Exception, folder: Path) -> str:
    """The system's words; PyTorch's writer hides a full disk in an internal message, so there the free space."""
    if isinstance(error, OSError) or not folder.is_dir():
        return str(error)
    return f"the file could not be written in full, {shutil.disk_usage(folder).free / 1e6:,.0f} MB of disk are free"


def check_keep(keep: int) -> None:
    """Refuse a number of checkpoints that would keep none."""
    if not isinstance(keep, int) or keep < 1:
        raise UserError(
            f"run.keep={keep!r}: give a whole number, 1 or more; the last checkpoint always stays"
        )


def latest(folder: Path) -> Path | None:
    """Newest numbered checkpoint of a folder."""
    numbered = _numbered(folder)
    return numbered[-1] if numbered else None


def load(path: Path, device: str | torch.device = "cpu", remedy: str = "") -> dict[str, Any]:
    """Read a checkpoint; weights-only loading, so a file from elsewhere can hold data but no code.

    `remedy` ends the message where the file is missing or damaged, if not what suits a run's own.
    """
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"checkpoint {path} does not exist: {remedy or START_OVER}") from None
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        remedy = remedy or f"delete it to go on from the one before, or {START_OVER}"
        raise UserError(f"checkpoint {path} cannot be read ({reason}): {remedy}") from error


def _numbered(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*.pt"))


class _aside:
    """An open temporary file beside `path`, removed unless it was published."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> tuple[Any, Path]:
        number, name = tempfile.mkstemp(".torn", f".{self.path.name}.", self.path.parent)
        self.temporary = Path(name)
        self.handle = os.fdopen(number, "wb")
        return self.handle, self.temporary

    def __exit__(self, *_: object) -> None:
        self.handle.close()
        self.temporary.unlink(missing_ok=True)


def _publish(handle: Any, temporary: Path, path: Path) -> None:
    handle.flush()
    os.fsync(handle.fileno())
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
