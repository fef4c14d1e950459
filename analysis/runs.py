"""Run folders or committed results as tidy pandas frames: `runs`, `metrics` (one row per logged value) and `boundaries`.

The settings that a run changed are the column `overrides`, a JSON list as in `["method.iterations=5"]`; nothing is read
from the name of a folder, which is cut where it would be too long.
"""

import json
import lzma
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fire_core.errors import UserError, first_line, printable
from harness.runs import folders

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = ("paper", "medium", "small", "smoke")  # the largest first
SETTING = ["experiment", "size", "data"]
KEYS, RUN = [*SETTING, "method", "label", "seed"], [*SETTING, "label", "seed"]
SUMMED = ["dfi_before", "dfi_after", "dfi_factor", "sfe"]  # over the matrices of a boundary
PANEL = ["experiment", "figure", "panel", "size", "data", "method", "label"]
COLUMNS = {
    "runs": [
        *PANEL, "overrides", "seed", "identity", "status", "commit", "trunk_commit", "dirty", "machine", "domain",
        "protocol", "model", "detail", "started", "path",
    ],
    "metrics": [*PANEL, "seed", "phase", "step", "epoch", "metric", "value"],
    "boundaries": [
        *KEYS, "phase", "matrices", *SUMMED, "sfe_share", "seconds",
        "common_matrices", "common_dfi_before", "common_dfi_after", "common_sfe_share",
    ],
}  # fmt: skip
RUNS_FILE = "runs.csv.xz"
TEXT = dict.fromkeys([c for c in COLUMNS["runs"] if c not in ("seed", "dirty")] + ["metric"], str)
COORDINATES = ["phase", "step", "epoch"]  # of a logged value
# what damaged or hostile files make their readers raise
UNREADABLE = (UserError, ValueError, TypeError, AttributeError, KeyError, OSError, RecursionError)


@dataclass
class Results:
    """The three frames of a set of runs. `problems` has one sentence for each run or file that was left out."""

    runs: pd.DataFrame
    metrics: pd.DataFrame
    boundaries: pd.DataFrame
    problems: list[str] = field(default_factory=list)

    @property
    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        return self.runs, self.metrics, self.boundaries

    def filtered(self, keep: Callable[[pd.DataFrame], Any]) -> "Results":
        """Return the rows of each frame that the mask `keep` of that frame has."""
        return Results(*(frame[keep(frame)] for frame in self.frames), self.problems)

    def select(self, **wanted: str | Iterable[str]) -> "Results":
        """Return the rows whose columns equal the given texts (a list means any of them)."""
        among = {name: [each] if isinstance(each, str) else list(each) for name, each in wanted.items()}
        return self.filtered(lambda frame: frame[list(among)].isin(among).all(axis=1))

    def matching(self, patterns: Sequence[str]) -> "Results":
        """Return the rows of the experiments whose names match one of `patterns`, as in `fig2*`."""
        return self.select(experiment=matching(self.runs["experiment"].unique(), patterns))

    @cached_property
    def methods(self) -> dict[str, str]:
        """The method of each label."""
        return dict(zip(self.runs["label"], self.runs["method"]))

    @cached_property
    def overrides(self) -> dict[str, dict[str, str]]:
        """The settings that each label changed, as {label: {setting: value}}."""
        return {label: settings_of(text) for label, text in zip(self.runs["label"], self.runs["overrides"])}

    @property
    def plain(self) -> "Results":
        """The results without runs that have overrides, or all results if there are no others."""
        labels = self.finished["label"][self.finished["label"] == self.finished["method"]]
        return self.select(label=labels.unique()) if len(labels) else self

    @property
    def finished(self) -> pd.DataFrame:
        return self.runs[self.runs["status"] == "done"]

    @property
    def first(self) -> pd.Series:
        """The first finished run. Properties that all runs of one setting share are read from it."""
        return self.finished.iloc[0]


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


@cache
def settings_of(overrides: str) -> dict[str, str]:
    """Return {setting: value} of the column `overrides`, as {"method.iterations": "5"}."""
    pairs = (override.partition("=")[::2] for override in json.loads(overrides))
    return {key: re.sub(r"[\[\]'\"\\]", "", value) for key, value in pairs}


