"""Write what was really run into analysis/results/, small enough to commit.

    python -m analysis.export --root runs

runs.csv (one row a run, with commit, machine and command), metrics/<experiment>-<size>.csv (the metrics that
tables and figures use), boundaries.csv, costs.csv. Earlier exports of experiments that have no run folder
here are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import measures
from analysis.load import (
    BOUNDARY_COLUMNS,
    COST_COLUMNS,
    METRIC_COLUMNS,
    RUN_COLUMNS,
    Results,
    load,
    load_exported,
    write_frame,
)
from fire_core.errors import UserError

RESULTS = Path(__file__).resolve().parent / "results"
POINTS = 60  # a curve keeps its first and last value of each phase and about this many between
ALSO = (
    "dormant_share",
    "feature_rank",
    "hessian_norm",
    "after_hessian_norm",
    "random_return",
    "eval_unfinished",
)


def thin(rows: pd.DataFrame) -> pd.DataFrame:
    """At most about POINTS values a phase of each label, seed and metric; ends of phases are always kept,
    and all seeds keep the same places."""
    keys = ["label", "seed", "metric", "phase"]
    rows = rows.sort_values([*keys, "step"], kind="stable")
    groups = rows.groupby(keys, observed=True)["step"]
    place, count = groups.cumcount(), groups.transform("size")
    every = (count // POINTS).clip(lower=1)
    return rows[(place == 0) | (place == count - 1) | ((place + 1) % every == 0)]


def export(results: Results, folder: Path = RESULTS) -> list[Path]:
    """Write the CSV files; returns their paths. The order of rows does not depend on the file system."""
    done = results.finished
    old = load_exported(folder)
    pairs = sorted(set(zip(done["experiment"], done["size"])))
    paths = []
    for experiment, size in pairs:
        part = results.select(experiment=experiment, size=size)
        wanted = {m.metric for m in measures.measures_of(part, experiment)} | set(ALSO)
        wanted |= {m.metric for m in measures.OTHERWISE}
        rows = thin(part.metrics[part.metrics["metric"].isin(wanted)])
        paths.append(write_frame(rows[METRIC_COLUMNS], folder / "metrics" / f"{experiment}-{size}.csv"))
    for name, columns, old_frame, new_frame in (
        ("runs.csv", RUN_COLUMNS, old.runs, done.assign(path="")),
        ("boundaries.csv", BOUNDARY_COLUMNS, old.boundaries, results.boundaries),
        ("costs.csv", COST_COLUMNS, old.costs, results.costs),
    ):
        kept = [pair not in pairs for pair in zip(old_frame["experiment"], old_frame["size"])]
        frames = [frame for frame in (old_frame[kept], new_frame) if len(frame)]
        if frames:
            order = [c for c in ("experiment", "size", "label", "seed", "phase") if c in columns]
            table = pd.concat(frames, ignore_index=True).sort_values(order, kind="stable")
            paths.append(write_frame(table[columns], folder / name))
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.export", description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="runs")
    parser.add_argument("--experiment", nargs="*", default=None)
    help_size = "smoke runs prove nothing and stay out"
    parser.add_argument("--size", nargs="*", default=["small", "paper"], help=help_size)
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args(arguments)
    try:
        results = load(options.root, options.experiment).select(size=options.size)
        for path in export(results, Path(options.out)):
            print(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for problem in results.problems:
        print(f"left out: {problem}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
