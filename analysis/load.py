"""Run folders in, tidy tables out.

A run folder is `runs/<experiment>/<size>/<label>/seed_<n>/`; only the files inside are read, never a tracker.
Four pandas frames describe any number of runs: `runs` (one row a run), `metrics` (one row a logged value),
`boundaries` (one row a report, summed over its matrices) and `costs` (one row a run). `export.py` writes
them as CSV and `load_exported` reads them back, so tables and figures can be made without the run folders.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fire_core.errors import UserError

RUN_COLUMNS = [
    "experiment", "figure", "panel", "size", "data", "method", "label", "seed", "status",
    "commit", "dirty", "machine", "domain", "protocol", "command", "started", "path",
]  # fmt: skip
METRIC_COLUMNS = [
    "experiment", "figure", "panel", "size", "data", "method", "label", "seed",
    "phase", "step", "epoch", "metric", "value",
]  # fmt: skip
BOUNDARY_COLUMNS = [
    "experiment", "size", "data", "method", "label", "seed", "phase", "matrices",
    "dfi_before", "dfi_after", "dfi_factor", "sfe", "worst_residual", "seconds",
]  # fmt: skip
COST_COLUMNS = [
    "experiment", "size", "data", "method", "label", "seed",
    "train_seconds", "boundary_seconds", "memory_mb", "machine",
]  # fmt: skip
_PROTOCOLS: dict[str, str] = {}
COORDINATES = ("phase", "step", "epoch")
NOT_EXPERIMENTS = {"trunks", "summary", "report", "figures", "tables"}
SCRIPTS = {
    "vision": "vision/train.py",
    "language": "language/train.py",
    "dqn": "rl/dqn/train.py",
    "sac": "rl/sac/train.py",
}
GIVEN = {"experiment", "size", "method", "seed"}
RUNNING_SECONDS = 180.0  # a folder without an end marker that was written to this recently counts as running


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


def figure_and_panel(experiment: str) -> tuple[str, str]:
    """`fig2a_cifar10_resnet18` -> ("fig2a", "cifar10_resnet18"); other names -> ("", name)."""
    head, _, tail = experiment.partition("_")
    return (head, tail) if head.startswith("fig") and tail else ("", experiment)


def find_folders(
    root: str | Path, experiments: Iterable[str] | None = None, size: str | None = None
) -> list[Path]:
    """Every `seed_*` folder below `root` in sorted order; UserError if `root` does not exist."""
    root = Path(root)
    if not root.is_dir():
        raise UserError(f"no run folder at '{root}': start a sweep first (make vision-sweep), or give --root")
    names = sorted(experiments) if experiments else sorted(p.name for p in root.iterdir() if p.is_dir())
    found = []
    for name in names:
        if name not in NOT_EXPERIMENTS and not name.startswith("."):
            found += sorted((root / name).glob(f"{size or '*'}/*/seed_*"), key=_folder_order)
    return [path for path in found if path.is_dir()]


def _folder_order(path: Path) -> tuple[str, str, int]:
    return path.parent.parent.name, path.parent.name, _seed(path)


def _seed(path: Path) -> int:
    tail = path.name.removeprefix("seed_")
    return int(tail) if tail.isdigit() else -1


def status_of(path: Path) -> str:
    """`done`, `failed`, `running` or `unfinished` (killed: the same command goes on from its checkpoint)."""
    if (path / "DONE").exists():
        return "done"
    if (path / "FAILED").exists():
        return "failed"
    return "running" if (path / "RUNNING").exists() and _alive(path) else "unfinished"


def _alive(path: Path) -> bool:
    """The process named in RUNNING exists here, or (on another machine) the folder was written to lately."""
    mark = (path / "RUNNING").read_text(encoding="utf-8").strip()
    if mark.isdigit() and Path("/proc").is_dir() and Path(f"/proc/{mark}").exists():
        return True
    newest = max((p.stat().st_mtime for p in path.iterdir() if p.is_file()), default=0.0)
    return time.time() - newest < RUNNING_SECONDS


def describe_run(path: Path) -> dict[str, Any]:
    """One row of `runs`, from meta.json where it exists and from the folder's own name where it does not."""
    label, size, experiment = path.parent.name, path.parent.parent.name, path.parent.parent.parent.name
    meta = read_json(path / "meta.json") or {}
    figure, panel = figure_and_panel(experiment)
    return {
        "experiment": experiment,
        "figure": figure,
        "panel": panel,
        "size": size,
        "data": _data(meta, path),
        "method": str(meta.get("method") or label.partition("-")[0]),
        "label": label,
        "seed": _seed(path),
        "status": status_of(path),
        "commit": str(meta.get("commit") or "unknown")[:10],
        "dirty": bool(meta.get("dirty", False)),
        "machine": _name(meta.get("hardware")),
        "domain": str(meta.get("domain") or ""),
        "protocol": _protocol(path) if (path / "config.yaml").exists() else "",
        "command": command_of(meta, label),
        "started": str(meta.get("started") or ""),
        "path": str(path),
    }


def _protocol(path: Path) -> str:
    """The protocol's name, read once per experiment and size: it is a matter of the experiment."""
    key = str(path.parent.parent.resolve())
    if key not in _PROTOCOLS:
        protocol = read_config(path).get("protocol") or ""
        _PROTOCOLS[key] = str(protocol.get("name", "")) if isinstance(protocol, dict) else str(protocol)
    return _PROTOCOLS[key]


