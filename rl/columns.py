"""Named arrays with a common first axis, in memory or as one .npy file each in a folder."""

import os
import shutil
from pathlib import Path

import numpy as np
import psutil

from fire_core.errors import UserError, first_line

Specification = dict[str, tuple[str, tuple[int, ...]]]


class Columns:
    """Several arrays of `rows` rows each, in memory (`folder=None`) or memory-mapped.

    New files are allocated on disk in full, so that a full disk raises an error here and does not crash the run later
    (on macOS only the free space is checked). `existing` maps the files that `folder` holds, with `read_only` for
    reading alone; several processes then share the pages.

    Raises UserError where memory or disk is too small, or where an existing file is missing, damaged or of another
    shape.
    """

    def __init__(
        self,
        specification: Specification,
        rows: int,
        folder: str | Path | None = None,
        *,
        existing: bool = False,
        read_only: bool = False,
    ):
        self.folder = None if folder is None else Path(folder)
        self.arrays: dict[str, np.ndarray] = {}
        needed = size_of(specification, rows)
        if self.folder is None:
            _require(needed, free_memory(), "memory", "lower replay_capacity (DQN) or replay (SAC)")
        elif not existing:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in specification:  # left by a run that was killed before its first checkpoint
                self._path(name).unlink(missing_ok=True)
            require_disk(needed, self.folder)
        for name, (kind, shape) in specification.items():
            self.arrays[name] = self._open(name, np.dtype(kind), (rows, *shape), existing, read_only)

    def _open(
        self, name: str, kind: np.dtype, shape: tuple[int, ...], existing: bool, read_only: bool
    ) -> np.ndarray:
        if self.folder is None:
            return np.zeros(shape, kind)
        path = self._path(name)
        if existing:
            return _map_existing(path, kind, shape, "r" if read_only else "r+")
        try:
            array = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
            _allocate(path)
        except OSError as error:  # a quota, or another process that took the space
            path.unlink(missing_ok=True)
            gigabytes = f"{np.prod(shape) * kind.itemsize / 1e9:.2f} GB"
            raise UserError(
                f"replay file {path} of {gigabytes} cannot be written ({error.strerror}): "
                "lower replay_capacity, or move run.root"
            ) from error
        return array

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.npy"

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def flush(self) -> None:
        """Write changed pages of mapped files to the disk. The cost grows with the pages changed since the last
        call."""
        for array in self.arrays.values():
            if isinstance(array, np.memmap):
                array.flush()

    @property
    def bytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(array.nbytes for array in self.arrays.values())


def size_of(specification: Specification, rows: int) -> int:
    """Return the bytes that `rows` rows take."""
    return rows * sum(np.dtype(kind).itemsize * int(np.prod(s)) for kind, s in specification.values())


def require_disk(needed: int, folder: Path) -> None:
    """Raise UserError where the disk of the existing `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    _require(needed, free, f"disk at {folder}", "lower replay_capacity, or move run.root")


def _allocate(path: Path) -> None:
    """Reserve disk space for every byte of an existing file, where the system supports this; macOS does not."""
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def stored_rows(path: Path) -> int | None:
    """Return the number of rows of an .npy file, or None if it is missing or damaged."""
    try:
        return len(np.load(path, mmap_mode="r", allow_pickle=False))
    except Exception:
        return None


def _map_existing(path: Path, kind: np.dtype, shape: tuple[int, ...], mode: str) -> np.ndarray:
    remedy = f"delete {path.parents[1]} and run the same command again"
    if not path.exists():
        raise UserError(f"replay file {path} is missing: {remedy}")
    try:
        array = np.load(path, mmap_mode=mode, allow_pickle=False)
    except Exception as error:  # numpy reads the header as Python, which may fail in many ways
        raise UserError(f"replay file {path} is damaged ({first_line(error)}): {remedy}") from error
    if array.dtype != kind or array.shape != shape:
        found, wanted = f"{array.dtype} {array.shape}", f"{kind} {shape}"
        raise UserError(f"replay file {path} holds {found}, the configuration asks for {wanted}: {remedy}")
    return array


def free_memory() -> int:
    """Return the bytes of memory that are available without swapping, including the page cache."""
    return psutil.virtual_memory().available


def _require(needed: int, free: int, what: str, advice: str) -> None:
    if needed > free:
        gigabytes = f"{needed / 1e9:.2f} GB of {what} but {free / 1e9:.2f} GB are free"
        raise UserError(f"the replay needs {gigabytes}: {advice}")
