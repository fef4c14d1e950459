"""Forest plots of FIRE against rivals: one row per panel of the paper, one column per rival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import claims, names, paper
from analysis.figures import fig2, fig3, fig4
from analysis.plot import Axes, Figure, Line2D, plt
from analysis.runs import Results

PREFIXES = (*fig2.PREFIXES, *fig3.PREFIXES, *fig4.PREFIXES)
RIVALS = ("dash", "muon", "redo", "adamo", "spectral", "weight_clipping", "hare_tortoise", "upgd")
REACH, WITHIN = 9.0, 7.5  # of the axis and of the marks on it, in standard deviations
ABOUT = (
    "panel by panel, in the measure at the end of training. To the right of 0, FIRE ends ahead. Marks: mean difference "
    "with its 95 % interval, paired by seed, in standard deviations of the differences; arrows lie beyond "
    f"{WITHIN}."
)
CAPTION = (
    f"FIRE against four rivals, {ABOUT} Orange: confirmatory seeds, a dot for the first round and a square for the second. "
    "Pale: exploratory seeds, where the comparison is open. Hollow: the premise is not met. Small triangles at the edge: "
    "the side on which the paper's FIRE ends. Diamonds: random-effects mean over the panels that count and are complete, of "
    "which the three starts of Figure 3 are one, with the Hartung-Knapp interval; I² is the share of the variation that is "
    "not chance."
)
RIVALS_CAPTION = f"FIRE against the rivals with planned seeds, {ABOUT} Grey: not decided."
SHORT = {"none": "none", "shrink_perturb": "S&P", "hare_tortoise": "Hare & T.", "weight_clipping": "clipping"}
SHORT |= {"spectral": "spectral reg."}
COLOUR, PALE, GREY, THEIRS = "#D55E00", "#F0B48A", "#A8A8A8", "#222222"


def draw(parts: Sequence[Results]) -> Figure:
    """Return the figure of the four rivals of the pooled question."""
    table, first = claims.verdicts(parts), claims.verdicts(parts, rounds=1)
    panels = [cell for cell in paper.cells() if "_".join(cell) in set(table["experiment"])]
    size = {part.first["experiment"]: part.first["size"] for part in parts}
    sizes = ["" if size["_".join(cell)] == "medium" else f" ({size['_'.join(cell)]})" for cell in panels]
    titles = [names.panel(*cell) + size for cell, size in zip(panels, sizes)]
    figure, grid = _grid(claims.GROUPS, [*titles, "all panels that count"], 0.19)
    frames = table, claims.verdicts(parts, "exploring")
    confirmed, early = (claims.pooled(frame).set_index("rival") for frame in frames)
    for axis, rival in zip(grid, claims.GROUPS):
        for place, cell in enumerate(panels):
            now, before = (comparison(frame, "_".join(cell), rival) for frame in (table, first))
            rounds = [row for row in (before, now) if row]
            rounds = rounds[1:] if len(rounds) == 2 and now["seeds"] == before["seeds"] else rounds
            for number, row in enumerate(rounds):
                shift = 0.0 if len(rounds) == 1 else (0.17, -0.17)[number]
                draw_row(axis, -place + shift, row, "s" if number else "o")
            theirs = paper.gain(*cell, "fire", rival)
            if theirs == theirs:
                edge = 0.96 * (REACH if theirs > 0 else -REACH)
                style = {"color": THEIRS, "markersize": 2.5, "clip_on": False, "zorder": 6}
                axis.plot(edge, -place, ">" if theirs > 0 else "<", **style)
        pooled = confirmed.loc[rival], COLOUR
        draw_pooled(axis, -len(panels), *(pooled if pooled[0]["panels"] > 1 else (early.loc[rival], PALE)))
        axis.axhline(-len(panels) + 0.5, color="#DDDDDD", linewidth=0.6)
    grid[0].set_ylim(-len(panels) - 0.9, 0.6)
    dots = {"marker": "o", "markersize": 4}
    handles = [
        Line2D([], [], color=COLOUR, **dots, label="confirmatory seeds"),
        Line2D([], [], color=COLOUR, marker="s", markersize=4, label="second round"),
        Line2D([], [], color=PALE, **dots, label="open: exploratory seeds"),
        Line2D([], [], color=GREY, **dots, markerfacecolor="white", label="premise not met"),
    ]
    theirs = {"marker": ">", "markersize": 3, "linestyle": "", "label": "side of the paper's FIRE"}
    handles.append(Line2D([], [], color=THEIRS, **theirs))
    below = {"loc": "lower center", "ncols": 5, "frameon": False, "bbox_to_anchor": (0.5, -0.04)}
    figure.legend(handles=handles, fontsize=7, **below)
    return figure


def draw_rivals(parts: Sequence[Results]) -> Figure:
    """Return the figure of the rivals that were planned."""
    table = claims.verdicts(parts)
    table = table[table["planned"] > 0]
    known = set(table["experiment"][table["worse"].isin(RIVALS)])
    panels = [cell for cell in paper.cells() if "_".join(cell) in known]
    figure, grid = _grid(RIVALS, [names.panel(*cell) for cell in panels], 0.3)
    for axis, rival in zip(grid, RIVALS):
        for place, cell in enumerate(panels):
            row = comparison(table, "_".join(cell), rival)
            if row:
                draw_row(axis, -place, row | {"colour": COLOUR if row["decided"] else GREY}, "o")
    grid[0].set_ylim(-len(panels) + 0.5, 0.5)
    return figure


def _grid(rivals: Sequence[str], titles: Sequence[str], step: float) -> tuple[Figure, Sequence[Axes]]:
    figure, grid = plt.subplots(
        1, len(rivals), figsize=(8.0, step * len(titles) + 1.0), sharey=True, squeeze=False
    )
    for axis, rival in zip(grid[0], rivals):
        axis.axvline(0, color="#8A8A8A", linewidth=0.8, zorder=1)
        axis.set_title(f"{'against ' if len(rivals) < 5 else ''}{SHORT.get(rival, names.look(rival).name)}")
        axis.set_xlim(-REACH, REACH)
        axis.grid(False, axis="y")
        axis.tick_params(axis="y", length=0)
    grid[0, 0].set_yticks([-place for place in range(len(titles))], titles)
    figure.supxlabel("gain of FIRE, in standard deviations of the paired differences", fontsize=8, y=0.06)
    figure.tight_layout(w_pad=0.6, rect=(0, 0.03, 1, 1))
    return figure, grid[0]


def comparison(table: pd.DataFrame, experiment: str, rival: str) -> dict[str, Any]:
    """Return what is drawn of FIRE against one rival: mean, low and high of the gain in standard deviations, the seeds,
    and the colour; {} if fewer than two seeds ran. A positive gain favours FIRE."""
    rows = table[table["experiment"] == experiment]
    for row in rows.to_dict("records"):
        if {row["better"], row["worse"]} == {"fire", rival}:
            confirmed, not_met = not pd.isna(row["gain"]), row["verdict"] == "premise not met"
            prefix = "" if confirmed else "exploring_"
            gains = row[f"{prefix}gains"]
            values = np.array(list(gains.values()))
            if len(values) < 2 or values.std(ddof=1) == 0:
                return {}
            sign, deviation = 1 if row["better"] == "fire" else -1, values.std(ddof=1)
            ends = sorted(sign * row[f"{prefix}{end}"] / deviation for end in ("low", "high"))
            colour = GREY if not_met else COLOUR if confirmed else PALE
            mean = sign * values.mean() / deviation
            return {"mean": mean, "low": ends[0], "high": ends[1], "seeds": sorted(gains), "colour": colour,
                    "hollow": not_met, "decided": row["verdict"] in claims.DECIDED}  # fmt: skip
    return {}


def draw_row(axis: Axes, y: float, row: dict[str, Any], marker: str) -> None:
    """Draw one comparison."""
    inside = abs(row["mean"]) < WITHIN
    low, high = np.clip([row["low"], row["high"]], -REACH, REACH)
    if inside:
        axis.plot([low, high], [y, y], color=row["colour"], linewidth=1.4, solid_capstyle="butt", zorder=3)
    marker = marker if inside else ">" if row["mean"] > 0 else "<"
    filled = "white" if row["hollow"] else row["colour"]
    place = row["mean"] if inside else np.sign(row["mean"]) * WITHIN
    axis.plot(place, y, marker, color=row["colour"], markerfacecolor=filled, markersize=4, zorder=4)


def draw_pooled(axis: Axes, y: float, row: pd.Series, colour: str) -> None:
    """Draw a pooled estimate as a diamond whose width is its interval, with an arrow where the axis cuts it."""
    if pd.isna(row["mean"]):
        return
    low, high = np.clip([row["low"], row["high"]], -REACH + 0.5, REACH - 0.5)
    axis.fill([low, row["mean"], high, row["mean"]], [y, y + 0.33, y, y - 0.33], color=colour, zorder=3)
    for end, cut, marker in ((row["low"], -REACH, "<"), (row["high"], REACH, ">")):
        if abs(end) > REACH:
            axis.plot(0.93 * cut, y, marker, color=colour, markersize=4.5, zorder=4)
    text = f"{row['panels']:.0f} panels, I² {row['i2']:.0%}"
    axis.text(0, y - 0.42, text, ha="center", va="top", fontsize=5.5, color="#555555")
