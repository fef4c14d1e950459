"""What the benchmarks share: time, peak memory, variants that take turns, and their lines in analysis/results."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch

from analysis.rendering import short
from analysis.runs import RESULTS
from fire_core.files import write_atomic
from harness.runs.machine import describe


def parser(text: str) -> argparse.ArgumentParser:
    """Return a parser whose help shows the docstring of a script as it is written."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


# ------------------------------------------------------------------------------------------------ time and memory
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


@contextmanager
def peak_memory(gpu: bool = False) -> Iterator[SimpleNamespace]:
    """Measure the peak of the memory inside the block: resident memory of this process (Linux only), or with `gpu` that
    of tensors. On a CPU, memory that the process had freed before and uses again is not seen. Raises OSError where
    /proc has no such figures. What is yielded has the rise above the start in bytes as `extra` when the block ends."""
    found = SimpleNamespace(extra=0)
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


def in_new_process(module: str, *arguments: object) -> dict[str, float]:
    """Return the JSON that `python -m benchmarks.module ARGUMENTS` prints. In this process, memory that earlier work has
    freed would hide the peak."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


# ------------------------------------------------------------------------------------------------ variants
def take_turns(
    variants: Mapping[str, Any], rounds: int, measure: Callable[[Any], float]
) -> dict[str, list[float]]:
    """Return what `measure` returns for each variant, seconds or a rate, in each round.

    The variants take turns, every second round in the opposite order, so that other work on the machine slows all of
    them. A round before the first is not counted: it compiles, and fills the buffers of libraries.
    """
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name in list(variants)[:: -1 if number % 2 else 1]:
            value = measure(variants[name])
            if number > 0:
                found[name].append(value)
    return found


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median over the rounds of one variant's value divided by another's."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def record(name: str, rows: Sequence[dict[str, Any]], key: Sequence[str]) -> None:
    """Print `rows` and write them into analysis/results/`name`.csv, over lines with the same values under `key`. Each new
    line gets the version of torch, commit, hardware and time. The file is replaced in one step."""
    about, path = describe(), RESULTS / f"{name}.csv"
    machine = {"torch": about["versions"]["torch"]} | {
        key: about[key] for key in ("commit", "hardware", "started")
    }
    cells = [{column: "" if value is None else str(value) for column, value in row.items()} for row in rows]
    fresh = pd.DataFrame(cells).assign(**machine)
    older = pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else fresh[:0]
    renewed = pd.MultiIndex.from_frame(fresh[list(key)])
    kept = older[~pd.MultiIndex.from_frame(older.reindex(columns=list(key), fill_value="")).isin(renewed)]
    table = pd.concat([kept, fresh]).fillna("")
    columns = [column for column in table if column not in machine]
    write_atomic(path, table[[*columns, *machine]].to_csv(index=False, lineterminator="\r\n"))
    for row in rows:
        print(", ".join(f"{column} {short(value)}" for column, value in row.items()))
    print(f"written to {path}", flush=True)
