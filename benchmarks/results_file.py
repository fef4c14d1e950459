"""Where benchmarks leave their numbers: CSV files in analysis/results, every line with the machine that made it."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fire_core.checkpoints.atomic import written_aside
from harness.runs.machine import describe

RESULTS = Path(__file__).resolve().parents[1] / "analysis" / "results"


def merge(name: str, rows: Sequence[dict[str, Any]], key: Sequence[str]) -> Path:
    """Put `rows` into analysis/results/`name`.csv, in place of older lines with the same values under `key`.

    Adds torch's version, commit, hardware and the time of day; the file is replaced in one step.
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


def loop_row(
    domain: str, setting: str, unit: str, device: str, ours: Sequence[float], usual: Sequence[float]
) -> dict[str, Any]:
    """A line about a training loop: medians of both rates; median, lowest and highest of the ratios round by round."""
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
    """Lines of `loop_row` into analysis/results/bench_loops.csv."""
    return merge("bench_loops", rows, ("domain", "setting", "unit", "device"))


def identity(row: dict[str, Any], key: Sequence[str]) -> tuple[str, ...]:
    """What makes a line the same measurement as another; as text, for that is what a CSV holds."""
    return tuple(str(row.get(column, "")) for column in key)
