"""The table in README.md: one row a setting that was run, between its two markers.

python -m analysis.readme --write README.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import curves, measures, paper, style
from analysis.figure import experiment_of, names_of, open_results, with_finished_runs
from analysis.load import Results
from analysis.result_tables import joined
from analysis.stats import estimate
from analysis.summary import interval_text, number
from analysis.tables import UNTUNED_NOTE, in_short
from analysis.tabulate import markdown
from fire_core.errors import UserError

START, END = "<!-- results -->", "<!-- /results -->"
TARGETS = {"language": "language-sweep", "dqn": "dqn-sweep", "sac": "sac-sweep", "vision": "vision-sweep"}
SHOWN = ("none", "shrink_perturb", "full_reset", "fire")


def overview(results: Results) -> pd.DataFrame:
    """One row a setting: what, command, time of all its runs on one core, ours with interval, the paper's."""
    rows = []
    for part in curves.settings(results):
        experiment = experiment_of(part)
        found = measures.measures_of(part, experiment)
        if not found or experiment.startswith("ablation"):  # those have a table of their own in REPRODUCED.md
            continue
        ends = measures.end_values(part.metrics, found[0])
        theirs = paper.end_values(*names_of(part))
        runs = part.finished[~part.finished["label"].str.contains("-")]  # what the command makes
        costs = part.costs[~part.costs["label"].str.contains("-")]
        shared = costs.groupby("seed")["shared_seconds"].max()  # once a seed
        seconds = costs["train_seconds"].sum() + shared.sum()
        seeds = ",".join(map(str, sorted(runs["seed"].astype(int).unique())))
        folder = " OVERRIDES=data.folder=FOLDER" if "image_folder" in set(runs["data"]) else ""
        row = {
            "experiment": experiment,
            "size, data": f"{joined(runs['size'])}, {joined(runs['data'])}",
            "measure": found[0].title,
            "command": f"`make {TARGETS[runs['domain'].iloc[0]]} EXPERIMENT={experiment} SIZE={joined(runs['size'])} "
            f"METHODS={','.join(style.ordered(runs['method']))} SEEDS={seeds}{folder}`",
            "runs": f"{len(runs)}, {seconds / 60:.0f} min" if seconds else str(len(runs)),
        }
        for label in SHOWN:
            values = list(measures.by_seed(ends, label).values())
            value = estimate(values) if values else None
            digits = None if value is None or abs(value.value) < 10 else 1
            text = (
                "-"
                if value is None
                else f"{number(value.value, digits)} {interval_text(value.low, value.high, digits)}"
            )
            known = f" (paper {number(theirs[label], digits)})" if label in theirs else ""
            row[style.look(label).name] = text + known
        rows.append(row)
    return pd.DataFrame(rows)


def fill(text: str, table: str) -> str:
    """`text` with what stands between the markers replaced."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise UserError(f"no single pair of {START} and {END} in the file")
    head, rest = text.split(START)
    return f"{head}{START}\n{table}\n{END}{rest.split(END)[1]}"


def block(results: Results) -> str:
    """The table with its caption."""
    machine = joined(results.finished["machine"])
    words = "\n".join(in_short(results))
    return (
        f"{markdown(overview(results))}\n\n"
        "Mean and 95 % interval over seeds; minutes are the sum over all methods and seeds, by the clock, one thread each, "
        f"two or more runs at a time, on {machine}. The paper's values are on its own data at its own size.\n\n"
        f"FIRE against everything that was run, controls included:\n\n{words}\n\n{UNTUNED_NOTE}"
    )


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="analysis/results", help="an export or a folder of runs")
    parser.add_argument(
        "--write", default=None, metavar="FILE", help="fill the table of this file; default: print"
    )
    options = parser.parse_args(given)
    try:
        text = block(with_finished_runs(open_results(options.root), options.root))
        if options.write:
            path = Path(options.write)
            path.write_text(fill(path.read_text(encoding="utf-8"), text), encoding="utf-8")
            print(path)
        else:
            print(text)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
