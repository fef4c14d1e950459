"""Run folders or committed results as tidy pandas frames.

Three frames describe any number of runs: `runs` (one row per run), `metrics` (one row per logged value) and `boundaries`
(one row per report, summed over its matrices). `analysis.export` writes them as compressed CSV, `load_exported` reads them.
The settings that a run changed are the column `overrides`, a JSON list as in `["method.iterations=5"]`; nothing is read
from the name of a folder, which is cut where it would be too long.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
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
)

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = ("paper", "medium", "small", "smoke")  # the largest first
KEYS = ["experiment", "size", "data", "method", "label", "seed"]
SUMMED = ["dfi_before", "dfi_after", "dfi_factor", "sfe"]  # over the matrices of a boundary
PANEL = ["experiment", "figure", "panel", "size", "data", "method", "label"]
COLUMNS = {
    "runs": [
        *PANEL, "overrides", "seed", "identity", "status", "commit", "trunk_commit", "dirty", "machine", "domain",
        "protocol", "model", "detail", "command", "started", "path",
    ],
    "metrics": [*PANEL, "seed", "phase", "step", "epoch", "metric", "value"],
    "boundaries": [
        *KEYS, "phase", "matrices", *SUMMED, "sfe_share", "seconds",
        "common_matrices", "common_dfi_before", "common_dfi_after", "common_sfe_share",
    ],
}  # fmt: skip
RUNS_FILE = "runs.csv.gz"
TEXT = dict.fromkeys([c for c in COLUMNS["runs"] if c not in ("seed", "dirty")] + ["metric"], str)
COORDINATES = ("phase", "step", "epoch")  # of a logged value
PLACES = (*COORDINATES, "act")


@dataclass
class Results:
    """The three frames of a set of runs. `problems` has one sentence for each run or file that was left out."""

    runs: pd.DataFrame
    metrics: pd.DataFrame
    boundaries: pd.DataFrame
    problems: list[str] = field(default_factory=list)

    def filtered(self, keep: Callable[[pd.DataFrame], Any]) -> Results:
        """Return the rows of each frame that the mask `keep` of that frame has."""
        frames = (self.runs, self.metrics, self.boundaries)
        return Results(*(frame[keep(frame)] for frame in frames), self.problems)

    def select(self, **wanted: Any) -> Results:
        """Return the rows whose columns equal the given values (a list means any of them). A frame without such a
        column is not filtered by it."""
        among = {name: [each] if isinstance(each, str | int) else list(each) for name, each in wanted.items()}

        def keep(frame: pd.DataFrame) -> Any:
            masks = (frame[column].isin(values) for column, values in among.items() if column in frame)
            return np.logical_and.reduce([np.ones(len(frame), dtype=bool), *masks])

        return self.filtered(keep)

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
    def plain(self) -> Results:
        """The results without runs that have overrides, or all results if there are no others."""
        labels = self.runs["label"][self.runs["label"] == self.runs["method"]]
        return self.select(label=labels.unique()) if len(labels) else self

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
    frames = (results.runs, results.metrics, results.boundaries)
    groups = [(frame, dict(iter(frame.groupby(keys)))) for frame in frames]
    return [
        Results(*(own.get(setting, frame[:0]) for frame, own in groups), results.problems)
        for setting in found[keys].itertuples(index=False, name=None)
    ]


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
    return results.filtered(lambda frame: frame["size"] == frame["experiment"].map(largest))


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
        empty = Results(*(pd.DataFrame(columns=columns) for columns in COLUMNS.values()))
        results = load(root, names, size) if names else empty
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
    known = pd.MultiIndex.from_frame(own.finished[names])
    rest = committed.filtered(lambda frame: ~pd.MultiIndex.from_frame(frame[names]).isin(known))
    both = []
    for name in COLUMNS:
        frames = [frame for frame in (getattr(own, name), getattr(rest, name)) if len(frame)]
        both.append(pd.concat(frames, ignore_index=True) if frames else getattr(own, name))
    return Results(*both, own.problems)


# ------------------------------------------------------------------------------------------------ run folders
# what damaged or hostile files make their readers raise
UNREADABLE = (UserError, ValueError, TypeError, AttributeError, KeyError, OSError, RecursionError)


def load(
    root: str | Path = "runs", experiments: Iterable[str] | None = None, size: str | None = None
) -> Results:
    """Read the runs below `root`. Unfinished runs are in `runs` and in `problems`, but not in the other frames. A run that
    cannot be read is in `problems` alone. Logged values that are not numbers are skipped without a note. Raises UserError
    if `root` does not exist, or if one run counts twice."""
    rows, problems, values = [], [], list[tuple[Any, ...]]()
    boundaries = list[tuple[dict[str, Any], dict[str, Any]]]()
    for path in find_folders(root, experiments, size):
        try:
            row = _describe(path)
            done = row["status"] == "done"
            own, torn = _logged(path / "metrics.jsonl") if done else ([], 0)
            reports = [_report(report) for report in read_boundaries(path)] if done else []
        except UNREADABLE as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            problems.append(f"{path}: cannot be read ({reason[:200]})")
            continue
        rows.append(row)
        if not done:
            problems.append(f"{path}: {row['status']}{_first_line(path / 'FAILED')}")
            continue
        values += [(len(rows) - 1, *value) for value in own]
        boundaries += [(row, report) for report in reports]
        if torn:
            problems.append(f"{path}/metrics.jsonl: {torn} unreadable line(s) left out")
    runs = pd.DataFrame(rows, columns=COLUMNS["runs"])
    long = pd.DataFrame(values, columns=["run", *COORDINATES, "metric", "value"])
    metrics = long.join(runs[[*PANEL, "seed"]], on="run")[COLUMNS["metrics"]]
    return checked(Results(runs, metrics, _boundary_frame(boundaries), problems))


def _describe(path: Path) -> dict[str, Any]:
    """Return the row of a folder in the frame of runs: what `harness` says of it; `model` and `detail` (pixels of images or
    frames, shape of a language model) for titles; `identity` and `overrides`, without folders of data, which differ by
    machine. Raises UserError if the folder's name says that settings were changed and meta.json does not say which."""
    config, meta = read_config(path), read_meta(path)
    model, data, env = (
        config[key] if isinstance(config.get(key), dict) else {} for key in ("model", "data", "env")
    )
    pixels = data.get("image_size") or env.get("frame_size")
    shape = f"{model['layers']} layers, width {model['width']}" if "layers" in model else ""
    changed = [text for text in meta.get("overrides") or [] if not text.partition("=")[0].endswith(".folder")]
    if not changed and path.parent.name != (meta.get("method") or path.parent.name):
        raise UserError("meta.json does not list its overrides")
    told = describe_run(path, config)
    told |= {"model": str(model.get("name") or ""), "detail": f"{pixels} px" if pixels else shape}
    told |= {"identity": str(meta.get("identity") or ""), "overrides": json.dumps([*map(printable, changed)])}
    row = {key: printable(value) if isinstance(value, str) else value for key, value in told.items()}
    if row["size"] not in SIZES:
        raise UserError(f"{row['size']!r} is no size")
    head, _, tail = row["experiment"].partition("_")
    figure, panel = (head, tail) if head.startswith("fig") and tail else ("", row["experiment"])
    return row | {"path": str(path), "figure": figure, "panel": panel}


