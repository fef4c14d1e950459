"""Figure of the experiments beside the paper: probes that lose plasticity quickly, games and tasks for a laptop."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis import fig2, fig4, measures, plot
from analysis.plot import Axes, Figure, plt
from analysis.runs import Results, plain

PREFIXES = ("random_label", "label_noise", "permuted", "pictures")
PREFIXES += ("fig4a_asterix_early", "fig4a_breakout", "fig4a_catch")
PREFIXES += ("fig4b_hopper", "fig4b_balance_simple_long", "sac_plain_hopper")
CAPTION = (
    "Experiments beside the paper's panels: what each shows over its training, or at the end of each task. "
    f"{plot.BAND} Thin vertical lines: boundaries. A long first phase is cut off on the left. Dashed: the level of random "
    f"actions. {plot.PREMISE}"
)


def draw(parts: Sequence[Results]) -> Figure:
    """Return the figure, one panel per setting."""
    columns = min(3, len(parts))
    rows = -(-len(parts) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(3.1 * columns + 0.3, 2.6 * rows), squeeze=False)
    for axis in grid.ravel()[len(parts) :]:
        axis.axis("off")
    mixed = len({part.first["size"] for part in parts}) > 1
    for number, (axis, part) in enumerate(zip(grid.ravel(), parts)):
        draw_panel(axis, part)
        size = f", {part.first['size']}" if mixed else ""
        if len(parts) > 1:
            axis.set_title(f"{chr(ord('a') + number)}  {axis.get_title(loc='left')}{size}")
    plot.legend(figure, grid.ravel())
    figure.tight_layout(h_pad=1.4)
    return figure


def draw_panel(axis: Axes, part: Results) -> pd.DataFrame:
    """Draw the headline metric of any setting and return its curves (see `plot.draw_curves`)."""
    if part.first["domain"] in ("dqn", "sac"):
        return fig4.draw_panel(axis, part)
    if part.first["figure"].startswith("fig2"):
        return fig2.draw_panel(axis, part)
    part = plain(part)
    headline = measures.of(part)[0]
    axis.set_title(plot.title(part))
    axis.set_ylabel(headline.title.split(",")[0].split(" at the")[0])
    axis.xaxis.set_major_locator(plot.MaxNLocator(nbins=6, integer=True))
    if headline.reduce == "late_phases":
        axis.set_xlabel("task (value at its end)")
        rows = measures.phase_ends(part.metrics, headline.metric)
        return plot.draw_curves(axis, rows.assign(x=rows["phase"] + 1.0))
    rows, unit = plot.with_progress(measures.ordered_rows(part.metrics, headline.metric))
    axis.set_xlabel(unit)
    marks, end = plot.boundaries(rows), float(rows["x"].max())
    long_first = len(marks) == 1 and marks[0] > 1.5 * (end - marks[0])  # a long phase, shared by all methods
    if long_first:
        rows = rows[rows["x"] >= marks[0] - 0.2 * (end - marks[0])]
    drawn = plot.draw_curves(axis, rows)
    if long_first:
        plot.fit_limits(axis, drawn, marks[0] + 0.3 * (end - marks[0]))
    plot.draw_boundaries(axis, marks)
    return drawn
