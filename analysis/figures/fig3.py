"""Figure 3: validation loss in phase 2 of pretraining, from three checkpoints of phase 1, with a shared loss axis."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.ticker import MaxNLocator

from analysis import measures, names, plot
from analysis.plot import Axes, Figure, plt
from analysis.runs import Results, plain

PREFIXES = ("fig3",)
METRIC = "val_loss_mix"
FORKS = {"best": "From the best checkpoint", "30k": "From iteration 30,000", "60k": "From iteration 60,000"}
CAPTION = (
    "Figure 3. Validation loss on the mixture in phase 2, from the phase-1 checkpoint with the lowest validation loss "
    f"and from two later ones (30,000 and 60,000 iterations in the paper). {plot.BAND} The panels share one axis. "
    "The thick lines set its range after the first quarter."
)


def draw(parts: Sequence[Results], interest: Sequence[str] = plot.INTEREST) -> Figure:
    """Return the figure with three panels in the paper's order."""
    figure, grid = plt.subplots(1, 3, figsize=(9.3, 2.9), sharey="row", squeeze=False)
    known = {part.first["panel"]: part for part in parts if METRIC in set(part.metrics["metric"])}
    drawn = []
    for axis, (fork, text) in zip(grid[0], FORKS.items()):
        if fork in known:
            drawn.append(draw_panel(axis, known[fork], text, interest))
    for axis, (fork, text) in zip(grid[0], FORKS.items()):  # after the shared limits are known
        if fork not in known:
            plot.draw_empty(axis, text)
    if drawn:
        curves = pd.concat(drawn)
        bright = curves[curves["label"].isin(interest)]
        plot.fit_limits(grid[0, 0], bright if len(bright) else curves, 0.25 * curves["x"].max())
    grid[0, 0].set_ylabel("validation loss (nats)")
    plot.legend(figure, grid.ravel())
    figure.tight_layout()
    return figure


def heading(rows: pd.DataFrame, text: str) -> str:
    """Return `text`, or where phase 1 is shorter than in the paper, the iteration from which phase 2 starts in `rows`."""
    starts = rows.groupby(["label", "seed"])["step"].min().unique()
    ours = f"From iteration {starts[0]:,}"
    shorter = text.startswith("From iteration") and len(starts) == 1 and ours != text
    return f"{ours} (paper: {text.removeprefix('From iteration ')})" if shorter else text


def panel_data(part: Results) -> pd.DataFrame:
    """Return the rows of the loss in phase 2 with a column `x`: the iteration of that phase."""
    rows = measures.with_acts(part.metrics, METRIC)
    rows = rows[rows["phase"] == rows["phase"].max()]
    return rows.assign(x=rows["step"] - rows.groupby(["label", "seed"])["step"].transform("min"))


def draw_panel(axis: Axes, part: Results, text: str, interest: Sequence[str] = plot.INTEREST) -> pd.DataFrame:
    """Draw one panel under the heading `text` and return its curves (see `plot.draw_curves`)."""
    part = plain(part)
    detail = names.title(part).partition("\n")[2]
    rows = panel_data(part)
    axis.set_title(f"{heading(rows, text)}\nGPT, {detail}\n{names.data(part.first['data'])}")
    axis.set_xlabel("iteration of phase 2")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    return plot.draw_curves(axis, rows, names.looks(part), interest)
