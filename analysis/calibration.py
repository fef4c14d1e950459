"""Calibration of a setting before methods are compared: is plasticity lost and, in RL, is the task learned?

    python -m analysis.calibration fig2a_cifar10_resnet18 medium --root runs --setting "what was reduced" --chosen
    python -m analysis.calibration fig4b_walk small --setting "what was reduced"

Reads `none` and `full_reset` of one experiment, from the committed results or, with `--root`, from a folder of runs.
Adds rows to analysis/results/calibration.csv, each a paired difference over the seeds with its 95 % interval
(Student's t):

- images, lost: the first measure of the experiment (test accuracy at the end; with random labels training accuracy at
  the end of a task, over the last quarter of the tasks), `full_reset` minus `none`;
- language, lost: validation loss on the mixture at the end, `none` minus `full_reset`; overfitted: loss on the old
  corpus right before the boundary, minus its lowest value;
- RL, learned: level of `none` at the end of the first half, minus that of random actions; lost: gain of `full_reset` in the
  second half, counted from random actions, minus that of `none` in the same steps. A level is the mean over the last
  quarter of a half, of training returns (DQN) or of evaluations (SAC), as in the figure.

A setting is suitable for a comparison if the intervals lie above 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import measures
from analysis.measures import Measure
from analysis.rendering import markdown, short
from analysis.runs import RESULTS, Results, load, load_exported, plain
from analysis.stats import Estimate, estimate, paired_difference
from fire_core.errors import UserError, print_error

PAIR = ("none", "full_reset")
COLUMNS = [
    "panel", "size", "setting", "seeds", "metric", "none", "full_reset", "random", "difference", "interval",
    "minutes", "commit", "chosen",
]  # fmt: skip


def finished(root: Path | None, experiment: str, size: str) -> Results:
    """Return the finished runs without overrides, of the committed results without `root`. Raises UserError if one of
    PAIR is missing."""
    results = (
        load(root, [experiment], size) if root else load_exported().select(experiment=experiment, size=size)
    )
    part = plain(results)
    if lacks := [label for label in PAIR if label not in set(part.finished["label"])]:
        raise UserError(
            f"no finished run of {experiment}, size {size}, method {lacks[0]}, in {root or RESULTS}"
        )
    return part


def rows(part: Results) -> list[dict[str, Any]]:
    """Return the measured columns of the rows of one setting."""
    headline, domain = measures.of(part)[0], part.first["domain"]
    if domain in ("dqn", "sac"):
        return learned_and_lost(part.metrics, headline.metric)
    lost = lost_at_the_end(part.metrics, headline)
    return [overfitted(part.metrics), lost] if domain == "language" else [lost]


def row(metric: str, found: Estimate, **levels: float) -> dict[str, Any]:
    """Return one row: what was measured, the levels behind it, and the difference with its interval."""
    interval = "" if found.n < 2 else f"{found.low:.4g}..{found.high:.4g}"
    return {"seeds": found.n, "metric": metric, **levels, "difference": found.mean, "interval": interval}


def lost_at_the_end(metrics: pd.DataFrame, measure: Measure) -> dict[str, Any]:
    """Return how much better a full reset ends than no reset."""
    ends = measures.values(metrics, measure)
    pair = [ends["full_reset"], ends["none"]]
    lost = paired_difference(*(pair if measure.higher_is_better else pair[::-1]))
    if lost is None:
        raise UserError("none and full_reset share no seed")
    seeds = set(pair[0]) & set(pair[1])
    levels = {label: sum(ends[label][seed] for seed in seeds) / len(seeds) for label in PAIR}
    return row(f"lost: {measure.metric} at the end", lost, **levels)


def overfitted(metrics: pd.DataFrame) -> dict[str, Any]:
    """Return how far the loss on the old corpus at the end of phase 1 is above its minimum."""
    losses = measures.ordered_rows(metrics, "val_loss_a").query("phase == 0 and label == 'none'")
    losses = losses.groupby("seed")["value"]
    rise = estimate(losses.last() - losses.min())
    return row("overfitted: val_loss_a at the fork above its minimum", rise, none=losses.last().mean())


def levels(metrics: pd.DataFrame, metric: str, phase: int) -> pd.DataFrame:
    """Return the mean of `metric` over the last quarter of a half; rows are seeds, columns methods."""
    half = metrics[(metrics["metric"] == metric) & (metrics["phase"] == phase) & metrics["label"].isin(PAIR)]
    first, last = half["step"].min(), half["step"].max()
    tail = half[half["step"] > last - (last - first) / 4]
    return tail.groupby(["seed", "label"])["value"].mean().unstack("label")


def learned_and_lost(metrics: pd.DataFrame, metric: str) -> list[dict[str, Any]]:
    """Return two rows: what an agent learned in the first half, and how much more a reset agent gained in the
    second."""
    random = metrics[metrics["metric"] == "random_return"].groupby("seed")["value"].mean().rename("random")
    before, after = levels(metrics, metric, 0)["none"].rename("before"), levels(metrics, metric, 1)
    both = pd.concat([random, before, after], axis=1).dropna()
    gains = {"none": both["none"] - both["before"], "full_reset": both["full_reset"] - both["random"]}
    shared = {"random": both["random"].mean()}
    learned, lost = estimate(both["before"] - both["random"]), estimate(gains["full_reset"] - gains["none"])
    return [
        row(f"learned: {metric} before the boundary", learned, none=both["before"].mean(), **shared),
        row(f"lost: gain of {metric} after it", lost, **{m: g.mean() for m, g in gains.items()}, **shared),
    ]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.calibration", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("experiment")
    parser.add_argument("size")
    parser.add_argument("--setting", required=True, help="what was reduced, in words")
    parser.add_argument("--root", type=Path, help="folder of runs; the committed results if not given")
    parser.add_argument("--chosen", action="store_true", help="methods are compared in this setting")
    options = parser.parse_args(given)
    try:
        results = finished(options.root, options.experiment, options.size)
        measured = rows(results)
    except UserError as error:
        print_error(error)
        return 2
    none = results.costs[results.costs["label"] == "none"]
    commits = sorted(results.runs[results.runs["label"] == "none"]["commit"].unique())
    named = {"panel": options.experiment, "size": options.size, "setting": options.setting}
    named |= {"minutes": none["train_seconds"].mean() / 60, "commit": " ".join(commits)}
    named |= {"chosen": "yes" if options.chosen else "no"}
    found = [named | row for row in measured]
    table = pd.DataFrame(found, columns=COLUMNS)
    path = RESULTS / "calibration.csv"
    written = {"float_format": "%.4g", "lineterminator": "\n", "index": False}
    table.to_csv(path, mode="a", header=not path.exists(), **written)
    print(markdown(table.map(short)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