def _first_line(path: Path) -> str:
    lines = read_text(path).strip().splitlines()
    return f": {lines[0].strip()}" if lines else ""


def _logged(path: Path) -> tuple[list[tuple[Any, ...]], int]:
    """Return ((phase, step, epoch, metric, value) of every number in metrics.jsonl, the number of unreadable lines)."""
    records, torn = read_lines(path) if path.exists() else ([], 0)
    values, nan = [], float("nan")
    for record in records:
        place = record.get("phase", 0), record.get("step", nan), record.get("epoch", nan)
        if not all(isinstance(value, int | float) for value in place):
            torn += 1
            continue
        for key, value in record.items():
            if key not in PLACES and isinstance(value, int | float) and not isinstance(value, bool):
                values.append((*place, key, float(value)))
    return values, torn


def _report(report: dict[str, Any]) -> dict[str, Any]:
    """Return phase, seconds and the changed matrices of a boundary report."""
    rows = [row for row in report.get("rows", []) if row.get("dfi_after") is not None]
    table = pd.DataFrame(rows, columns=["name", *SUMMED, "sfe_relative"])
    numbers = table.drop(columns="name").apply(pd.to_numeric).assign(name=table["name"].map(str))
    phase = int(report.get("act", report.get("phase", 1)))
    return {"phase": phase, "seconds": report.get("seconds"), "changed": numbers}


def _boundary_frame(read: list[tuple[dict[str, Any], dict[str, Any]]]) -> pd.DataFrame:
    """Return one row per (run, boundary report), with DfI and SFE summed over the changed matrices. The columns
    `common_...` are sums over those matrices that `fire` changes in the same setting (or, where it did not run,
    `fire_exact`), so that methods with other targets can be compared; they are empty where neither ran."""
    targets: dict[str, dict[tuple[str, ...], set[str]]] = {"fire_exact": {}, "fire": {}}
    for run, report in read:
        if run["label"] in targets:
            setting = run["experiment"], run["size"], run["data"]
            targets[run["label"]].setdefault(setting, set()).update(report["changed"]["name"])
    rows = []
    for run, report in read:
        changed, setting = report["changed"], (run["experiment"], run["size"], run["data"])
        cells = {"phase": report["phase"], "seconds": report["seconds"]} | _sums(changed)
        if known := (targets["fire_exact"] | targets["fire"]).get(setting):
            common = _sums(changed[changed["name"].isin(known)])
            cells |= {f"common_{name}": value for name, value in common.items()}
        rows.append({key: run[key] for key in KEYS} | cells)
    return pd.DataFrame(rows, columns=COLUMNS["boundaries"])


def _sums(changed: pd.DataFrame) -> dict[str, Any]:
    """Return the sums over matrices. `sfe_share` is that of the SFE divided by the distance that a reset to the initial
    weights would have moved; each matrix has its SFE and the quotient of the two."""
    known = changed[(changed["sfe"] > 0) & (changed["sfe_relative"] > 0)]
    share = known["sfe"].sum() / (known["sfe"] / known["sfe_relative"]).sum() if len(known) else None
    return {"matrices": len(changed)} | changed[SUMMED].sum(min_count=1).to_dict() | {"sfe_share": share}


# ------------------------------------------------------------------------------------------------ exports
def load_exported(folder: str | Path = RESULTS) -> Results:
    """Return the results that `export` wrote; the frames are empty where nothing was exported yet. Raises UserError for
    runs that were exported twice."""
    frames = []
    for name, columns in COLUMNS.items():
        files = sorted(Path(folder).glob("metrics/*.csv.gz" if name == "metrics" else f"{name}.csv.gz"))
        empty = {column: [""] for column in columns if column not in TEXT}
        read = [pd.read_csv(path, dtype=TEXT, keep_default_na=False, na_values=empty) for path in files]
        frames.append(pd.concat(read, ignore_index=True)[columns] if read else pd.DataFrame(columns=columns))
    return checked(Results(*frames))


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
