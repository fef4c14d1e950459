"""Time and peak memory of a piece of work, on a CPU or a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


def seconds(work: Callable[[], object], device: torch.device | str = "cpu", wall: bool = False) -> float:
    """Return the seconds that `work` takes: processor time on a CPU, or wall-clock time with `wall`; on a GPU always
    wall-clock time, and the GPU is synchronised before and after."""
    gpu = torch.device(device).type == "cuda"
    clock = time.perf_counter if gpu or wall else time.process_time
    if gpu:
        torch.cuda.synchronize()
    started = clock()
    work()
    if gpu:
        torch.cuda.synchronize()
    return clock() - started


@dataclass
class Peak:
    """Result of `peak_memory`. `extra` is the largest rise above the start in bytes, set when the block ends."""

    extra: int = 0


@contextmanager
def peak_memory(gpu: bool = False) -> Iterator[Peak]:
    """Measure the peak of the memory inside the block: resident memory of this process (Linux only), or with `gpu` that
    of tensors. Memory that the process had freed before and uses again is not
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
