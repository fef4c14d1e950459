"""Run folders or committed results as tidy pandas frames.

Four frames describe any number of runs: `runs` (one row per run), `metrics` (one row per logged value), `boundaries`
(one row per report, summed over its matrices) and `costs` (one row per finished run). `analysis.export` writes them as
compressed CSV, `load_exported` reads them. The settings that a run changed are the column `overrides`, a JSON list as in
`["method.iterations=5"]`; nothing is read from the name of a folder, which is cut where it would be too long.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fire_core.errors import UserError, printable
from harness.runs.folders import (
    describe_run,
    find_folders,
    read_boundaries,
    read_config,
    read_lines,
    read_meta,
    read_text,
    read_timing,
)

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = ("paper", "medium", "small", "smoke")  # the largest first
KEYS = ["experiment", "size", "data", "method", "label", "seed"]
RUN_COLUMNS = [
    "experiment", "figure", "panel", "size", "data", "method", "label", "overrides", "seed", "identity", "status",
    "commit", "trunk_commit", "dirty", "machine", "domain", "protocol", "model", "detail", "command", "started", "path",
]  # fmt: skip
METRIC_COLUMNS = [
    "experiment", "figure", "panel", "size", "data", "method", "label", "seed", "phase", "step", "epoch", "metric", "value",
]  # fmt: skip
BOUNDARY_COLUMNS = [
    *KEYS, "phase", "matrices", "dfi_before", "dfi_after", "dfi_factor", "sfe", "sfe_share", "seconds",
    "common_matrices", "common_dfi_before", "common_dfi_after", "common_sfe_share",
]  # fmt: skip
COST_COLUMNS = [*KEYS, "train_seconds", "shared_seconds", "boundary_seconds", "machine"]
RUNS_FILE = "runs.csv.gz"
TEXT = dict.fromkeys([c for c in RUN_COLUMNS if c not in ("seed", "dirty")] + ["metric"], str)
COORDINATES = ("phase", "step", "epoch")  # of a logged value
PLACES = (*COORDINATES, "act")


@dataclass
class Results:
    """The four frames of a set of runs. `problems` has one sentence for each run or file that was left out."""

    runs: pd.DataFrame
    metrics: pd.DataFrame
    boundaries: pd.DataFrame
    costs: pd.DataFrame
    problems: list[str] = field(default_factory=list)

    def select(self, **wanted: Any) -> Results:
        """Return the rows whose columns equal the given values (a list means any of them). A frame without such a
        column is not filtered by it."""

        def keep(frame: pd.DataFrame) -> pd.DataFrame:
            mask = np.ones(len(frame), dtype=bool)
            for column, values in wanted.items():
                if column in frame:
                    mask &= frame[column].isin([values] if isinstance(values, str | int) else list(values))
            return frame[mask]

        return Results(*map(keep, (self.runs, self.metrics, self.boundaries, self.costs)), self.problems)

    def starting(self, prefixes: Sequence[str]) -> Results:
        """Return the rows of the experiments whose names start with one of `prefixes`."""
        names = [name for name in self.runs["experiment"].unique() if name.startswith(tuple(prefixes))]
        return self.select(experiment=names)

    @property
    def overrides(self) -> dict[str, dict[str, str]]:
        """The settings that each label changed, as {label: {setting: value}}."""
        rows = self.runs.drop_duplicates("label")
        return {label: settings_of(text) for label, text in zip(rows["label"], rows["overrides"])}

    @property
    def finished(self) -> pd.DataFrame:
        """Rows of the finished runs."""
        return self.runs[self.runs["status"] == "done"]

    @property
    def first(self) -> pd.Series:
        """The first finished run. Properties that all runs of one setting share are read from it."""
        return self.finished.iloc[0]


def settings_of(overrides: str) -> dict[str, str]:
    """Return {setting: value} of the column `overrides`, as {"method.iterations": "5"}."""
    pairs = (override.partition("=")[::2] for override in json.loads(overrides))
    return {key: re.sub(r"[\[\]'\"\\]", "", value) for key, value in pairs}


def settings(results: Results) -> list[Results]:
    """Return the finished runs, split by experiment, size and data set. Only runs of one setting may share a panel or
    a table."""
    keys = ["experiment", "size", "data"]
    found = results.finished.drop_duplicates(keys).sort_values(keys)
    return [results.select(**row) for row in found[keys].to_dict("records")]


def at_largest_size(rows: pd.DataFrame, by: Sequence[str] = ("experiment",)) -> pd.DataFrame:
    """Return, for each experiment (or other value of the columns `by`), the rows of the largest size at which it was run."""
    rank = rows["size"].map(SIZES.index)
    return rows[rank == rank.groupby([rows[column] for column in by]).transform("min")]


def at_most(results: Results, size: str) -> Results:
    """Return the finished runs of each experiment at its largest size that is not above `size`. Runs of size smoke,
    which prove nothing, are not used in place of missing ones."""
    allowed = [size, *SIZES[SIZES.index(size) + 1 : SIZES.index("smoke")]]
    done = at_largest_size(results.finished[results.finished["size"].isin(allowed)])
    largest = dict(zip(done["experiment"], done["size"]))
    frames = (results.runs, results.metrics, results.boundaries, results.costs)
    kept = (frame[frame["size"] == frame["experiment"].map(largest)] for frame in frames)
    return Results(*kept, results.problems)


def plain(part: Results) -> Results:
    """Return the results without runs that have overrides, or all results if there are no others."""
    labels = part.runs["label"][part.runs["label"] == part.runs["method"]]
    return part.select(label=labels.unique()) if len(labels) else part


def open_results(root: str | Path, size: str | None = None, prefixes: Sequence[str] = ("",)) -> Results:
    """Return the runs below `root`, which may also be an export. If `root` is the default `runs`, experiments without
    a finished run there are taken from the committed results, with a note, so that a first run of one's own does not
    empty the rest of a figure. Raises UserError if `root` does not exist, except for the default."""
    root, prefixes = Path(root), tuple(prefixes)
    if not os.path.isdir(root) and root != Path("runs"):
        raise UserError(f"there is no folder {str(root)!r}: give the folder of the runs, or an export")
    if (root / RUNS_FILE).exists():
        results = load_exported(root)
    else:
        folders = root.iterdir() if root.is_dir() else ()
        names = [path.name for path in folders if path.name.startswith(prefixes)]
        results = load(root, names, size) if names else _empty()
        if root == Path("runs"):
            committed = load_exported(RESULTS)
            own = set(zip(results.finished["experiment"], results.finished["size"]))
            others = set(zip(committed.runs["experiment"], committed.runs["size"])) - own
            absent = sorted({name for name, _ in others if name.startswith(prefixes)})
            if absent:
                print(f"from the committed results in analysis/results: {', '.join(absent)}", file=sys.stderr)
                results = merged(results, committed, ["experiment", "size"])
    results = results.starting(prefixes)
    return results.select(size=size) if size else results


def merged(own: Results, committed: Results, by: Sequence[str]) -> Results:
    """Return both results, without the committed rows that equal a finished run of `own` in the columns `by`."""
    names = list(by)
    known = set(own.finished[names].itertuples(index=False, name=None))

    def both(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
        rest = [row not in known for row in theirs[names].itertuples(index=False, name=None)]
        frames = [frame for frame in (ours, theirs[rest]) if len(frame)]
        return pd.concat(frames, ignore_index=True) if frames else ours

    frames = ("runs", "metrics", "boundaries", "costs")
    return Results(*(both(getattr(own, name), getattr(committed, name)) for name in frames), own.problems)


def _empty() -> Results:
    columns = (RUN_COLUMNS, METRIC_COLUMNS, BOUNDARY_COLUMNS, COST_COLUMNS)
    return Results(*(pd.DataFrame(columns=names) for names in columns))


def load(
    root: str | Path = "runs", experiments: Iterable[str] | None = None, size: str | None = None
) -> Results:
    """Read the runs below `root`. Unfinished runs are in `runs` and in `problems`, but not in the other frames. A run that
    cannot be read is in `problems` alone. Logged values that are not numbers are skipped without a note. Raises UserError
    if `root` does not exist, or if one run counts twice."""
    rows, problems, values = [], [], list[tuple[Any, ...]]()
    boundaries, costs = list[tuple[dict[str, Any], dict[str, Any]]](), list[dict[str, Any]]()
    for path in find_folders(root, experiments, size):
        try:
            row, reports, own = _read_run(path)
            cost = _costs(row, reports) if row["status"] == "done" else {}
        except UNREADABLE as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            problems.append(f"{path}: cannot be read ({reason[:200]})")
            continue
        rows.append(row)
        if row["status"] != "done":
            problems.append(f"{path}: {row['status']}{_first_line(path / 'FAILED')}")
            continue
        values += [(len(rows) - 1, *value) for value in own]
        boundaries += [(row, report) for report in reports]
        costs.append(cost)
        if row["torn"]:
            problems.append(f"{path}/metrics.jsonl: {row['torn']} unreadable line(s) left out")
    runs = pd.DataFrame(rows, columns=RUN_COLUMNS)
    long = pd.DataFrame(values, columns=["run", *COORDINATES, "metric", "value"])
    metrics = long.join(runs[METRIC_COLUMNS[:8]], on="run")[METRIC_COLUMNS]
    costs = pd.DataFrame(costs, columns=COST_COLUMNS)
    return checked(Results(runs, metrics, _boundary_frame(boundaries), costs, problems))


# what damaged or hostile files make their readers raise
UNREADABLE = (UserError, ValueError, TypeError, AttributeError, KeyError, OSError, RecursionError)


def _read_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[tuple[Any, ...]]]:
    """Return (row of the frame of runs, boundary reports, logged values) of one folder; what it raises is in UNREADABLE."""
    config = read_config(path)
    told = describe_run(path, config) | _what_was_trained(config) | _what_was_changed(path)
    row = {key: printable(value) if isinstance(value, str) else value for key, value in told.items()}
    row["path"] = str(path)
    row["figure"], row["panel"] = figure_and_panel(row["experiment"])
    if row["size"] not in SIZES:
        raise UserError(f"{row['size']!r} is no size")
    values: list[tuple[Any, ...]] = []
    row["torn"] = _read_metrics(path / "metrics.jsonl", values) if row["status"] == "done" else 0
    reports = read_boundaries(path) if row["status"] == "done" else []
    for report in reports:  # raises here, and not when all runs are put together
        report["phase"] = int(report.get("act", report.get("phase", 1)))
        report["rows"] = [row for row in report.get("rows", []) if row.get("dfi_after") is not None]
        _sums(report["rows"])
    return row, reports, values


def figure_and_panel(experiment: str) -> tuple[str, str]:
    """Return ("fig2a", "cifar10_resnet18") for `fig2a_cifar10_resnet18`, and ("", name) for other names."""
    head, _, tail = experiment.partition("_")
    return (head, tail) if head.startswith("fig") and tail else ("", experiment)


def _first_line(path: Path) -> str:
    lines = read_text(path).strip().splitlines()
    return f": {lines[0].strip()}" if lines else ""


def _what_was_trained(config: dict[str, Any]) -> dict[str, str]:
    """Return `model` and `detail` (pixels of images or frames, shape of a language model) for titles."""
    parts = (config.get(key) for key in ("model", "data", "env"))
    model, data, env = (part if isinstance(part, dict) else {} for part in parts)
    pixels = data.get("image_size") or env.get("frame_size")
    shape = f"{model['layers']} layers, width {model['width']}" if "layers" in model else ""
    return {"model": str(model.get("name") or ""), "detail": f"{pixels} px" if pixels else shape}


def _what_was_changed(path: Path) -> dict[str, str]:
    """Return `identity` and `overrides`, without folders of data, which differ by machine. Raises UserError if the name of
    the folder says that settings were changed and meta.json does not say which."""
    meta = read_meta(path)
    changed = [text for text in meta.get("overrides") or [] if not text.partition("=")[0].endswith(".folder")]
    if not changed and path.parent.name != (meta.get("method") or path.parent.name):
        raise UserError("meta.json does not list its overrides")
    return {"identity": str(meta.get("identity") or ""), "overrides": json.dumps([*map(printable, changed)])}


def _read_metrics(path: Path, values: list[tuple[Any, ...]]) -> int:
    """Append (phase, step, epoch, metric, value) to `values` for every number in the file. Return the number of
    unreadable lines."""
    records, torn = read_lines(path) if path.exists() else ([], 0)
    nan = float("nan")
    for record in records:
        place = record.get("phase", 0), record.get("step", nan), record.get("epoch", nan)
        if not all(isinstance(value, int | float) for value in place):
            torn += 1
            continue
        for key, value in record.items():
            if key not in PLACES and isinstance(value, int | float) and not isinstance(value, bool):
                values.append((*place, key, float(value)))
    return torn


def _boundary_frame(read: list[tuple[dict[str, Any], dict[str, Any]]]) -> pd.DataFrame:
    """Return one row per (run, boundary report), with DfI and SFE summed over the changed matrices. `sfe_share` divides
    the SFE by the distance that a full reset of the same weights would have moved. The columns `common_...` are sums over
    those matrices that `fire` changes in the same setting (or, where it did not run, `fire_exact`), so that methods with
    other targets can be compared; they are empty where neither ran."""
    targets: dict[tuple[str, ...], set[str]] = {}
    for label in ("fire_exact", "fire"):
        found: dict[tuple[str, ...], set[str]] = {}
        for run, report in read:
            if run["label"] == label:
                names = {str(row.get("name")) for row in report["rows"]}
                found.setdefault((run["experiment"], run["size"], run["data"]), set()).update(names)
        targets |= found
    rows = []
    for run, report in read:
        cells = {"phase": report["phase"], "seconds": report.get("seconds")} | _sums(report["rows"])
        known = targets.get((run["experiment"], run["size"], run["data"]))
        if known:
            common = _sums([row for row in report["rows"] if str(row.get("name")) in known])
            cells |= {f"common_{name}": value for name, value in common.items()}
        rows.append({key: run[key] for key in KEYS} | cells)
    return pd.DataFrame(rows, columns=BOUNDARY_COLUMNS)


def _sums(treated: list[dict[str, Any]]) -> dict[str, Any]:
    changed, cells = pd.DataFrame(treated), {"matrices": len(treated)}
    for key in ("dfi_before", "dfi_after", "dfi_factor", "sfe"):
        known = pd.to_numeric(changed[key]).dropna() if key in changed else pd.Series(dtype=float)
        cells[key] = known.sum() if len(known) else None
    return cells | {"sfe_share": _share(changed)}


def _share(changed: pd.DataFrame) -> float | None:
    """Return the sum of the SFE divided by the sum for a reset to the initial weights, or None. Each row of a report
    holds its SFE and its quotient, from which the SFE of the reset follows."""
    if not {"sfe", "sfe_relative"} <= set(changed):
        return None
    known = changed[["sfe", "sfe_relative"]].apply(pd.to_numeric).query("sfe > 0 and sfe_relative > 0")
    return known["sfe"].sum() / (known["sfe"] / known["sfe_relative"]).sum() if len(known) else None


def _costs(run: dict[str, Any], reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return wall-clock seconds of a run: its own training (for DQN and SAC with evaluations), the first phase that it
    shares with other runs of its seed (None if it shares none), and all its boundaries."""
    path = Path(run["path"])
    trunk = read_meta(path).get("trunk")
    shared = _seconds(path.parents[3] / "trunks" / trunk) if trunk else None
    boundaries = float(sum(report.get("seconds") or 0.0 for report in reports))
    cells = {"train_seconds": _seconds(path), "shared_seconds": shared, "boundary_seconds": boundaries}
    return {key: run[key] for key in KEYS} | cells | {"machine": run["machine"]}


