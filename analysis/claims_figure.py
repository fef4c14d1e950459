"""Forest plot of FIRE against its four best-known rivals: one row per panel of the paper, one column per rival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import claims, fig2, fig3, fig4, paper, plot
from analysis.plot import Axes, Figure, Line2D, plt
from analysis.runs import Results

PREFIXES = (*fig2.PREFIXES, *fig3.PREFIXES, *fig4.PREFIXES)
CAPTION = (
    "FIRE against four rivals, panel by panel, in the measure at the end of training. To the right of 0, FIRE ends ahead. "
    "Dots: our mean difference with its 95 % interval, paired by seed; orange from the confirming seeds, pale from the "
    "exploring seeds where the comparison is open, hollow where the premise is not met (from the confirming seeds if they "
    "ran, else from the exploring ones). Ticks: the difference in the paper. "
    "Both in units of the standard deviation of our paired differences, so that accuracies, losses and returns share an "
    "axis; arrows lie beyond it. Diamonds: random-effects mean over the panels that count and are complete, of which the "
    "three starts of Figure 3 are one, with the Hartung-Knapp interval; I² is the share of the variation that is not chance."
)
SHORT = {"none": "none", "shrink_perturb": "S&P"}
REACH = 8.0  # of the axis, in standard deviations
COLOUR, PALE, GREY, THEIRS = "#D55E00", "#F0B48A", "#B5B5B5", "#222222"


def draw(parts: Sequence[Results]) -> Figure:
    """Return the figure."""
    table, explored = claims.verdicts(parts), claims.verdicts(parts, "exploring")
    panels = [cell for cell in paper.cells() if "_".join(cell) in set(table["experiment"])]
    known = {part.first["experiment"]: part for part in parts}
    height = 0.17 * (len(panels) + 2) + 0.9
    figure, grid = plt.subplots(1, len(claims.GROUPS), figsize=(7.0, height), sharey=True, squeeze=False)
    estimates = [claims.pooled(frame).set_index("rival") for frame in (table, explored)]
    for axis, rival in zip(grid[0], claims.GROUPS):
        axis.axvline(0, color="#8A8A8A", linewidth=0.8, zorder=1)
        for place, cell in enumerate(panels):
            row = comparison(table, "_".join(cell), rival)
            if row:
                draw_row(axis, -place, row, paper.gain(*cell, "fire", rival))
        confirmed, early = (frame.loc[rival] for frame in estimates)
        pooled = (confirmed, COLOUR) if confirmed["panels"] > 1 else (early, PALE)
        draw_pooled(axis, -len(panels) - 0.4, *pooled)
        axis.axhline(-len(panels) + 0.3, color="#DDDDDD", linewidth=0.6)
        axis.set_title(f"against {SHORT.get(rival, plot.look(rival).name)}")
        axis.set_xlim(-REACH, REACH)
        axis.grid(False, axis="y")
        axis.tick_params(axis="y", length=0)
    grid[0, 0].set_yticks([-place for place in range(len(panels))] + [-len(panels) - 0.4],
                          [name(cell, known["_".join(cell)]) for cell in panels] + ["all panels that count"])  # fmt: skip
    grid[0, 0].set_ylim(-len(panels) - 1.8, 0.7)
    figure.supxlabel("gain of FIRE, in standard deviations of the paired differences", fontsize=8, y=0.06)
    handles = [
        Line2D([], [], color=COLOUR, marker="o", label="confirming seeds"),
        Line2D([], [], color=PALE, marker="o", label="open: exploring seeds"),
        Line2D([], [], color=GREY, marker="o", markerfacecolor="white", label="premise not met"),
        Line2D([], [], color=THEIRS, marker="|", linestyle="", markeredgewidth=1.3, label="the paper"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False, bbox_to_anchor=(0.5, -0.03))
    figure.tight_layout(w_pad=0.6, rect=(0, 0.03, 1, 1))
    return figure


def name(cell: tuple[str, str], part: Results) -> str:
    """Return for example `2a ResNet-18`, with the size if it is not medium."""
    size = part.first["size"]
    return plot.panel_name(*cell) + ("" if size == "medium" else f" ({size})")


def comparison(table: pd.DataFrame, experiment: str, rival: str) -> dict[str, Any]:
    """Return what is drawn of FIRE against one rival: mean, low and high of the gain in standard deviations, the standard
    deviation, and the colour; {} if fewer than two seeds ran. A positive gain favours FIRE."""
    rows = table[table["experiment"] == experiment]
    for row in rows.to_dict("records"):
        if {row["better"], row["worse"]} == {"fire", rival}:
            confirmed, not_met = not pd.isna(row["gain"]), row["verdict"] == "premise not met"
            prefix = "" if confirmed else "exploring_"
            gains = np.array(list(row[f"{prefix}gains"].values()))
            if len(gains) < 2 or gains.std(ddof=1) == 0:
                return {}
            sign, deviation = 1 if row["better"] == "fire" else -1, gains.std(ddof=1)
            ends = sorted(sign * row[f"{prefix}{end}"] / deviation for end in ("low", "high"))
            colour = GREY if not_met else COLOUR if confirmed else PALE
            mean = sign * gains.mean() / deviation
            return {"mean": mean, "low": ends[0], "high": ends[1], "deviation": deviation, "colour": colour}
    return {}


def draw_row(axis: Axes, y: float, row: dict[str, Any], theirs: float) -> None:
    """Draw one comparison, and the paper's difference as a tick."""
    low, high = np.clip([row["low"], row["high"]], -REACH, REACH)
    axis.plot([low, high], [y, y], color=row["colour"], linewidth=1.4, solid_capstyle="butt", zorder=3)
    inside = abs(row["mean"]) < REACH
    marker = "o" if inside else ">" if row["mean"] > 0 else "<"
    filled = "white" if row["colour"] == GREY else row["colour"]
    place = float(np.clip(row["mean"], -REACH + 0.3, REACH - 0.3))
    axis.plot(place, y, marker, color=row["colour"], markerfacecolor=filled, markersize=4, zorder=4)
    if theirs == theirs:
        gain = theirs / row["deviation"]
        shown = {"markersize": 6, "markeredgewidth": 1.3} if abs(gain) < REACH else {"markersize": 3.5}
        tick = "|" if abs(gain) < REACH else ">" if gain > 0 else "<"
        place = float(np.clip(gain, -REACH + 0.3, REACH - 0.3))
        axis.plot(place, y, tick, color=THEIRS, zorder=5, **shown)


def draw_pooled(axis: Axes, y: float, row: pd.Series, colour: str) -> None:
    """Draw a pooled estimate as a diamond whose width is its interval."""
    if pd.isna(row["mean"]):
        return
    low, high = np.clip([row["low"], row["high"]], -REACH, REACH)
    axis.fill([low, row["mean"], high, row["mean"]], [y, y + 0.33, y, y - 0.33], color=colour, zorder=3)
    text = f"{row['panels']:.0f} panels, I² {row['i2']:.0%}"
    axis.text(0, y - 0.55, text, ha="center", va="top", fontsize=5.5, color="#555555")
