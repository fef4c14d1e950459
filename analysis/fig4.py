"""Figure 4: average return of DQN on Atari (a) and SAC on continuous control (b), with one reset at the
midpoint.

    python -m analysis.fig4 --root runs [--size small] [--paper-curves] [--metric eval_return]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pandas as pd

from analysis import curves, measures, paper, style
from analysis.figure import experiment_of, figure_command, finish, names_of, plain, that_logged
from analysis.load import Results

FIGURES = ("fig4a", "fig4b")
NOTE = "Band: range over seeds. Dotted vertical line: the reset; methods share everything before it."


def panel_data(part: Results, metric: str) -> pd.DataFrame:
    """Rows of `metric`; `x` is the environment step. What a method shares with `none` before the reset is
    kept once."""
    rows = measures.curve(part.metrics, metric)
    labels = set(rows["label"].unique())
    shared = "none" if "none" in labels else style.ordered(labels)[0]
    rows = rows[(rows["label"] == shared) | (rows["phase"] > 0)]
    return rows.assign(x=rows["step"])


def draw_panel(axis: style.Axes, part: Results, metric: str, paper_curves: bool) -> pd.DataFrame:
    """One panel; returns the drawn numbers."""
    rows = panel_data(part, metric)
    axis.set_title(curves.panel_title(part, experiment_of(part)))
    axis.set_xlabel("environment step")
    axis.set_ylabel(metric.replace("_", " ").replace("eval", "evaluation").replace("train ", "training "))
    axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 4))
    drawn = curves.draw_labels(axis, rows)
    random = measures.curve(part.metrics, "random_return").drop_duplicates("seed")["value"]
    if len(random) and metric.endswith("return"):
        curves.draw_level(axis, float(random.mean()), "random_actions")
    curves.mark_boundaries(axis, curves.boundaries(rows))
    if paper_curves:
        theirs = paper.panel_of(*names_of(part))
        curves.draw_paper(axis, theirs, rows["x"].max() / theirs["x"].max() if len(theirs) else 1.0)
    return drawn


def draw(parts: list[Results], paper_curves: bool, metric: str | None = None) -> style.Figure:
    """Row a, then row b; `metric` None: training returns in a, evaluation returns in b, as the paper seems to."""
    parts = [plain(part) for part in (that_logged(parts, metric) if metric else parts)]
    figure, axes = style.grid(len(parts), width=4.2, height=3.2)
    for axis, part in zip(axes, parts):
        draw_panel(
            axis, part, metric or measures.measures_of(part, experiment_of(part))[0].metric, paper_curves
        )
    return finish(figure, axes, parts, NOTE)


def main(given: Sequence[str] | None = None) -> int:
    return figure_command("fig4", __doc__, FIGURES, draw, given, metric=True)


if __name__ == "__main__":
    sys.exit(main())
