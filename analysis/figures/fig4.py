"""Figure 4: average return of DQN on Atari (a) and of SAC on a humanoid (b), with one reset at the midpoint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis import measures, names, plot
from analysis.plot import Axes, Figure, plt
from analysis.runs import Results, plain

ROWS = {
    "fig4a": ("a  DQN", {"asterix": "Asterix", "beam_rider": "BeamRider", "demon_attack": "DemonAttack"}),
    "fig4b": ("b  SAC", {"walk": "H1 walk", "balance_simple": "H1 balance", "run": "H1 run"}),
}
CAPTION = (
    "Figure 4. Average return of (a) DQN on three Atari games (training episodes) and (b) SAC on three tasks of the H1 "
    f"humanoid (evaluation). {plot.BAND} FIRE and none alone have bands. Thin vertical line: the reset, before which all "
    "methods share one run. Dashed: the "
    f"level of random actions. {plot.PREMISE} A panel that was not run at one size shows the smaller one."
)
PREFIXES = tuple(f"{name}_{panel}" for name, (_, row) in ROWS.items() for panel in row)
BANDS = ("fire", "none")  # of five methods that end close together, more bands cannot be told apart
BINS = 30  # of the returns of training episodes, over the whole run
METRICS = {"train_return": "training return", "eval_return": "evaluation return"}


def draw(
    parts: Sequence[Results], interest: Sequence[str] = plot.INTEREST, metric: str | None = None
) -> Figure:
    """Return the figure: DQN in row a, SAC in row b. Without `metric`, row a shows training returns and row b
    evaluation returns, as the paper most likely does."""
    figure, grid = plt.subplots(2, 3, figsize=(9.3, 5.0), squeeze=False)
    panels = {(name, panel) for name, (_, row) in ROWS.items() for panel in row}
    known = {(part.first["figure"], part.first["panel"]): part for part in parts}
    mixed = len({part.first["size"] for place, part in known.items() if place in panels}) > 1
    for row, (name, (heading, columns)) in zip(grid, ROWS.items()):
        for axis, (panel, text) in zip(row, columns.items()):
            if (name, panel) in known:
                draw_panel(axis, known[name, panel], interest, metric)
                if mixed:
                    axis.set_title(f"{axis.get_title(loc='left')}, {known[name, panel].first['size']}")
            else:
                plot.draw_empty(axis, text)
        plot.row_heading(row[0], heading)
    plot.legend(figure, grid.ravel())
    figure.tight_layout(h_pad=1.6)
    return figure


def panel_data(part: Results, metric: str) -> pd.DataFrame:
    """Return the rows of `metric` with a column `x` in thousands of environment steps. The part before the boundary,
    which all methods share, is kept for one label only; training returns are means over BINS equal parts of the run."""
    rows = measures.with_acts(part.metrics, metric)
    labels = set(rows["label"])
    shared = "none" if "none" in labels else min(labels)
    rows = rows[(rows["label"] == shared) | (rows["phase"] > 0)]
    if metric == "train_return":
        width = rows["step"].max() / BINS
        rows = rows.assign(step=(np.ceil(rows["step"] / width) - 0.5).clip(lower=0.5) * width)
        keys = ["label", "seed", "phase", "step"]
        rows = rows.groupby(keys, as_index=False)["value"].mean()
    return rows.assign(x=rows["step"] / 1000)


def random_level(part: Results, metric: str) -> float | None:
    """Return the mean return of random actions, or None if it was not measured or `metric` is no return."""
    random = part.metrics[part.metrics["metric"] == "random_return"].drop_duplicates("seed")["value"]
    return float(random.mean()) if len(random) and metric in METRICS else None


def draw_panel(
    axis: Axes, part: Results, interest: Sequence[str] = plot.INTEREST, metric: str | None = None
) -> pd.DataFrame:
    """Draw one panel and return its curves (see `plot.draw_curves`)."""
    part = plain(part)
    metric = metric or measures.of(part)[0].metric
    rows = panel_data(part, metric)
    axis.set_title(names.title(part))
    axis.set_xlabel("environment step (thousands)")
    axis.set_ylabel(METRICS.get(metric, metric.replace("_", " ")))
    drawn = plot.draw_curves(axis, rows, names.looks(part), interest, BANDS)
    level = random_level(part, metric)
    if level is not None:
        plot.draw_level(axis, level, "random_actions")
    plot.draw_boundaries(axis, plot.boundaries(rows))
    plot.draw_premise(axis, part)
    return drawn
