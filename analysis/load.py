"""Run folders in, tidy tables out.

A run folder is `runs/<experiment>/<size>/<label>/seed_<n>/`; only the files inside are read, never a tracker.
Four pandas frames describe any number of runs: `runs` (one row a run), `metrics` (one row a logged value),
`boundaries` (one row a report, summed over its matrices) and `costs` (one row a run). `export.py` writes
them as CSV and `load_exported` reads them back, so tables and figures can be made without the run folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.folders import (
    describe_run,
    find_folders,
    read_boundaries,
    read_json,
    read_lines,
    read_timing,
)
from fire_core.errors import UserError

RUN_COLUMNS = [
    "experiment", "figure", "panel", "size", "data", "method", "label", "seed", "status",
    "commit", "trunk_commit", "dirty", "machine", "domain", "protocol", "command", "started", "path",
]  # fmt: skip
METRIC_COLUMNS = [
    "experiment", "figure", "panel", "size", "data", "method", "label", "seed",
    "phase", "step", "epoch", "metric", "value",
]  # fmt: skip
BOUNDARY_COLUMNS = [
    "experiment", "size", "data", "method", "label", "seed", "phase", "matrices",
    "dfi_before", "dfi_after", "dfi_factor", "sfe", "sfe_share", "seconds",
]  # fmt: skip
COST_COLUMNS = [
    "experiment", "size", "data", "method", "label", "seed",
    "train_seconds", "shared_seconds", "boundary_seconds", "machine",
]  # fmt: skip
TEXT_COLUMNS = [c for c in RUN_COLUMNS if c not in ("seed", "dirty")]
COORDINATES = ("phase", "step", "epoch")


@dataclass
class Results:
    """`runs`: RUN_COLUMNS, one row a folder. `metrics`: METRIC_COLUMNS, finished runs only. `problems`: what
    was left out and why, one sentence each."""

    runs: pd.DataFrame
    metrics: pd.DataFrame
    problems: list[str] = field(default_factory=list)
    boundaries: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=BOUNDARY_COLUMNS))
    costs: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=COST_COLUMNS))

    def select(self, **wanted: Any) -> Results:
        """The part of every frame whose columns equal the given values (a list means any of them)."""

        def keep(frame: pd.DataFrame) -> pd.DataFrame:
            mask = np.ones(len(frame), dtype=bool)
            for column, values in wanted.items():
                values = [values] if isinstance(values, str | int) else list(values)
                if column in frame:
                    mask &= frame[column].isin(values).to_numpy()
            return frame[mask]

        frames = (self.boundaries, self.costs)
        return Results(keep(self.runs), keep(self.metrics), self.problems, *map(keep, frames))

    @property
    def finished(self) -> pd.DataFrame:
        return self.runs[self.runs["status"] == "done"]


def load(
    root: str | Path = "runs",
    experiments: Sequence[str] | None = None,
    size: str | None = None,
    unfinished: bool = False,
) -> Results:
    """Read runs below `root`. Metrics of runs that are not done are left out and named in `problems`, unless
    `unfinished` is set. Values that are not numbers are left out silently (they are notes, not metrics)."""
    rows, problems, parts = [], [], _Columns()
    for path in find_folders(root, experiments, size):
        row = describe_run(path)
        rows.append(row)
        if row["status"] != "done":
            problems.append(f"{path}: {row['status']}{_reason(path, row['status'])}")
            if not unfinished:
                continue
        torn = parts.add(path / "metrics.jsonl", len(rows) - 1)
        if torn:
            problems.append(f"{path}/metrics.jsonl: {torn} unreadable line(s) left out")
    runs = pd.DataFrame(rows, columns=RUN_COLUMNS)
    done = runs[runs["status"] == "done"]
    return Results(runs, parts.frame(runs), problems, boundary_frame(done), cost_frame(done))


def _reason(path: Path, status: str) -> str:
    """The first line of a failed run's message."""
    if status != "failed":
        return ""
    lines = (path / "FAILED").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f": {lines[0].strip()}" if lines else ""


class _Columns:
    """Grows the long table column by column: strings are repeated by index only at the end."""

    def __init__(self) -> None:
        self.run: list[int] = []
        self.metric: list[str] = []
        self.value: list[float] = []
        self.coordinates: dict[str, list[float]] = {name: [] for name in COORDINATES}

    def add(self, path: Path, run: int) -> int:
        if not path.exists():
            return 0
        records, torn = read_lines(path)
        phases, steps, epochs = (self.coordinates[name] for name in COORDINATES)
        nan = float("nan")
        for record in records:
            phase, step, epoch = record.get("phase", 0), record.get("step", nan), record.get("epoch", nan)
            if not all(isinstance(value, int | float) for value in (phase, step, epoch)):
                torn += 1
                continue
            for key, value in record.items():
                if key in COORDINATES or isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                self.run.append(run)
                self.metric.append(key)
                self.value.append(value)
                phases.append(phase)
                steps.append(step)
                epochs.append(epoch)
        return torn

    def frame(self, runs: pd.DataFrame) -> pd.DataFrame:
        index = np.asarray(self.run, dtype=np.int64)
        columns: dict[str, Any] = {}
        for name in METRIC_COLUMNS[:7]:
            column = runs[name].astype(str).astype("category")
            columns[name] = pd.Categorical.from_codes(column.cat.codes.to_numpy()[index], dtype=column.dtype)
        columns["seed"] = runs["seed"].to_numpy(dtype=np.int64)[index]
        columns["phase"] = np.asarray(self.coordinates["phase"], dtype=np.int64)
        columns["step"] = np.asarray(self.coordinates["step"], dtype=np.float64)
        columns["epoch"] = np.asarray(self.coordinates["epoch"], dtype=np.float64)
        columns["metric"] = pd.Categorical(self.metric)
        columns["value"] = np.asarray(self.value, dtype=np.float64)
        return pd.DataFrame(columns, columns=METRIC_COLUMNS)


