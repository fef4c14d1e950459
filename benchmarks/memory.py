"""Resident memory of this process, as Linux tells it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Peak:
    """`extra`: bytes by which the resident memory rose above its level at the start, at most; set at the end."""

    extra: int = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure the peak inside the block. Memory that was freed before and is used again does not show."""
    found = Peak()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    yield found
    found.extra = _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: memory is measured on Linux only")
