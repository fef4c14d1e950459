"""Files: written atomically, so that readers see the old content or the new, and torch files read without running code."""

import os
import pickle
import secrets
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fire_core.errors import UserError, first_line

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


def load_torch(path: Path, remedy: str = "fetch it again, or save weights alone", mapped: bool = True) -> Any:
    """Return what `torch.save` wrote, on the CPU and `mapped`. Code in the file is not run.

    torch.load checks no checksum and maps compressed records as if they were not, so both are checked here. Raises
    UserError, which ends in `remedy`, for a file that is damaged or unsafe.
    """
    try:
        reason, zipped = "", zipfile.is_zipfile(path)
        if zipped:
            with zipfile.ZipFile(path) as archive:
                if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                    reason = " (it is compressed, which torch.save never does)"
                elif record := archive.testzip():
                    reason = f" (record {record!r} differs from its checksum)"
        if not reason:
            more = {Namespace} - {*torch.serialization.get_safe_globals()}  # timm saves its command line
            with torch.serialization.safe_globals([*more]):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipped)
    except pickle.UnpicklingError:  # its message advises to load without the safety
        reason = " safely: it holds more than tensors and plain values, which could run code"
    except Exception as error:
        reason = f" ({first_line(error)})"
    raise UserError(f"{path} cannot be read{reason}: {remedy}")


def remove_torn(folder: Path) -> None:
    """Delete what killed processes have left in `folder`; no other process may be writing there."""
    for torn in folder.glob(f".*{TORN}"):
        _remove(torn)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
