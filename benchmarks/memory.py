"""Peak memory: resident memory of this process (Linux only), or GPU memory of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Peak:
    """Result of `peak_memory`. `extra` is the largest rise above the start in bytes, set when the block ends."""

    extra: int = 0


@contextmanager
def peak_memory(gpu: bool = False) -> Iterator[Peak]:
    """Measure the peak of the memory inside the block. Memory that the process had freed before and uses again is not
    seen on a CPU. Raises OSError where /proc has no such figures."""
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
