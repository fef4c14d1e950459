"""Figure 2: test accuracy of warm start (a), continual (b) and class-incremental (c) training.

python -m analysis.fig2 --root runs [--size small] [--paper-curves]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pandas as pd

from analysis import curves, measures, paper, style
from analysis.figure import experiment_of, figure_command, finish, names_of, plain
from analysis.load import Results

FIGURES = ("fig2a", "fig2b", "fig2c", "pictures")  # the last: the cell of panel a on a folder of pictures
LEVELS = ("none", "full_reset")
INSET_PHASES = 5  # long sequences get a magnified end, as the paper's panel b
NOTE = "Band: range over seeds. Dashed levels in (a): end of training. Dotted vertical lines: boundaries."


def is_warm_start(part: Results) -> bool:
    return experiment_of(part).startswith(("fig2a", "pictures"))


def panel_data(part: Results) -> pd.DataFrame:
    """Rows of test accuracy with `x`: epochs of the last phase for warm start, epochs over all phases
    otherwise."""
    rows = measures.curve(part.metrics, "test_accuracy")
    if is_warm_start(part):
        rows = rows[rows["phase"] == rows["phase"].max()]
    return curves.with_progress(rows)[0]


def draw_panel(axis: style.Axes, part: Results, paper_curves: bool) -> pd.DataFrame:
    """One panel; returns the drawn numbers."""
    figure, panel = names_of(part)
    rows = panel_data(part)
    axis.set_title(curves.panel_title(part, experiment_of(part)))
    axis.set_xlabel("epoch of stage 2" if is_warm_start(part) else "epoch over all stages")
    axis.set_ylabel("test accuracy")
    levels = LEVELS if is_warm_start(part) else ()
    drawn = curves.draw_labels(axis, rows, [x for x in rows["label"].unique() if x not in levels])
    ends = measures.end_values(part.metrics, measures.TEST)
    for label in levels:
        values = measures.by_seed(ends, label)
        if values:
            curves.draw_level(axis, sum(values.values()) / len(values), label)
    marks = curves.boundaries(rows)
    curves.mark_boundaries(axis, marks)
    if paper_curves:
        theirs = paper.panel_of(figure, panel)
        scale = rows["x"].max() / theirs["x"].max() if len(theirs) else 1.0
        curves.draw_paper(axis, theirs, scale)
    if len(marks) >= INSET_PHASES:
        draw_inset(axis, rows, marks[-2])
    return drawn


def draw_inset(axis: style.Axes, rows: pd.DataFrame, start: float) -> None:
    """The last two stages again, magnified."""
    inset = axis.inset_axes((0.45, 0.1, 0.5, 0.42))
    late = rows[rows["x"] > start]
    drawn = curves.draw_labels(inset, late)
    middle = drawn["mean"].quantile([0.25, 1.0])
    inset.set_ylim(middle.iloc[0] - 0.005, middle.iloc[1] + 0.005)
    inset.tick_params(labelsize=6)
    inset.grid(False)


def draw(parts: list[Results], paper_curves: bool) -> style.Figure:
    """Panels in the order a, b, c."""
    parts = [plain(part) for part in parts if experiment_of(part).startswith(FIGURES)]
    figure, axes = style.grid(len(parts), width=4.2, height=3.2)
    for axis, part in zip(axes, parts):
        draw_panel(axis, part, paper_curves)
    note = NOTE + (" Thin dotted curves: the paper's (its own data and size, x stretched)." * paper_curves)
    return finish(figure, axes, parts, note)


def main(given: Sequence[str] | None = None) -> int:
    return figure_command("fig2", __doc__, FIGURES, draw, given)


if __name__ == "__main__":
    sys.exit(main())