def boundary_frame(runs: pd.DataFrame) -> pd.DataFrame:
    """BOUNDARY_COLUMNS: one row a report. DfI and SFE are sums over the changed matrices; sfe_share is the SFE divided by
    what a full reset of the same weights would have moved."""
    rows = []
    for run in runs.to_dict("records"):
        for report in read_boundaries(run["path"]):
            changed = [row for row in report.get("rows", []) if row.get("dfi_after") is not None]
            cells = {
                "phase": report.get("phase", 1),
                "matrices": len(changed),
                "seconds": report.get("seconds"),
            }
            cells |= {key: _total(changed, key) for key in ("dfi_before", "dfi_after", "dfi_factor", "sfe")}
            cells["sfe_share"] = _share(changed)
            rows.append({key: run[key] for key in BOUNDARY_COLUMNS[:6]} | cells)
    return pd.DataFrame(rows, columns=BOUNDARY_COLUMNS)


def _share(rows: list[dict[str, Any]]) -> float | None:
    """Sum of SFE over the sum that a reset to the initial weights would give; a row holds its own SFE and the quotient."""
    known = [row for row in rows if row.get("sfe") and row.get("sfe_relative")]
    reset = sum(row["sfe"] / row["sfe_relative"] for row in known)
    return sum(row["sfe"] for row in known) / reset if reset else None


def _known(row: dict[str, Any], key: str) -> bool:
    return row.get(key) is not None


def _total(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if _known(row, key)]
    return float(sum(values)) if values else None


def cost_frame(runs: pd.DataFrame) -> pd.DataFrame:
    """COST_COLUMNS, seconds by the clock: of the run's own training (of DQN and SAC evaluations included), of the first
    phase that it shares with other runs of its seed (None where it has none), and of all boundaries together.
    `benchmarks.convergence` measures memory."""
    rows = []
    shared: dict[Path, float | None] = {}
    for run in runs.to_dict("records"):
        path = Path(run["path"])
        trunk = (read_json(path / "meta.json") or {}).get("trunk")
        # <root>/<experiment>/<size>/<label>/seed_<n> beside <root>/trunks/<id>
        home = path.parents[3] / "trunks" / trunk if trunk else None
        if home is not None and home not in shared:
            shared[home] = _seconds(read_timing(home))
        lines = read_timing(path)
        reports = [report.get("seconds") or 0.0 for report in read_boundaries(path)]
        rows.append(
            {key: run[key] for key in COST_COLUMNS[:6]}
            | {"train_seconds": _seconds(lines), "shared_seconds": shared[home] if home else None}
            | {"boundary_seconds": float(sum(reports))}
            | {"machine": run["machine"]}
        )
    return pd.DataFrame(rows, columns=COST_COLUMNS)


def _seconds(lines: list[dict[str, Any]]) -> float | None:
    return float(sum(line.get("train_seconds", line.get("seconds", 0.0)) for line in lines)) or None


def load_exported(folder: str | Path) -> Results:
    """What `python -m analysis.export` wrote; empty frames where nothing was exported yet."""
    folder = Path(folder)
    text = dict.fromkeys(TEXT_COLUMNS, str)

    def read(path: Path, columns: list[str]) -> pd.DataFrame:
        if not path.exists():
            return pd.DataFrame(columns=columns)
        empty = {column: [""] for column in columns if column not in text}
        return pd.read_csv(path, dtype=text, keep_default_na=False, na_values=empty)

    runs = read(folder / "runs.csv", RUN_COLUMNS)
    parts = [read(path, METRIC_COLUMNS) for path in sorted((folder / "metrics").glob("*.csv"))]
    metrics = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=METRIC_COLUMNS)
    boundaries = read(folder / "boundaries.csv", BOUNDARY_COLUMNS)
    return Results(runs, metrics, [], boundaries, read(folder / "costs.csv", COST_COLUMNS))


def write_frame(frame: pd.DataFrame, path: Path) -> Path:
    """CSV or, by the name's ending, Parquet (needs pyarrow)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        try:
            frame.to_parquet(path, index=False)
        except ImportError as error:
            raise UserError(f"'{path}' needs pyarrow: pip install pyarrow, or ask for a .csv") from error
    else:
        frame.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
    return path