def _seconds(folder: Path) -> float | None:
    lines = read_timing(folder)
    return float(sum(line.get("train_seconds", line.get("seconds", 0.0)) for line in lines)) or None


def load_exported(folder: str | Path = RESULTS) -> Results:
    """Return the results that `export` wrote; the frames are empty where nothing was exported yet. Raises UserError for
    runs that were exported twice."""
    folder = Path(folder)

    def read(paths: Iterable[Path], columns: list[str]) -> pd.DataFrame:
        empty = {column: [""] for column in columns if column not in TEXT}
        read = [pd.read_csv(path, dtype=TEXT, keep_default_na=False, na_values=empty) for path in paths]
        return pd.concat(read, ignore_index=True)[columns] if read else pd.DataFrame(columns=columns)

    tables = {"boundaries": BOUNDARY_COLUMNS, "costs": COST_COLUMNS}
    return checked(
        Results(
            read(folder.glob(RUNS_FILE), RUN_COLUMNS),
            read(sorted((folder / "metrics").glob("*.csv.gz")), METRIC_COLUMNS),
            *(read(folder.glob(f"{name}.csv.gz"), columns) for name, columns in tables.items()),
        )
    )


def checked(results: Results) -> Results:
    """Return `results`. Raises UserError if one run counts twice: the same seed, or the same numbers under two seeds."""
    run = ["experiment", "size", "data", "label", "seed"]
    logged = pd.util.hash_pandas_object(results.metrics[["phase", "step", "metric", "value"]], index=False)
    numbers = logged.groupby([results.metrics[name] for name in run]).sum().rename("numbers").reset_index()
    for frame, same, what in (
        (results.runs, run, "are in two folders"),
        (numbers, [*run[:-1], "numbers"], "have the same numbers"),
    ):
        twice = frame[frame.duplicated(same, keep=False)]
        if len(twice):
            first = twice[twice[same].eq(twice[same].iloc[0]).all(axis=1)]
            experiment, size, _, label, _ = first.iloc[0][run]
            raise UserError(
                f"{experiment} {size} {label}: seeds {', '.join(map(str, first['seed']))} {what}, and a run that counts "
                "twice makes every interval too narrow: delete one"
            )
    return results
