"""Show which runs are done, running, failed, unfinished or missing: python -m harness.status --root runs [--detail]"""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from fire_core.columns import columns
from fire_core.errors import clean_exit, printable
from harness.config import options as files_of
from harness.runs.folders import find_folders, identify, read_meta, read_text

STATES = ("done", "running", "failed", "unfinished", "missing")
SETTING = itemgetter("experiment", "size")


def with_missing(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs of each experiment and size, with a row for each combination that is missing of the methods that were
    run without overrides and the seeds of any run."""
    rows = []
    for (experiment, size), group in groupby(sorted(runs, key=SETTING), key=SETTING):
        by_name = {(run["label"], run["seed"]): run for run in group}
        labels = {run["label"] for run in by_name.values() if run["label"] == run["method"]}
        wanted = {(label, seed) for label in labels for _, seed in by_name}
        for label, seed in sorted(wanted | set(by_name)):
            absent = {"experiment": experiment, "size": size, "label": label, "seed": seed}
            rows.append(by_name.get((label, seed), absent | {"status": "missing"}))
    return rows


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m harness.status", description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="runs", help="folder of all runs (runs)")
    parser.add_argument("--detail", action="store_true", help="one line for each run")
    options = parser.parse_args(given)
    folders = find_folders(options.root)
    rows = with_missing(identify(path, read_meta(path)) | {"path": path} for path in folders)
    table = []
    for (experiment, size), group in groupby(rows, key=SETTING):
        runs = list(group)
        counts, labels = Counter(row["status"] for row in runs), dict.fromkeys(row["label"] for row in runs)
        line = {"experiment": experiment, "size": size} | {state: counts[state] for state in STATES}
        table.append(line | {"methods": " ".join(labels)})
    lines = columns(table).splitlines() or [f"no runs in '{options.root}' yet"]
    for row in rows:
        if options.detail or row["status"] not in ("done", "running"):
            name = f"{row['experiment']} {row['size']} {row['label']} seed {row['seed']}"
            lines.append(f"{row['status']}: {name}")
        if row["status"] == "failed":
            said = read_text(row["path"] / "FAILED").strip().splitlines()
            lines.append(f"  {row['path']}/FAILED: {said[0] if said else '(empty)'}")
    never_run = [name for name in files_of("experiment") if name not in {row["experiment"] for row in rows}]
    lines.append(f"never run: {', '.join(never_run) or 'none'}")
    print("\n".join(map(printable, lines)))


if __name__ == "__main__":
    with clean_exit():
        main()
