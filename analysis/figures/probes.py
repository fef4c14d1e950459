"""Figures of the experiments beside the paper: probes on images, agents on other games and tasks, and the picture of
README.md."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.ticker import MaxNLocator

from analysis import measures, names, plot
from analysis.figures import fig2, fig4
from analysis.plot import Axes, Figure, plt
from analysis.runs import Results, plain

PREFIXES = ("random_label", "label_noise", "permuted", "pictures")
AGENTS = ("fig4a_asterix_early", "fig4a_breakout", "fig4a_catch")
AGENTS += ("fig4b_hopper", "fig4b_balance_simple_long", "sac_plain_hopper")
CAPTION = (
    "Experiments beside the paper's panels: what each shows over its training, or at the end of each task. "
    f"{plot.BAND} Thin vertical lines: boundaries. A long first phase is cut off on the left. Dashed: the level of random "
    f"actions. {plot.PREMISE}"
)
README = (
    "none",
    "shrink_perturb",
    "full_reset",
    "fire",
    "muon",
    "redo",
    "snr",
)  # the last three end above FIRE
README_CAPTION = (
    "A network memorises 20 sets of images with random labels, one after the other; each point is the training accuracy "
    f"at the end of a task. {plot.BAND} Thin lines: the methods that end highest, at least three seeds each."
)


def draw(parts: Sequence[Results]) -> Figure:
    """Return the figure, one panel per setting."""
    columns = min(3, len(parts))
    rows = -(-len(parts) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(3.1 * columns + 0.3, 2.6 * rows), squeeze=False)
    for axis in grid.ravel()[len(parts) :]:
        axis.axis("off")
    mixed = len({part.first["size"] for part in parts}) > 1
    for axis, part in zip(grid.ravel(), parts):
        draw_panel(axis, part)
        axis.set_title(axis.get_title(loc="left") + (f", {part.first['size']}" if mixed else ""))
    plot.legend(figure, grid.ravel())
    figure.tight_layout(h_pad=1.4)
    return figure


def draw_readme(parts: Sequence[Results]) -> Figure:
    """Return the picture of README.md: one probe, four methods and the three best ones, readable at 700 pixels."""
    figure, axis = plt.subplots(figsize=(5.2, 2.9))
    draw_panel(axis, parts[0].select(label=README))
    axis.set_title(names.one_line(parts[0].select(label=README[:4])))
    plot.legend(figure, [axis])
    figure.tight_layout()
    return figure


def draw_panel(axis: Axes, part: Results) -> pd.DataFrame:
    """Draw the headline metric of any setting and return its curves (see `plot.draw_curves`)."""
    if part.first["domain"] in ("dqn", "sac"):
        return fig4.draw_panel(axis, part)
    if part.first["figure"].startswith("fig2"):
        return fig2.draw_panel(axis, part)
    part = plain(part)
    headline = measures.of(part)[0]
    axis.set_title(names.title(part))
    axis.set_ylabel(headline.title.split(",")[0].split(" at the")[0])
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if headline.reduce == "late_phases":
        axis.set_xlabel("task")
        rows = measures.phase_ends(part.metrics, headline.metric)
        return draw_lines(axis, rows.assign(x=rows["phase"] + 1.0), part)
    rows, unit = plot.with_progress(measures.ordered_rows(part.metrics, headline.metric))
    axis.set_xlabel(unit)
    marks, end = plot.boundaries(rows), float(rows["x"].max())
    long_first = len(marks) == 1 and marks[0] > 1.5 * (end - marks[0])  # a long phase, shared by all methods
    if long_first:
        rows = rows[rows["x"] >= marks[0] - 0.2 * (end - marks[0])]
    drawn = draw_lines(axis, rows, part)
    if long_first:
        plot.fit_limits(axis, drawn, marks[0] + 0.3 * (end - marks[0]))
    plot.draw_boundaries(axis, marks)
    return drawn


def draw_lines(axis: Axes, rows: pd.DataFrame, part: Results) -> pd.DataFrame:
    """Draw the methods of interest as curves, and the others, where they are many, as marks at the end."""
    looks, ends = names.looks(part), measures.values(part.metrics, measures.of(part)[0])
    others = {label: ends[label] for label in ends if label not in plot.INTEREST}
    if len(others) <= len(README) or len(others) == len(ends):
        return plot.draw_curves(axis, rows, looks)
    drawn = plot.draw_curves(axis, rows[~rows["label"].isin(others)], looks)
    plot.draw_ends(axis, others, looks, drawn["x"].max())
    return drawn