def settings(results: Results) -> list[Results]:
    """Return the finished runs by experiment, size and data set: only those of one may share a panel or a table."""
    found = results.finished.drop_duplicates(SETTING).sort_values(SETTING)
    groups = [(frame, dict(iter(frame.groupby(SETTING)))) for frame in results.frames]
    return [
        Results(*(own.get(setting, frame[:0]) for frame, own in groups), results.problems)
        for setting in found[SETTING].itertuples(index=False, name=None)
    ]


def own_data(parts: Sequence[Results]) -> list[Results]:
    """Return `parts` without those that an override gave other data, where the experiment has runs without overrides."""
    own = {(part.first["experiment"], part.first["size"]) for part in parts if part.plain is not part}
    return [p for p in parts if p.plain is not p or (p.first["experiment"], p.first["size"]) not in own]


def at_largest_size(rows: pd.DataFrame, by: Sequence[str] = ("experiment",)) -> pd.DataFrame:
    """Return, for each experiment (or other value of the columns `by`), the rows of the largest size at which it was run."""
    rank = rows["size"].map(SIZES.index)
    return rows[rank == rank.groupby([rows[column] for column in by]).transform("min")]


def at_most(results: Results, size: str) -> Results:
    """Return the finished runs of each experiment at its largest size up to `size`. Smoke runs prove nothing."""
    allowed = [size, *SIZES[SIZES.index(size) + 1 : SIZES.index("smoke")]]
    done = at_largest_size(results.finished[results.finished["size"].isin(allowed)])
    largest = dict(zip(done["experiment"], done["size"]))
    return results.filtered(lambda frame: frame["size"] == frame["experiment"].map(largest))


def open_results(root: str | Path, size: str | None = None, patterns: Sequence[str] = ("*",)) -> Results:
    """Return the runs below `root`, which may also be an export. If `root` is the default `runs`, experiments without a
    finished run there come from the committed results, with a note. Raises UserError if another `root` does not exist."""
    root, default = Path(root), Path(root) == Path("runs")
    results = load_exported(root) if default and not root.is_dir() else load(root, patterns, size)
    if default:
        results = merged(results, load(RESULTS, patterns, size), ["experiment", "size"])
        absent = results.runs.loc[results.runs["path"] == "", "experiment"].unique()  # exports have no paths
        if len(absent):
            print(f"from the committed results in analysis/results: {', '.join(absent)}", file=sys.stderr)
    return results


def merged(own: Results, committed: Results, by: list[str]) -> Results:
    """Return both results, without the committed rows that equal a finished run of `own` in the columns `by`."""
    known = pd.MultiIndex.from_frame(own.finished[by])
    rest = committed.filtered(lambda frame: ~pd.MultiIndex.from_frame(frame[by]).isin(known))
    both = [[frame for frame in pair if len(frame)] or [pair[0]] for pair in zip(own.frames, rest.frames)]
    return Results(*(pd.concat(frames, ignore_index=True) for frames in both), own.problems)


