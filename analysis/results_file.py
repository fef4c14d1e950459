"""Measurements as CSV files in analysis/results in which every line names its machine."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.rendering import short
from fire_core.checkpoints.atomic import written_aside
from harness.runs.machine import describe

RESULTS = Path(__file__).resolve().parent / "results"


def merge(name: str, rows: Sequence[dict[str, Any]], key: Sequence[str]) -> Path:
    """Write `rows` into analysis/results/`name`.csv over lines with the same values under `key`; return the path.

    Each new line gets the version of torch, commit, hardware and time. The file is replaced in one step.
    """
    about = describe()
    machine = {
        "torch": about["versions"]["torch"],
        **{k: about[k] for k in ("commit", "hardware", "started")},
    }
    path = RESULTS / f"{name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    older: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            older = list(csv.DictReader(file))
    fresh = [row | machine for row in rows]
    renewed = {identity(row, key) for row in fresh}
    lines = [row for row in older if identity(row, key) not in renewed] + fresh
    columns = list(dict.fromkeys(column for line in lines for column in line if column not in machine))
    with written_aside(path) as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *machine])
        writer.writeheader()
        writer.writerows(lines)
    return path


def print_row(row: dict[str, Any]) -> None:
    """Print a measurement as one line of names and numbers."""
    print(", ".join(f"{name} {short(value)}" for name, value in row.items()), flush=True)


def loop_row(
    domain: str, setting: str, unit: str, device: str, ours: Sequence[float], usual: Sequence[float]
) -> dict[str, Any]:
    """Return a line about a training loop: medians of both rates; median, lowest and highest ratio over the rounds."""
    ratios = [a / b for a, b in zip(ours, usual, strict=True)]
    return {
        "domain": domain,
        "setting": setting,
        "unit": unit,
        "device": device,
        "rounds": len(ours),
        "ours": round(statistics.median(ours), 2),
        "usual": round(statistics.median(usual), 2),
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
    }


def merge_loops(rows: Sequence[dict[str, Any]]) -> Path:
    """Write lines of `loop_row` into analysis/results/bench_loops.csv and return the path."""
    return merge("bench_loops", rows, ("domain", "setting", "unit", "device"))


def identity(row: dict[str, Any], key: Sequence[str]) -> tuple[str, ...]:
    """Return the values under `key` as text, as a CSV holds them. Lines with equal values are the same measurement."""
    return tuple(str(row.get(column, "")) for column in key)
