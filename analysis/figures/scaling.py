"""Figure of the scaling study: does the order of the methods in the warm start depend on the number of images, the width of
the network, or the length of the second stage?"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis import measures, names, paper, plot
from analysis.plot import Figure, plt
from analysis.rendering import spread
from analysis.runs import Results
from analysis.stats import paired_difference

PREFIXES = ("scaling_warm_start",)
PAIRS = (("fire", "full_reset"), ("full_reset", "none"))
CLASSES = 10  # of CIFAR-10
COLUMNS = ["study", "images", "better", "worse", "mean", "low", "high", "seeds"]
IMAGES = "data.train_per_class"
ALL_IMAGES = 50_000  # the paper's
NAMES = {
    "scaling_warm_start": "as Figure 2a",
    "scaling_warm_start_wide": "twice the width",
    "scaling_warm_start_long": "second stage four times as long",
}
CAPTION = (
    "Warm start of ResNet-18 on a part of CIFAR-10 and on all of it: differences of test accuracy at the end, paired by "
    f"seed, against the number of images. {plot.BAND} Black: the paper, which has eight times the width, images of "
    "32 pixels and 100 epochs in the second stage."
)


def differences(parts: Sequence[Results]) -> pd.DataFrame:
    """Return one row per study, number of images and pair of methods (COLUMNS): PAIRS, FIRE and S&P. Further changed
    settings belong to the name of the study."""
    rows = []
    for part in parts:
        ends = measures.values(part.metrics, measures.of(part)[0])
        methods = part.runs.groupby("label")["method"].first()
        groups: dict[tuple[str, ...], dict[str, dict[int, float]]] = {}
        for label, changed in part.overrides.items():
            if IMAGES in changed and label in ends:
                others = names.changes({key: value for key, value in changed.items() if key != IMAGES})
                groups.setdefault((changed[IMAGES], others), {})[methods[label]] = ends[label]
        for (per_class, others), at in groups.items():
            name = NAMES.get(experiment := part.first["experiment"], experiment)
            study, images = ", ".join(filter(None, [name, others])), CLASSES * int(per_class)
            for better, worse in (*PAIRS, ("fire", "shrink_perturb")):
                gain = paired_difference(at.get(better, {}), at.get(worse, {}))
                if gain:
                    rows.append((study, images, better, worse, gain.mean, gain.low, gain.high, gain.n))
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.sort_values(["study", "images"], kind="stable", ignore_index=True)


def table(found: pd.DataFrame) -> pd.DataFrame:
    """Return the differences as text, one row per study and number of images."""
    names_of = zip(found["better"], found["worse"])
    numbers = zip(found["mean"], found["low"], found["high"], found["seeds"])
    found = found.assign(
        pair=[f"{names.look(a).name} minus {names.look(b).name}" for a, b in names_of],
        text=[f"{spread(*row, sign=True)} ({seeds})" for *row, seeds in numbers],
    )
    wide = found.pivot(index=["study", "images"], columns="pair", values="text").fillna("-").reset_index()
    return wide.assign(images=wide["images"].map("{:,}".format))


def draw(parts: Sequence[Results]) -> Figure:
    """Return the figure, one panel per pair of PAIRS."""
    table = differences(parts)
    figure, grid = plt.subplots(1, len(PAIRS), figsize=(7.0, 3.0), squeeze=False)
    for axis, (better, worse) in zip(grid[0], PAIRS):
        rows = table[(table["better"] == better) & (table["worse"] == worse)]
        for number, (study, line) in enumerate(rows.groupby("study", sort=False)):
            reach = [line["mean"] - line["low"], line["high"] - line["mean"]]
            beside = line["images"] * 1.03**number  # so that intervals do not cover each other
            axis.errorbar(beside, line["mean"], reach, fmt="o-", markersize=4, linewidth=1.2, label=study)
        theirs = paper.gain("fig2a", "cifar10_resnet18", better, worse)
        axis.plot(ALL_IMAGES, theirs, "k_", markersize=12, markeredgewidth=2, label="the paper")
        axis.axhline(0, color="#8A8A8A", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xticks(ticks := sorted({*table["images"], ALL_IMAGES}), [f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("images")
        axis.set_title(f"{names.look(better).name} minus {names.look(worse).name}")
    grid[0, 0].set_ylabel("difference of test accuracy")
    figure.tight_layout()
    handles, texts = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="upper center", ncol=4, frameon=False, bbox_to_anchor=(0.5, 0.0))
    return figure
