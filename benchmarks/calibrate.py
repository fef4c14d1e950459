"""Calibration of a setting before methods are compared: is plasticity lost and, in RL, is the task learned?

    python -m benchmarks.calibrate fig2a_cifar10_resnet18 medium --root runs --setting "what was reduced" --chosen
    python -m benchmarks.calibrate fig4b_walk small --setting "what was reduced"

Reads `none` and `full_reset` of one experiment, from the committed results or, with `--root`, from a folder of runs.
Adds rows to analysis/results/calibration.csv, each a paired difference over the seeds with its 95 % interval
(Student's t):

- images, lost: test accuracy at the end, `full_reset` minus `none`; with random labels training accuracy at the end of a
  task, over the last quarter of the tasks;
- language, lost: validation loss on the mixture at the end, `none` minus `full_reset`; overfitted: loss on the old
  corpus right before the boundary, minus its lowest value;
- RL, learned: level of `none` at the end of the first half, minus that of random actions; lost: gain of `full_reset` in the
  second half, counted from random actions, minus that of `none` in the same steps. A level is the mean over the last
  quarter of a half, of training returns (DQN) or of evaluations (SAC), as in the figure.

A setting is suitable for a comparison if the intervals lie above 0.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from fire_core.errors import UserError
from harness.runs.folders import read_meta, state_of

RESULTS = Path(__file__).resolve().parents[1] / "analysis" / "results"
PAIR = ["none", "full_reset"]
COLUMNS = [
    "panel", "size", "setting", "seeds", "metric", "none", "full_reset", "random", "difference", "interval",
    "minutes", "commit", "chosen",
]  # fmt: skip


def committed(experiment: str, size: str) -> tuple[pd.DataFrame, float, str]:
    """Return the exported results as (rows with the columns method, seed, phase, step, metric and value, mean minutes
    of training of `none`, commits)."""
    lines = pd.read_csv(RESULTS / "metrics" / f"{experiment}-{size}.csv")
    costs, runs = (
        table[(table.experiment == experiment) & (table["size"] == size) & (table.label == "none")]
        for table in (pd.read_csv(RESULTS / name) for name in ("costs.csv", "runs.csv"))
    )
    return lines[lines.method == lines.label], costs.train_seconds.mean() / 60, " ".join(runs.commit.unique())


def on_disk(root: Path, experiment: str, size: str) -> tuple[pd.DataFrame, float, str]:
    """Return the same for the runs under `root` that are finished and have no overrides in their label. Raises
    UserError if there are none."""
    rows, minutes, commits = [], [], set()
    for folder in (root / experiment / size).glob("*/seed_*"):
        meta = read_meta(folder)
        if state_of(folder) != "done" or folder.parent.name != meta.get("method"):
            continue
        commits.add(str(meta.get("commit"))[:10])
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
            facts = {"method": meta["method"], "seed": int(folder.name.removeprefix("seed_"))}
            facts |= {name: line.pop(name) for name in ("phase", "step")}
            rows += [facts | {"metric": name, "value": value} for name, value in line.items()]
        if meta["method"] == "none" and (timing := folder / "timing.jsonl").exists():
            lines = [json.loads(line) for line in timing.read_text().splitlines()]
            named = [line.get("train_seconds", line.get("seconds", 0.0)) for line in lines]
            minutes.append(sum(named) / 60)
    if not rows:
        raise UserError(f"no finished run of {experiment}, size {size}, without overrides under {root}")
    return pd.DataFrame(rows), float(np.mean(minutes)), " ".join(sorted(commits))


def levels(lines: pd.DataFrame, metric: str, phase: int) -> pd.DataFrame:
    """Return the mean of `metric` over the last quarter of a half; rows are seeds, columns methods."""
    half = lines[(lines.metric == metric) & (lines.phase == phase) & lines.method.isin(PAIR)]
    first, last = half.step.min(), half.step.max()
    tail = half[half.step > last - (last - first) / 4]
    return tail.groupby(["seed", "method"]).value.mean().unstack("method")


def interval(differences: pd.Series) -> str:
    """Return the 95 % interval of the mean as "low..high", or "" for one seed."""
    if len(differences) < 2:
        return ""
    if differences.nunique() == 1:
        return f"{differences.iloc[0]:.4g}..{differences.iloc[0]:.4g}"
    low, high = stats.t.interval(0.95, len(differences) - 1, differences.mean(), stats.sem(differences))
    return f"{low:.4g}..{high:.4g}"


def rows(experiment: str, lines: pd.DataFrame) -> list[dict[str, object]]:
    """Return the measured columns of the rows of one setting."""
    if experiment == "random_label":
        return [lost_in_late_tasks(lines)]
    if experiment.startswith(("fig2", "label_noise")):
        return [lost_at_the_end(lines, "test_accuracy", better=1)]
    if experiment.startswith("fig3"):
        return [overfitted(lines), lost_at_the_end(lines, "val_loss_mix", better=-1)]
    return learned_and_lost(lines, "train_return" if experiment.startswith("fig4a") else "eval_return")


def lost_at_the_end(lines: pd.DataFrame, metric: str, *, better: int) -> dict[str, object]:
    """Return how much better a full reset ends than no reset; `better` is 1 where high values are good, else -1."""
    ordered = lines[lines.metric == metric].sort_values("step")
    end = ordered.groupby(["seed", "method"]).value.last().unstack("method")[PAIR].dropna()
    lost = better * (end.full_reset - end.none)
    return {
        "seeds": len(end), "metric": f"lost: {metric} at the end", "none": end.none.mean(),
        "full_reset": end.full_reset.mean(), "difference": lost.mean(), "interval": interval(lost),
    }  # fmt: skip


def lost_in_late_tasks(lines: pd.DataFrame) -> dict[str, object]:
    """Return how much better a full reset learns the last quarter of the tasks than no reset."""
    learned = lines[lines.metric == "train_accuracy"].sort_values("step")
    ends = learned.groupby(["seed", "method", "phase"]).value.last().unstack("phase")
    late = ends.iloc[:, -(ends.shape[1] // 4) :].mean(axis=1).unstack("method")[PAIR].dropna()
    lost = late.full_reset - late.none
    return {
        "seeds": len(late), "metric": "lost: train_accuracy of the last quarter of the tasks", "none": late.none.mean(),
        "full_reset": late.full_reset.mean(), "difference": lost.mean(), "interval": interval(lost),
    }  # fmt: skip


def overfitted(lines: pd.DataFrame) -> dict[str, object]:
    """Return how far the loss on the old corpus at the end of phase 1 is above its minimum."""
    first = lines[(lines.metric == "val_loss_a") & (lines.phase == 0) & (lines.method == "none")]
    losses = first.sort_values("step").groupby("seed").value
    rise = losses.last() - losses.min()
    return {
        "seeds": len(rise), "metric": "overfitted: val_loss_a at the fork above its minimum",
        "none": losses.last().mean(), "difference": rise.mean(), "interval": interval(rise),
    }  # fmt: skip


def learned_and_lost(lines: pd.DataFrame, metric: str) -> list[dict[str, object]]:
    """Return two rows: what an agent learned in the first half, and how much more a reset agent gained in the
    second."""
    random = lines[lines.metric == "random_return"].groupby("seed").value.mean()
    before, after = levels(lines, metric, 0)["none"], levels(lines, metric, 1)
    seeds = sorted(set(after.dropna().index) & set(before.index) & set(random.index))
    random, before, after = random.loc[seeds], before.loc[seeds], after.loc[seeds]
    learned = before - random
    gains = {"none": after.none - before, "full_reset": after.full_reset - random}
    lost = gains["full_reset"] - gains["none"]
    shared = {"seeds": len(seeds), "random": random.mean()}
    return [
        shared
        | {"metric": f"learned: {metric} before the boundary", "none": before.mean()}
        | {"difference": learned.mean(), "interval": interval(learned)},
        shared
        | {"metric": f"lost: gain of {metric} after it", **{m: gain.mean() for m, gain in gains.items()}}
        | {"difference": lost.mean(), "interval": interval(lost)},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment")
    parser.add_argument("size")
    parser.add_argument("--setting", required=True, help="what was reduced, in words")
    parser.add_argument("--panel", help="name of the panel, if it is not that of the experiment")
    parser.add_argument("--root", type=Path, help="folder of runs; the committed results if not given")
    parser.add_argument(
        "--chosen", action="store_true", help="mark this as the setting in which methods are compared"
    )
    options = parser.parse_args()
    read = (options.experiment, options.size)
    try:
        lines, minutes, commit = on_disk(options.root, *read) if options.root else committed(*read)
    except UserError as error:
        parser.error(str(error))
    named = {"panel": options.panel or options.experiment, "size": options.size, "setting": options.setting}
    named |= {"minutes": minutes}
    named |= {"commit": commit, "chosen": "yes" if options.chosen else "no"}
    table = pd.DataFrame([named | row for row in rows(options.experiment, lines)], columns=COLUMNS)
    path = RESULTS / "calibration.csv"
    table.to_csv(
        path, mode="a", header=not path.exists(), index=False, float_format="%.4g", lineterminator="\n"
    )
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
