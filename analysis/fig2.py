"""Figure 2: test accuracy of warm start (a), continual (b) and class-incremental (c) training, eight panels."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis import measures, plot
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
    "Figure 2. Test accuracy of (a) warm start, during stage 2, (b) continual and (c) class-incremental training. "
    f"{plot.BAND} In (a), dashed levels are accuracies at the end of training, and so are the marks to the right of the "
    "curves, with 95 % intervals. Thin vertical lines: boundaries between stages. The accuracy in (c) is over all classes. "
    f"Axes in (a) show the range of the last part of training; a curve that starts lower is cut. {plot.PREMISE}"
)


def draw(
    parts: Sequence[Results], paper_curves: bool = False, interest: Sequence[str] = plot.INTEREST
) -> Figure:
    """Return the figure with all eight panels; `paper_curves` draws the paper's panel under each."""
    height = 2 if paper_curves else 1
    figure, grid = plt.subplots(3 * height, 3, figsize=(9.3, 7.2 * height), squeeze=False)
    known = {(part.first["figure"], part.first["panel"]): part for part in parts}
    for row, under, (name, heading) in zip(grid[::height], grid[height - 1 :: height], ROWS.items()):
        for column, (panel, text) in enumerate(PAIRS.items()):
            axis = row[column]
            if (name, panel) == NOT_IN_PAPER:
                for unused in (axis, under[column]):
                    unused.axis("off")
                continue
            if (name, panel) in known:
                draw_panel(axis, known[name, panel], interest)
            else:
                plot.draw_empty(axis, text)
            if paper_curves:
                plot.draw_paper(under[column], name, panel, text)
        plot.row_heading(row[0] if name != "fig2c" else row[1], heading)
    plot.legend(figure, grid.ravel(), where=grid[2 * height, 0])
    figure.tight_layout(h_pad=1.6)
    return figure


def panel_data(part: Results) -> pd.DataFrame:
    """Return the rows of test accuracy with `x`: epochs of stage 2 for warm start, else epochs over all stages."""
    rows = measures.ordered_rows(part.metrics, "test_accuracy")
    if part.first["figure"] == "fig2a":
        rows = rows[rows["phase"] == rows["phase"].max()]
    return plot.with_progress(rows)[0]


def moved_by_fire(boundaries: pd.DataFrame) -> dict[str, list[float]]:
    """Return how far FIRE moves the queries and keys of ViT-Tiny: its squared distance divided by that of a reset of the
    same weights, means over the seeds, one number per boundary, as {"fig2b": [11.0, 0.09, ...], ...}."""
    fire = boundaries["experiment"].str.fullmatch(r"fig2[abc]_\w+_vit_tiny") & boundaries["label"].eq("fire")
    rows = boundaries[fire]
    shares = rows.groupby([rows["experiment"].str[:5], "phase"])["sfe_share"].mean()
    return {str(figure): each.tolist() for figure, each in shares.groupby(level=0)}


def draw_panel(axis: Axes, part: Results, interest: Sequence[str] = plot.INTEREST) -> pd.DataFrame:
    """Draw one panel and return its curves (see `plot.draw_curves`)."""
    part = plain(part)
    rows = panel_data(part)
    warm = part.first["figure"] == "fig2a"
    axis.set_title(plot.title(part))
    axis.set_ylabel("test accuracy")
    axis.set_xlabel("epoch of stage 2" if warm else "epoch over all stages")
    axis.xaxis.set_major_locator(plot.MaxNLocator(nbins=6, integer=True))
    if not warm:
        drawn = plot.draw_curves(axis, rows, interest)
    else:
        ends = measures.values(part.metrics, measures.TEST)
        curves = rows[rows["label"].isin(set(interest) - set(LEVELS))]
        drawn = plot.draw_curves(axis, curves if len(curves) else rows, interest)
        others = plot.ordered(set(ends) - set(drawn["label"]) - set(LEVELS))
        ended = plot.draw_ends(axis, {label: ends[label] for label in others}, drawn["x"].max())
        levels = {label: sum(ends[label].values()) / len(ends[label]) for label in LEVELS if label in ends}
        axis.set_xticks(sorted({int(x) for x in drawn["x"].unique()})[:: max(1, drawn["x"].nunique() // 5)])
        for label, value in levels.items():
            plot.draw_level(axis, value, label)
        plot.fit_limits(axis, drawn, 0.3 * drawn["x"].max(), [*levels.values(), *ended])
    plot.draw_boundaries(axis, plot.boundaries(rows))
    plot.draw_premise(axis, part)
    return drawn
