"""Two figures of docs/findings.md: what the gain of FIRE is made of, and what a boundary costs."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis import estimates, measures, names, plot
from analysis.plot import Figure, plt
from analysis.runs import Results, plain
from analysis.stats import estimate

GAINS = ("fig2a_cifar10_resnet18", "fig2a_tiny_imagenet_vgg16", "fig3_best", "fig3_30k", "fig3_60k")
PARTS = ("fire", "rescale", "fire_exact", "full_reset")
GAINS_CAPTION = (
    "Gain over no treatment at the end of training: FIRE, its norms alone with the old directions (rescale), the exact "
    f"projection (FIRE exact), and a full reset. {plot.BAND} All seeds, paired; a lower loss is a gain."
)
COSTS = ("fig2a_cifar10_resnet18", "fig2a_cifar100_vit_tiny", "fig3_60k", "fig4b_walk")
TREATED = ("none", "fire", "shrink_perturb", "full_reset")
COSTS_CAPTION = (
    "What a boundary costs: the measure right before it, right after it and before any training, and at the end. "
    f"{plot.BAND} All seeds. ResNet-18 has batch norm, whose statistics are those of the old weights right after."
)
MOMENTS = ("before", "right after", "end")


def draw_gains(parts: Sequence[Results]) -> Figure:
    """Return the figure of what the gain is made of, one panel for images and one for language."""
    frame = pd.concat(map(estimates.frame, parts), ignore_index=True)
    rows = frame[frame["headline"] & (frame["reference"] == "none")].set_index(["experiment", "label"])
    figure, grid = plt.subplots(1, 2, figsize=(7.4, 2.4), width_ratios=(2, 3))
    titles = {p.first["experiment"]: names.panel(*p.first[["figure", "panel"]]) for p in parts}
    for axis, start, unit in zip(grid, ("fig2", "fig3"), ("test accuracy", "validation loss")):
        shown = [experiment for experiment in GAINS if experiment.startswith(start) and experiment in titles]
        for place, experiment in enumerate(shown):
            for beside, label in enumerate(PARTS):
                if (experiment, label) in rows.index:
                    row, look = rows.loc[(experiment, label)], names.look(label)
                    sign = 1 if row["higher_is_better"] else -1
                    x, mean = place + 0.17 * (beside - 1.5), sign * row["difference"]
                    ends = [sign * row["difference_low"], sign * row["difference_high"]]
                    axis.plot([x, x], ends, color=look.colour, linewidth=1.5)
                    axis.plot(x, mean, look.marker, color=look.colour, markersize=5, label=look.name)
        axis.axhline(0, color="#8A8A8A", linewidth=0.8)
        axis.set_xticks(range(len(shown)), [titles[experiment] for experiment in shown])
        axis.set_ylabel(f"gain over none in {unit}")
        axis.grid(False, axis="x")
    plot.legend(figure, grid)
    figure.tight_layout()
    return figure


def draw_costs(parts: Sequence[Results]) -> Figure:
    """Return the figure of what a boundary costs, one panel per setting of COSTS."""
    figure, grid = plt.subplots(1, len(parts), figsize=(2.3 * len(parts), 2.5), squeeze=False)
    for axis, part in zip(grid[0], map(plain, parts)):
        moments = measures.AT_BOUNDARY[part.first["figure"][:4]]
        found = [measures.values(part.metrics, each) for each in moments]
        for beside, label in enumerate(TREATED):
            look, points = names.look(label), []
            for place, moment in enumerate(found):
                if values := moment.get(label):
                    told, x = estimate(list(values.values())), place + 0.08 * (beside - 1.5)
                    axis.plot([x, x], [told.low, told.high], color=look.colour, linewidth=1.2)
                    points.append((x, told.mean))
            style = {"color": look.colour, "marker": look.marker, "markersize": 4, "linewidth": 0.8}
            axis.plot(*zip(*points), label=look.name, **style)
        axis.set_xticks(range(len(MOMENTS)), MOMENTS)
        axis.set_title(names.title(part).replace(" on ", "\non ", 1).rsplit("\n", 1)[0])
    plot.legend(figure, grid[0])
    figure.tight_layout()
    return figure
