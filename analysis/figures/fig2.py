"""Figure 2: test accuracy of warm start (a), continual (b) and class-incremental (c) training, eight panels."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis import measures, names, plot
from analysis.plot import Axes, Figure, plt
from analysis.runs import Results, plain

PREFIXES = ("fig2",)
PAIRS = {
    "cifar10_resnet18": "ResNet-18 on CIFAR-10",
    "cifar100_vit_tiny": "ViT-Tiny on CIFAR-100",
    "tiny_imagenet_vgg16": "VGG-16 on Tiny ImageNet",
}
ROWS = {"fig2a": "a  Warm start", "fig2b": "b  Continual", "fig2c": "c  Class-incremental"}
NOT_IN_PAPER = ("fig2c", "cifar10_resnet18")  # too few classes; the legend is drawn here
LEVELS = ("none", "full_reset")  # methods that row a shows by their end value alone, as the paper does
CAPTION = (
    "Figure 2. Test accuracy of (a) warm start, during stage 2, (b) continual and (c) class-incremental training, at the "
    f"end of each stage. {plot.BAND} Marks to the right: other methods at the end of training. Dashed levels in (a): the "
    f"end of training. (c) is over all classes. {plot.PREMISE}"
)


def draw(parts: Sequence[Results], interest: Sequence[str] = plot.INTEREST) -> Figure:
    """Return the figure with all eight panels."""
    figure, grid = plt.subplots(3, 3, figsize=(9.3, 7.2), squeeze=False)
    known = {(part.first["figure"], part.first["panel"]): part for part in parts}
    for row, (name, heading) in zip(grid, ROWS.items()):
        for axis, (panel, text) in zip(row, PAIRS.items()):
            if (name, panel) in known:
                draw_panel(axis, known[name, panel], interest)
            elif (name, panel) != NOT_IN_PAPER:
                plot.draw_empty(axis, text)
        plot.row_heading(row[0] if name != "fig2c" else row[1], heading)
    plot.legend(figure, grid.ravel(), where=grid[2, 0])
    figure.tight_layout(h_pad=1.6)
    return figure


def panel_data(part: Results) -> pd.DataFrame:
    """Return the rows of test accuracy with `x`: epochs of stage 2 for warm start, else the number of each stage, with its
    last value."""
    if part.first["figure"] != "fig2a":
        rows = measures.phase_ends(part.metrics, "test_accuracy")
        return rows.assign(x=rows["phase"] + 1.0)
    rows = measures.ordered_rows(part.metrics, "test_accuracy")
    return plot.with_progress(rows[rows["phase"] == rows["phase"].max()])[0]


def draw_panel(axis: Axes, part: Results, interest: Sequence[str] = plot.INTEREST) -> pd.DataFrame:
    """Draw one panel and return its curves (see `plot.draw_curves`)."""
    part = plain(part)
    rows, looks, warm = panel_data(part), names.looks(part), part.first["figure"] == "fig2a"
    ends = measures.values(part.metrics, measures.TEST)
    thick = rows[rows["label"].isin(set(interest) - set(LEVELS if warm else ()))]
    drawn = plot.draw_curves(axis, thick if len(thick) else rows, looks, interest)
    levels = {
        label: sum(ends[label].values()) / len(ends[label]) for label in LEVELS if warm and label in ends
    }
    others = {label: ends[label] for label in ends if label not in {*drawn["label"], *levels}}
    ended = plot.draw_ends(axis, others, looks, drawn["x"].max())
    for label, value in levels.items():
        plot.draw_level(axis, value, label)
    if warm:
        plot.fit_limits(axis, drawn, 0.3 * drawn["x"].max(), [*levels.values(), *ended])
    axis.set_xticks(sorted({int(x) for x in drawn["x"].unique()})[:: max(1, drawn["x"].nunique() // 5)])
    axis.set_title(names.title(part))
    axis.set(ylabel="test accuracy", xlabel="epoch of stage 2" if warm else "stage")
    plot.draw_premise(axis, part)
    return drawn