def load(root: str | Path = "runs", patterns: Sequence[str] = ("*",), size: str | None = None) -> Results:
    """Read the runs below `root`, or an export. Unfinished runs are in `runs` and in `problems`, runs that cannot be read in
    `problems` alone. Raises UserError if `root` does not exist, or if one run counts twice."""
    if (Path(root) / RUNS_FILE).exists():
        return load_exported(root).matching(patterns).select(size=size or SIZES)
    rows, problems, configs = list[dict[str, Any]](), list[str](), dict[Path, dict[str, Any]]()
    values, reports, matrices = list[pd.DataFrame](), list[dict[str, Any]](), list[pd.DataFrame]()
    for path in folders.find_folders(root, size):
        if not matching([path.parents[2].name], patterns):
            continue
        try:
            row, config = _describe(path)
            done = row["status"] == "done"
            own, torn = _logged(path / "metrics.jsonl") if done else (pd.DataFrame(), 0)
            ended = (folders.read_json(path / "summary.json") or {}).get("steps", 0) if done else 0
            if len(own) and own["step"].max() < ended:
                raise UserError(f"metrics.jsonl ends at step {own['step'].max()}, and the run at {ended}")
            files = [folders.read_json(file) for file in path.glob("boundary_*.json") if done]
            if not all(files):
                raise UserError("the report of a boundary cannot be read")
            found = [*map(_report, sorted(files, key=lambda one: one.get("phase", 0)))]
        except UNREADABLE as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            problems.append(f"{path}: left out ({reason[:200]})")
            continue
        rows.append(row)
        first = configs.setdefault(path.parent, config)
        differ = {key for key in {**first, **config} if first.get(key) != config.get(key)} - {"seed"}
        if differ:
            said = f"its seeds differ in {', '.join(sorted(differ))}"
            raise UserError(f"{path.parent}: {said}: move the runs of one config elsewhere")
        if not done:
            failed = folders.read_text(path / "FAILED").strip().partition("\n")[0]
            problems.append(f"{path}: {row['status']}{failed and ': '}{failed}")
            continue
        values.append(own.assign(run=len(rows) - 1))
        for about, changed in found:
            matrices.append(changed.assign(report=len(reports)))
            reports.append({key: row[key] for key in KEYS} | about)
        if torn:
            problems.append(f"{path}/metrics.jsonl: {torn} unreadable line(s) left out")
    runs = pd.DataFrame(rows, columns=COLUMNS["runs"])
    long = pd.concat(values) if values else pd.DataFrame(columns=["run", *COORDINATES, "metric", "value"])
    metrics = long.join(runs[[*PANEL, "seed"]], on="run")[COLUMNS["metrics"]].reset_index(drop=True)
    boundaries = pd.DataFrame(reports, columns=[*KEYS, "phase", "seconds"])
    if matrices:
        boundaries = with_sums(boundaries, pd.concat(matrices, ignore_index=True))
    return checked(Results(runs, metrics, boundaries.reindex(columns=COLUMNS["boundaries"]), problems))


