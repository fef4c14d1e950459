"""What a setting of Figure 4 shows before methods are compared: is the task learned, and is plasticity lost?

    python -m benchmarks.calibrate_rl fig4b_walk small --setting "what was reduced"
    python -m benchmarks.calibrate_rl fig4a_asterix medium --root runs --setting "..." --chosen

Reads `none` and `full_reset`, and the level of random actions, of one experiment: from the committed results, or from a
folder of runs with `--root`. Adds two rows to analysis/results/calibration.csv, each a paired difference over the seeds with
its 95 % interval (Student's t):

- learned: level of `none` at the end of the first half, minus that of random actions;
- lost: gain of `full_reset` in the second half, counted from random actions, minus that of `none` in the same steps.

A setting supports a comparison where both intervals lie above 0. A level is the mean over the last quarter of a half, of
training returns (DQN) or of evaluations (SAC), as in the figure.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

RESULTS = Path(__file__).resolve().parents[1] / "analysis" / "results"
COLUMNS = ["panel", "setting", "seeds", "metric", "none", "full_reset", "random", "difference", "interval"]
COLUMNS += ["minutes", "commit", "chosen"]


def committed(experiment: str, size: str) -> tuple[pd.DataFrame, float, str]:
    """Long frame (method, seed, phase, step, metric, value), minutes a run, and the commits, of exported results."""
    lines = pd.read_csv(RESULTS / "metrics" / f"{experiment}-{size}.csv")
    costs, runs = (
        table[(table.experiment == experiment) & (table["size"] == size) & (table.label == "none")]
        for table in (pd.read_csv(RESULTS / name) for name in ("costs.csv", "runs.csv"))
    )
    return lines[lines.method == lines.label], costs.train_seconds.mean() / 60, " ".join(runs.commit.unique())


def on_disk(root: Path, experiment: str, size: str) -> tuple[pd.DataFrame, float, str]:
    """The same of finished runs under `root`."""
    rows, minutes, commits = [], [], set()
    for folder in (root / experiment / size).glob("*/seed_*"):
        meta = json.loads((folder / "meta.json").read_text())
        commits.add(str(meta.get("commit"))[:10])
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
            facts = {"method": meta["method"], "seed": int(folder.name.removeprefix("seed_"))}
            facts |= {name: line.pop(name) for name in ("phase", "step")}
            rows += [facts | {"metric": name, "value": value} for name, value in line.items()]
        if meta["method"] == "none" and (timing := folder / "timing.jsonl").exists():
            seconds = [json.loads(line).get("seconds", 0.0) for line in timing.read_text().splitlines()]
            minutes.append(sum(seconds) / 60)
    return pd.DataFrame(rows), float(np.mean(minutes)), " ".join(sorted(commits))


def levels(lines: pd.DataFrame, metric: str, phase: int) -> pd.DataFrame:
    """Mean over the last quarter of a half: rows are seeds, columns methods."""
    half = lines[
        (lines.metric == metric) & (lines.phase == phase) & lines.method.isin(["none", "full_reset"])
    ]
    first, last = half.step.min(), half.step.max()
    tail = half[half.step > last - (last - first) / 4]
    return tail.groupby(["seed", "method"]).value.mean().unstack("method")


def interval(differences: pd.Series) -> str:
    """95 % interval of the mean as "low..high"; empty for one seed."""
    if len(differences) < 2:
        return ""
    low, high = stats.t.interval(0.95, len(differences) - 1, differences.mean(), stats.sem(differences))
    return f"{low:.4g}..{high:.4g}"


def rows(lines: pd.DataFrame, metric: str) -> list[dict[str, object]]:
    """The two rows of a setting, without what names it."""
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
    parser.add_argument("--panel", help="as the figure names it, where the experiment does not")
    parser.add_argument("--root", type=Path, help="folder of runs; the committed results if not given")
    parser.add_argument("--chosen", action="store_true", help="this setting will be compared")
    options = parser.parse_args()
    read = (options.experiment, options.size)
    lines, minutes, commit = on_disk(options.root, *read) if options.root else committed(*read)
    metric = "train_return" if options.experiment.startswith("fig4a") else "eval_return"
    named = {"panel": options.panel or options.experiment, "setting": options.setting, "minutes": minutes}
    named |= {"commit": commit, "chosen": "yes" if options.chosen else "no"}
    table = pd.DataFrame([named | row for row in rows(lines, metric)], columns=COLUMNS)
    path = RESULTS / "calibration.csv"
    table.to_csv(
        path, mode="a", header=not path.exists(), index=False, float_format="%.4g", lineterminator="\n"
    )
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
