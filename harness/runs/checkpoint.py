"""Checkpoints: one file each, written aside and renamed, read back without executing anything."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

import torch

from fire_core.checkpoints.atomic import remove_torn, written_aside
from fire_core.errors import UserError
from harness.runs.folders import read_meta

PREFIX = "step_"
START_OVER = "delete its run folder to start over"


def save(folder: Path, step: int, parts: dict[str, Any], *, name: str | None = None, keep: int = 2) -> Path:
    """Save `parts` (tensors, plain values, containers of them) as `step_<n>.pt`, or as `<name>.pt`, kept for good.

    Of the unnamed ones the last `keep` stay. A failed write (disk full, no permission) leaves the old ones untouched.
    """
    check_keep(keep)
    path = folder / (f"{name}.pt" if name else f"{_stem(step)}.pt")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_torn(folder)
        with written_aside(path) as aside, aside.open("wb") as file:
            torch.save(parts, file)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"cannot write checkpoint {path}: {_reason(error, folder)}; earlier checkpoints are intact, free space or "
            "permissions there and run the same command again"
        ) from error
    for old in _numbered(folder)[:-keep]:
        old.unlink()
    drop_shards(folder, path.stem, parts.get("shards", ""))
    return path


def shards(folder: Path, step: int, name: str | None = None) -> Path:
    """A free folder for what several processes write of the checkpoint that `save` is then given, as `parts["shards"]`."""
    return folder / f"{name or _stem(step)}.{secrets.token_hex(4)}.shards"


def drop_shards(folder: Path, stem: str = "", kept: str = "") -> None:
    """Delete the shards of checkpoints that are gone, and those of checkpoint `stem` other than `kept`."""
    for path in folder.glob("*.shards"):
        owner = path.name.split(".")[0]
        if not (folder / f"{owner}.pt").exists() or (owner == stem and path.name != kept):
            shutil.rmtree(path)


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
    remedy_damaged = remedy or f"delete it to resume from the one before, or {START_OVER}"
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"checkpoint {path} does not exist: {remedy or START_OVER}") from None
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(f"checkpoint {path} cannot be read ({reason}): {remedy_damaged}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise UserError(f"checkpoint {path} holds a {kind}, not the parts of a run: {remedy_damaged}")
    if "shards" in content:
        content["shards"] = str(path.parent / content["shards"])
        if not Path(content["shards"]).is_dir():
            raise UserError(f"{content['shards']}, a part of checkpoint {path}, is gone: {remedy_damaged}")
    return content


def _stem(step: int) -> str:
    return f"{PREFIX}{step:012d}"


def _numbered(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*.pt"))


def check_owner(path: Path, parts: dict[str, Any], owner: str | None) -> None:
    """Refuse the checkpoint of another config; those of earlier versions do not tell."""
    if not isinstance(parts.get("_metrics_bytes"), int):
        raise UserError(f"checkpoint {path} is not a checkpoint of a run: delete it, or {START_OVER}")
    known = parts.get("_identity")
    if known not in (None, owner):
        raise UserError(
            f"checkpoint {path} belongs to config {known}, this run is {owner}: "
            f"delete {path.parent.parent}, or choose another run.root"
        )


def identity_of(folder: Path) -> str | None:
    """Return the identity of the run in `folder`: from meta.json, or from a checkpoint if that file is lost or damaged."""
    identity = read_meta(folder).get("identity")
    if isinstance(identity, str):
        return identity
    saved = sorted((folder / "checkpoint").glob("*.pt"))
    return load(saved[-1]).get("_identity") if saved else None