def _describe(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the row of a folder in the frame of runs, and its config; `model` and `detail` (pixels, or the shape of a GPT)
    are for titles. Raises UserError if the folder's name says that settings were changed and meta.json does not say which,
    or that its label belongs to another config."""
    config, meta = folders.read_config(path), folders.read_meta(path)
    known = {key: value for key, value in config.items() if isinstance(value, dict)}
    model, data, env = (known.get(key, {}) for key in ("model", "data", "env"))
    pixels = data.get("image_size") or env.get("frame_size")
    shape = f"{model['layers']} layers, width {model['width']}" if "layers" in model else ""
    label, _, tail = path.parent.name.rpartition("-")
    if tail in (str(meta.get("identity"))[:8], folders.without_seed(config)):
        raise UserError(
            f"another config than that of {label}: move that elsewhere and rename this to {label}, or set run.root"
        )
    changed = [text for text in meta.get("overrides") or [] if not text.startswith("data.folder=")]
    if not changed and path.parent.name != (meta.get("method") or path.parent.name.partition("-")[0]):
        raise UserError("meta.json does not list its overrides")
    told = folders.describe_run(path, config)
    told |= {"model": str(model.get("name") or ""), "detail": f"{pixels} px" if pixels else shape}
    told |= {"identity": str(meta.get("identity") or ""), "overrides": json.dumps([*map(printable, changed)])}
    row = {key: printable(value) if isinstance(value, str) else value for key, value in told.items()}
    if row["size"] not in SIZES:
        raise UserError(f"{row['size']!r} is no size")
    head, _, tail = row["experiment"].partition("_")
    figure, panel = (head, tail) if head.startswith("fig") and tail else ("", row["experiment"])
    return row | {"path": str(path), "figure": figure, "panel": panel}, config


def _logged(path: Path) -> tuple[pd.DataFrame, int]:
    """Return every number in metrics.jsonl (columns COORDINATES, metric, value) and how many lines are no records."""
    records, torn = folders.read_lines(path)
    table = pd.DataFrame(records).apply(pd.to_numeric, errors="coerce").select_dtypes("number")
    table = table.reindex(columns=[*COORDINATES, *table.columns.difference([*COORDINATES, "act"])])
    whole = table["step"].notna()
    long = table[whole].fillna({"phase": 0}).melt(COORDINATES, var_name="metric", value_name="its value")
    long = long.rename(columns={"its value": "value"}).dropna(subset="value")  # `value` is a metric of SAC
    return long.astype({"phase": int, "step": int, "value": float}), torn + int((~whole).sum())


def _report(report: dict[str, Any]) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return (phase and seconds of a boundary report, one row per matrix that changed)."""
    rows = [row for row in report.get("rows", []) if row.get("dfi_after") is not None]
    table = pd.DataFrame(rows, columns=["name", *SUMMED, "sfe_relative"])
    numbers = table.drop(columns="name").apply(pd.to_numeric).assign(name=table["name"].map(str))
    about = {"phase": int(report.get("act", report.get("phase", 1))), "seconds": report.get("seconds")}
    return about, numbers


def with_sums(reports: pd.DataFrame, matrices: pd.DataFrame) -> pd.DataFrame:
    """Return `reports` with DfI and SFE summed over their `matrices` (column report: the row in `reports`). The columns
    `common_...` are sums over those matrices that `fire` changes in the same setting (or, where it did not run,
    `fire_exact`), so that methods with other targets can be compared; they are empty where neither ran."""
    named = matrices.join(reports[[*SETTING, "label"]], on="report")
    of_fire = named[named["label"].isin(["fire", "fire_exact"])]
    chosen = of_fire.groupby(SETTING)["label"].transform("min")  # fire, where it ran
    targets = of_fire.loc[of_fire["label"] == chosen, [*SETTING, "name"]].drop_duplicates()
    common = _sums(named.merge(targets), reports.index)
    known = reports.merge(targets[SETTING].drop_duplicates(), how="left", indicator=True)["_merge"] == "both"
    return reports.join(_sums(matrices, reports.index)).join(common[known].add_prefix("common_"))


def _sums(changed: pd.DataFrame, reports: pd.Index) -> pd.DataFrame:
    """Return one row of sums per report. `sfe_share` is that of the SFE divided by the distance that a reset to the initial
    weights would have moved; each matrix has its SFE and the quotient of the two."""
    known = changed[(changed["sfe"] > 0) & (changed["sfe_relative"] > 0)]
    moved = known.assign(reset=known["sfe"] / known["sfe_relative"]).groupby("report")[["sfe", "reset"]].sum()
    groups = changed.groupby("report")
    found = groups[SUMMED].sum(min_count=1).assign(sfe_share=moved["sfe"] / moved["reset"])
    return found.reindex(reports).assign(matrices=groups.size().reindex(reports, fill_value=0))


def load_exported(folder: str | Path = RESULTS) -> Results:
    """Return the results that `export` wrote, if any. Raises UserError for runs that were exported twice."""
    frames = []
    for name, columns in COLUMNS.items():
        files = sorted(Path(folder).glob("metrics/*.csv.xz" if name == "metrics" else f"{name}.csv.xz"))
        empty = {column: [""] for column in columns if column not in TEXT}
        read = [pd.DataFrame(columns=columns)] * (not files)
        try:
            read += [pd.read_csv(path, dtype=TEXT, keep_default_na=False, na_values=empty) for path in files]
            frames.append(pd.concat(read, ignore_index=True)[columns])
        except (*UNREADABLE, EOFError, lzma.LZMAError) as error:
            raise UserError(f"cannot read {name} in {folder} ({first_line(error)}): export again") from error
    return checked(Results(*frames))


def checked(results: Results) -> Results:
    """Return `results`. Raises UserError if one run counts twice: the same seed, or the same numbers under two seeds."""
    logged = pd.util.hash_pandas_object(results.metrics[["phase", "step", "metric", "value"]], index=False)
    numbers = logged.groupby([results.metrics[name] for name in RUN]).sum().rename("numbers").reset_index()
    copies = numbers, [*RUN[:-1], "numbers"], "have the same numbers"
    for frame, same, what in ((results.runs, RUN, "are in two folders"), copies):
        for _, twice in frame[frame.duplicated(same, keep=False)].groupby(same):
            experiment, size, _, label, _ = twice.iloc[0][RUN]
            raise UserError(
                f"{experiment} {size} {label}: seeds {', '.join(map(str, twice['seed']))} {what}, and a run that counts "
                "twice makes every interval too narrow: delete one"
            )
    return results
