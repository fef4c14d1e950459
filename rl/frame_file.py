"""The memory-mapped file of a replay's frames, and checks that disk and memory are large enough."""

import math
import os
import shutil
from pathlib import Path

import numpy as np
import psutil

from fire_core.errors import UserError, first_line


def create_frames(path: Path, shape: tuple[int, ...]) -> np.memmap:
    """Return a new .npy file of zeros (rows, environments, height, width) uint8, mapped to be written.

    It is allocated on disk in full, so that a full disk raises an error here and does not crash the run later (on macOS
    only the free space is checked). Raises UserError where the disk is too small.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # left by a run that was killed before its first checkpoint
    require_disk(math.prod(shape), path.parent)
    try:
        frames = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:  # a quota, or another process that took the space
        path.unlink(missing_ok=True)
        raise UserError(
            f"replay file {path} of {math.prod(shape) / 1e9:.2f} GB cannot be written ({error.strerror}): "
            "lower replay_capacity, or move run.root"
        ) from error
    return frames


def open_frames(path: Path, row: tuple[int, ...], read_only: bool = False) -> np.memmap:
    """Return an existing file of frames, mapped; several processes share its pages.

    `row` is the shape (environments, height, width) that its rows must have. Raises UserError for a file that is missing
    or damaged.
    """
    remedy = f"delete {path.parents[1]} and run the same command again"
    if not path.exists():
        raise UserError(f"replay file {path} is missing: {remedy}")
    try:
        frames = np.load(path, mmap_mode="r" if read_only else "r+", allow_pickle=False)
    except Exception as error:  # numpy reads the header as Python, which may fail in many ways
        raise UserError(f"replay file {path} is damaged ({first_line(error)}): {remedy}") from error
    if frames.dtype != np.uint8 or frames.shape[1:] != row or not len(frames):
        raise UserError(f"replay file {path} is damaged ({frames.dtype} {frames.shape}): {remedy}")
    return frames


def require_disk(needed: int, folder: Path) -> None:
    """Raise UserError where the disk of the existing `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"the replay needs {needed / 1e9:.2f} GB of disk at {folder} but {free / 1e9:.2f} GB are free: "
            "lower replay_capacity, or move run.root"
        )


def free_memory() -> int:
    """Return the bytes of memory that are available without swapping, including the page cache."""
    return psutil.virtual_memory().available
