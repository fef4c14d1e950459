"""The one way in which this project writes a file or folder: readers see the old content or the new, never a part."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TORN = ".torn"


@contextmanager
def written_aside(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """A free path beside `target`, for a file or a folder, that takes its name when the body has ended without an error.

    An existing file is replaced in one step. After an error, Ctrl-C included, nothing is left. A process that is killed
    leaves what it wrote under a hidden name, which `remove_torn` deletes. durable: have it on the disk first, so that it
    survives a power failure (slow for very many files).
    """
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}{TORN}")
    try:
        yield aside
        files = [path for path in aside.rglob("*") if path.is_file()] if aside.is_dir() else [aside]
        for path in files if durable else ():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(aside, target)
    finally:
        _remove(aside)


def write_atomic(path: Path, text: str) -> None:
    """Write a small text file as a whole."""
    with written_aside(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        file.write(text)


def remove_torn(folder: Path) -> None:
    """Delete what a killed process has left in `folder`; nobody else may be writing there."""
    for torn in folder.glob(f".*{TORN}"):
        _remove(torn)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
