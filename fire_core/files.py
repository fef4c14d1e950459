"""Atomic writing of files and folders: readers see the old content or the new, never a part."""

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
    """Yield a free path beside `target`, for a file or folder, and rename it to `target` if the body raises no error.

    An existing file is replaced in one step. After an error, Ctrl-C included, nothing is left. A process that is killed
    leaves what it wrote under a hidden name, which `remove_torn` deletes. durable: flush the files to disk before the
    renaming, so that their content survives a power failure (slow for very many files).
    """
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}{TORN}")
    try:
        yield aside
        files = [path for path in aside.rglob("*") if path.is_file()] if aside.is_dir() else [aside]
        for path in files if durable else ():
            with path.open("rb") as file:  # copies may be read-only
                os.fsync(file.fileno())
        os.replace(aside, target)
    finally:
        _remove(aside)


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8 and replace an existing file in one step."""
    with written_aside(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        file.write(text)


def remove_torn(folder: Path) -> None:
    """Delete what killed processes have left in `folder`; no other process may be writing there."""
    for torn in folder.glob(f".*{TORN}"):
        _remove(torn)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
