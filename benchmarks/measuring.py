"""What the benchmarks share: their command lines, time, and their lines in analysis/results."""

import argparse
import time
from collections.abc import Callable, Sequence
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


def seconds(work: Callable[[], object], device: torch.device | str = "cpu", wall: bool = False) -> float:
    """Return the seconds that `work` takes: processor time on a CPU, or wall-clock time with `wall`; on a GPU always
    wall-clock time, and the GPU is synchronised before and after."""
    gpu = torch.device(device).type == "cuda"
    clock = time.perf_counter if gpu or wall else time.process_time
    wait = torch.cuda.synchronize if gpu else lambda: None
    wait()
    started = clock()
    work()
    wait()
    return clock() - started


def record(name: str, row: dict[str, Any], key: Sequence[str]) -> None:
    """Print `row` and write it into analysis/results/`name`.csv, over a line with the same values under `key`. The new line
    gets the version of torch, commit, hardware and time. The file is replaced in one step."""
    about, path = describe(), RESULTS / f"{name}.csv"
    machine = {"torch": about["versions"]["torch"]} | {c: about[c] for c in ("commit", "hardware", "started")}
    cells = {column: "" if value is None else str(value) for column, value in row.items()}
    fresh = pd.DataFrame([cells | machine])
    older = pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else fresh[:0]
    same = older.reindex(columns=[*key], fill_value="").eq(fresh.loc[0, [*key]]).all(axis=1)
    table = pd.concat([older[~same], fresh]).fillna("")
    columns = [column for column in table if column not in machine]
    write_atomic(path, table[[*columns, *machine]].to_csv(index=False, lineterminator="\r\n"))
    print(", ".join(f"{column} {short(value)}" for column, value in row.items()))
    print(f"written to {path}", flush=True)
