"""Figure 3: validation loss of the second pretraining phase, one panel per point of the first phase it
starts from.

    python -m analysis.fig3 --root runs [--size small] [--paper-curves]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pandas as pd

from analysis import curves, measures, paper, style
from analysis.figure import experiment_of, figure_command, finish, names_of, plain, that_logged
from analysis.load import Results

METRIC = "val_loss_mix"
NOTE = "Band: range over seeds. The axis is cut above; the loss right after the boundary is in the table."


def panel_data(part: Results) -> pd.DataFrame:
    """Rows of the mixture's validation loss in phase 2; `x` is the iteration of that phase."""
    rows = measures.curve(part.metrics, METRIC)
    rows = rows[rows["phase"] == rows["phase"].max()]
    starts = rows.groupby(["label", "seed"], observed=True)["step"].transform("min")
    return rows.assign(x=rows["step"] - starts)


def draw_panel(axis: style.Axes, part: Results, paper_curves: bool) -> pd.DataFrame:
    """One panel; returns the drawn numbers."""
    rows = panel_data(part)
    axis.set_title(curves.panel_title(part, experiment_of(part)))
    axis.set_xlabel("iteration of phase 2")
    axis.set_ylabel("validation loss (nats)")
    drawn = curves.draw_labels(axis, rows)
    if drawn["x"].nunique() > 3:
        late = drawn[drawn["x"] >= 0.25 * drawn["x"].max()]
        low, high = late["mean"].min(), late["mean"].max()
        axis.set_ylim(low - 0.06 * (high - low) - 1e-3, high + 0.06 * (high - low) + 1e-3)
    if paper_curves:
        theirs = paper.panel_of(*names_of(part))
        curves.draw_paper(axis, theirs, rows["x"].max() / theirs["x"].max() if len(theirs) else 1.0)
    return drawn


def draw(parts: list[Results], paper_curves: bool) -> style.Figure:
    """One panel per fork point."""
    parts = [plain(part) for part in that_logged(parts, METRIC)]
    figure, axes = style.grid(len(parts), width=4.2, height=3.2)
    for axis, part in zip(axes, parts):
        draw_panel(axis, part, paper_curves)
    return finish(figure, axes, parts, NOTE)


def main(given: Sequence[str] | None = None) -> int:
    return figure_command("fig3", __doc__, ("fig3",), draw, given)


if __name__ == "__main__":
    sys.exit(main())
