"""Which runs are done, damaged, running, failed, unfinished or missing.

python -m analysis.status --root runs [--methods none,fire] [--seeds 1,2,3] [--detail]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import style
from analysis.folders import describe_run, find_folders
from analysis.load import RUN_COLUMNS
from analysis.summary import comma_list, whole_numbers
from analysis.tabulate import markdown
from fire_core.errors import UserError

EXPERIMENTS = Path(__file__).resolve().parents[1] / "conf" / "experiment"
STATES = ("done", "damaged", "running", "failed", "unfinished", "missing")


def states(runs: pd.DataFrame, methods: Sequence[str] = (), seeds: Sequence[int] = ()) -> pd.DataFrame:
    """One row a run that is there or ought to be: experiment, size, label, seed, status. Without `methods`
    and `seeds`, every plain label and seed that an experiment has at a size is expected in all
    combinations."""
    rows = []
    for (experiment, size), group in runs.groupby(["experiment", "size"]):
        known = {(row["label"], row["seed"]): row["status"] for row in group.to_dict("records")}
        plain = {label for label in group["label"] if "-" not in label}
        wanted = {(label, seed) for label in (methods or plain) for seed in (seeds or set(group["seed"]))}
        for label, seed in sorted(wanted | set(known)):
            rows.append((experiment, size, label, int(seed), known.get((label, seed), "missing")))
    return pd.DataFrame(rows, columns=["experiment", "size", "label", "seed", "status"])


def overview(table: pd.DataFrame) -> pd.DataFrame:
    """One row an experiment and size: how many runs are in each state."""
    rows = []
    for (experiment, size), group in table.groupby(["experiment", "size"]):
        counts = group["status"].value_counts()
        cells = {"experiment": experiment, "size": size} | {
            state: int(counts.get(state, 0)) for state in STATES
        }
        rows.append(cells | {"methods": " ".join(style.ordered(group["label"]))})
    return pd.DataFrame(rows)


def never_run(table: pd.DataFrame) -> list[str]:
    """Experiment files without any run folder."""
    known = set(table["experiment"])
    return sorted(path.stem for path in EXPERIMENTS.glob("*.yaml") if path.stem not in known)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.status", description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="runs")
    parser.add_argument("--experiment", nargs="*", default=None)
    parser.add_argument("--size", default=None)
    parser.add_argument("--methods", default="", help="comma list of labels that ought to be there")
    parser.add_argument("--seeds", default="", help="comma list of seeds that ought to be there")
    parser.add_argument("--detail", action="store_true", help="one line a run")
    options = parser.parse_args(given)
    try:
        seeds = whole_numbers(options.seeds)
        folders = find_folders(options.root, options.experiment, options.size)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    runs = pd.DataFrame([describe_run(path) for path in folders], columns=RUN_COLUMNS)
    table = states(runs, comma_list(options.methods), seeds)
    print(markdown(overview(table)) if len(table) else f"no runs in '{options.root}' yet")
    for row in table.to_dict("records"):
        if options.detail or row["status"] in ("damaged", "failed", "unfinished", "missing"):
            print(f"{row['status']}: {row['experiment']} {row['size']} {row['label']} seed {row['seed']}")
    for path, row in zip(folders, runs.to_dict("records")):
        if row["status"] == "failed":
            said = (path / "FAILED").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            print(f"  {path}/FAILED: {said[0] if said else '(empty)'}")
    print(f"never run: {', '.join(never_run(table)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