def command_of(meta: dict[str, Any], label: str) -> str:
    """The command of one run without its seed. A sweep's command is cut down to this run's share of it."""
    parts = [f"{key}={meta.get(key)}" for key in ("experiment", "size", "method")]
    for argument in str(meta.get("command") or "").split()[1:]:
        key, _, value = argument.partition("=")
        if argument.startswith("-") or key in GIVEN or key.startswith(("run.", "hydra")):
            continue
        if "," in value and not value.startswith(("[", "{", "'")):
            short = key.removeprefix("method.")
            value = next((v for v in value.split(",") if f"{short}={v}" in label), value)
        parts.append(f"{key}={value}")
    return f"python {SCRIPTS.get(str(meta.get('domain')), 'vision/train.py')} {' '.join(parts)}"


def read_json(path: Path) -> Any:
    """The parsed file, or None if it is absent or torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _data(meta: dict[str, Any], path: Path) -> str:
    """The data set, corpus or environment: meta.json says it, else the configuration."""
    if meta.get("data"):
        return _name(meta["data"])
    config = read_config(path)
    return next((_name(config[key]) for key in ("data", "corpus", "env") if config.get(key)), "unknown")


def _name(value: Any) -> str:
    """A readable text of a name, a list of names or a mapping with a name."""
    if isinstance(value, dict):
        return str(value.get("name") or ", ".join(str(v) for v in value.values() if isinstance(v, str | int)))
    if isinstance(value, list | tuple):
        return " + ".join(map(str, value))
    return str(value or "unknown")


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(records, number of torn lines) of a JSON-lines file."""
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    try:
        return json.loads(b"[" + b",".join(lines) + b"]"), 0
    except ValueError:
        records: list[dict[str, Any]] = []
        torn = 0
        for line in lines:
            try:
                records.append(json.loads(line))
            except ValueError:
                torn += 1
        return records, torn


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


def read_config(path: str | Path) -> dict[str, Any]:
    """The resolved configuration of a run, {} if it was not written."""
    file = Path(path) / "config.yaml"
    if not file.exists():
        return {}
    with file.open(encoding="utf-8") as stream:
        return yaml.load(stream, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}


def read_boundaries(path: str | Path) -> list[dict[str, Any]]:
    """The boundary reports of a run in order of phase."""
    found = [read_json(file) for file in Path(path).glob("boundary_*.json")]
    return sorted((report for report in found if report), key=lambda report: report.get("phase", 0))


def read_timing(path: str | Path) -> list[dict[str, Any]]:
    """The lines of timing.jsonl; they vary from run to run and never enter a comparison of accuracy."""
    file = Path(path) / "timing.jsonl"
    return read_lines(file)[0] if file.exists() else []


def boundary_frame(runs: pd.DataFrame) -> pd.DataFrame:
    """BOUNDARY_COLUMNS: one row a report. DfI and SFE are sums over the changed matrices, worst_residual a
    maximum."""
    rows = []
    for run in runs.to_dict("records"):
        for report in read_boundaries(run["path"]):
            changed = [row for row in report.get("rows", []) if row.get("dfi_after") is not None]
            rows.append(
                {key: run[key] for key in BOUNDARY_COLUMNS[:6]}
                | {
                    "phase": report.get("phase", 1),
                    "matrices": len(changed),
                    "seconds": report.get("seconds"),
                }
                | {key: _total(changed, key) for key in ("dfi_before", "dfi_after", "dfi_factor", "sfe")}
                | {
                    "worst_residual": max(
                        (r["residual"] for r in changed if _known(r, "residual")), default=None
                    )
                }
            )
    return pd.DataFrame(rows, columns=BOUNDARY_COLUMNS)


def _known(row: dict[str, Any], key: str) -> bool:
    return row.get(key) is not None


def _total(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if _known(row, key)]
    return float(sum(values)) if values else None


def cost_frame(runs: pd.DataFrame) -> pd.DataFrame:
    """COST_COLUMNS: seconds of training and of all boundaries together, peak memory where it was measured.
    Seconds of a shared first phase count for the run that trained it."""
    rows = []
    for run in runs.to_dict("records"):
        lines = read_timing(run["path"])
        seconds = [line.get("train_seconds", line.get("seconds", 0.0)) for line in lines]
        memory = [line[key] for line in lines for key in ("memory_mb", "peak_memory_mb") if _known(line, key)]
        reports = [report.get("seconds") or 0.0 for report in read_boundaries(run["path"])]
        rows.append(
            {key: run[key] for key in COST_COLUMNS[:6]}
            | {"train_seconds": float(sum(seconds)) or None, "boundary_seconds": float(sum(reports))}
            | {"memory_mb": max(memory, default=None), "machine": run["machine"]}
        )
    return pd.DataFrame(rows, columns=COST_COLUMNS)


def load_exported(folder: str | Path) -> Results:
    """What `python -m analysis.export` wrote; empty frames where nothing was exported yet."""
    folder = Path(folder)
    text = {
        "label": str,
        "method": str,
        "commit": str,
        "machine": str,
        "panel": str,
        "figure": str,
        "protocol": str,
    }

    def read(path: Path, columns: list[str]) -> pd.DataFrame:
        if not path.exists():
            return pd.DataFrame(columns=columns)
        return pd.read_csv(
            path, dtype=text, keep_default_na=False, na_values={c: [""] for c in columns if c not in text}
        )

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
