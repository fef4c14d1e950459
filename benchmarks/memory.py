"""Peak memory: resident memory of this process, as Linux tells it, or the GPU memory that its tensors take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Peak:
    """`extra`: bytes by which the memory rose above its level at the start, at most; set at the end."""

    extra: int = 0


@contextmanager
def peak_memory(gpu: bool = False) -> Iterator[Peak]:
    """Measure the peak inside the block. Memory of the process that was freed before and is used again does not show."""
    found = Peak()
    if gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield found
        found.extra = torch.cuda.max_memory_allocated() - before
        return
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    yield found
    found.extra = _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: memory is measured on Linux only")
