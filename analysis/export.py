"""Run folders as the compressed CSV files of analysis/results, small enough to commit."""

import lzma
from pathlib import Path

import pandas as pd

from analysis import measures
from analysis.runs import COLUMNS, RESULTS, RUN, Results, load_exported, merged
from fire_core.files import written_aside

CURVES = ["label", "seed", "metric", "phase", "step"]  # sorting order of exported curves
POINTS = 60  # values per phase that an exported curve keeps at least, if it has them; see `thin`


def export(results: Results, folder: Path = RESULTS) -> list[Path]:
    """Write the finished runs as CSV files that are small enough to commit, and return the paths. Runs that `folder`
    already holds are kept, unless experiment, size, data, label and seed are those of a new run."""
    own, curves = results.finished.assign(path=""), list[pd.DataFrame]()
    settings = sorted(set(zip(own["experiment"], own["size"])))
    for experiment, size in settings:
        part = results.select(experiment=experiment, size=size)
        wanted = {each.logged for each in [*measures.of(part), *measures.OTHERWISE]} | {*measures.EXPORTED}
        rows = part.metrics[part.metrics["metric"].isin(wanted)]
        whole = rows["metric"].isin({each.metric for each in measures.of(part) if each.reduce == "tail"})
        curves += [rows[whole], thin(rows[~whole])]  # a mean over rows needs all of them
    thinned = pd.concat(curves, ignore_index=True) if curves else results.metrics
    table = merged(Results(own, thinned, results.boundaries), load_exported(folder), RUN)
    metrics = table.metrics.sort_values(CURVES, kind="stable")
    paths = []
    for experiment, size in settings:
        rows = metrics[(metrics["experiment"] == experiment) & (metrics["size"] == size)]
        paths.append(_write(rows[COLUMNS["metrics"]], folder / "metrics" / f"{experiment}-{size}.csv.xz"))
    for name in ("runs", "boundaries"):
        order = [c for c in ("experiment", "size", "label", "seed", "phase") if c in COLUMNS[name]]
        frame = getattr(table, name).sort_values(order, kind="stable")
        paths.append(_write(frame[COLUMNS[name]], folder / f"{name}.csv.xz"))
    return paths


def thin(rows: pd.DataFrame) -> pd.DataFrame:
    """Return fewer than 2 * POINTS values per phase of each label, seed and metric, its first and its last with them."""
    rows = rows.sort_values(CURVES, kind="stable")
    groups = rows.groupby(CURVES[:-1])["step"]
    place, count = groups.cumcount(), groups.transform("size")
    return rows[(place == 0) | (place == count - 1) | ((place + 1) % (count // POINTS).clip(lower=1) == 0)]


def _write(frame: pd.DataFrame, path: Path) -> Path:
    """Write a frame as compressed CSV, so that the same numbers give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A column that also holds None would be written with all digits.
    text = frame.infer_objects().to_csv(index=False, float_format="%.6g", lineterminator="\n")
    with written_aside(path) as aside:
        aside.write_bytes(lzma.compress(text.encode(), preset=9))
    return path
