"""Forest plots of FIRE against rivals in the panels of the paper."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import claims, names, paper
from analysis.plot import Axes, Figure, Line2D, plt
from analysis.runs import Results

LATER = ("adamo", "spectral", "weight_clipping", "hare_tortoise", "upgd")
LATER += ("cpr", "l2_er", "swr", "nap", "regrama", "singular_clip")
RIVALS = ("dash", "muon", "redo", *LATER)
REACH, WITHIN = 9.0, 7.5  # of the axis and of the marks on it, in standard deviations
COLOUR, PALE, GREY, THEIRS = "#D55E00", "#F0B48A", "#A8A8A8", "#222222"


def draw(parts: Sequence[Results]) -> Figure:
    """Return the figure of the four rivals of the pooled question."""
    table, first = claims.verdicts(parts), claims.verdicts(parts, rounds=1)
    panels = [panel for panel in paper.panels() if panel in set(table["experiment"])]
    size = {part.first["experiment"]: part.first["size"] for part in parts}
    titles = [names.panel(each) + ("" if size[each] == "medium" else f" ({size[each]})") for each in panels]
    heads = [f"against {names.look(rival).name}" for rival in claims.GROUPS]
    figure, grid = _grid(heads, [*titles, "all panels that count"])
    frames, rounds = (table, claims.verdicts(parts, "exploring")), (comparisons(first), comparisons(table))
    confirmed, early = (claims.pooled(frame).set_index("rival") for frame in frames)
    for axis, rival in zip(grid, claims.GROUPS):
        for place, panel in enumerate(panels):
            shown = [found[panel, rival] for found in rounds if (panel, rival) in found]
            shown = shown[1:] if len(shown) == 2 and shown[0]["seeds"] == shown[1]["seeds"] else shown
            for number, row in enumerate(shown):
                shift = 0.0 if len(shown) == 1 else (0.17, -0.17)[number]
                draw_row(axis, -place + shift, row, "s" if number else "o")
            theirs = paper.gain(panel, "fire", rival)
            if theirs == theirs:
                edge, marker = (0.96 * REACH, ">") if theirs > 0 else (-0.96 * REACH, "<")
                axis.plot(edge, -place, marker, color=THEIRS, markersize=2.5, clip_on=False, zorder=6)
        row, colour = (confirmed, COLOUR) if confirmed.loc[rival, "panels"] > 1 else (early, PALE)
        draw_pooled(axis, -len(panels), row.loc[rival], colour)
        axis.axhline(-len(panels) + 0.5, color="#DDDDDD", linewidth=0.6)
    grid[0].set_ylim(-len(panels) - 0.9, 0.6)
    marks = {
        "confirmatory seeds": {"color": COLOUR, "marker": "o"},
        "second round": {"color": COLOUR, "marker": "s"},
        "open: exploratory seeds": {"color": PALE, "marker": "o"},
        "premise not met": {"color": GREY, "marker": "o", "markerfacecolor": "white"},
        "side of the paper's FIRE": {"color": THEIRS, "marker": ">", "markersize": 3, "linestyle": ""},
    }
    handles = [Line2D([], [], **{"markersize": 4} | style, label=text) for text, style in marks.items()]
    below = {"loc": "lower center", "ncols": 5, "frameon": False, "bbox_to_anchor": (0.5, -0.04)}
    figure.legend(handles=handles, fontsize=7, **below)
    return figure


def draw_rivals(parts: Sequence[Results]) -> Figure | None:
    """Return the figure of the rivals that were planned, or None if none of them ran."""
    found = comparisons(claims.verdicts(parts).query("planned > 0 and seeds == planned"))
    panels = [panel for panel in paper.panels() if any((panel, rival) in found for rival in RIVALS)]
    if not (rivals := [rival for rival in RIVALS if any((panel, rival) in found for panel in panels)]):
        return None
    figure, grid = _grid([*map(names.panel, panels)], [names.look(rival).name for rival in rivals])
    for axis, panel in zip(grid, panels):
        for place, rival in enumerate(rivals):
            if row := found.get((panel, rival)):
                undecided = {} if row["verdict"] in claims.DECIDED else {"colour": GREY}
                draw_row(axis, -place, row | undecided, "o")
    grid[0].set_ylim(-len(rivals) + 0.5, 0.5)
    return figure


def _grid(heads: Sequence[str], titles: Sequence[str]) -> tuple[Figure, Sequence[Axes]]:
    figure, grid = plt.subplots(1, len(heads), figsize=(8.0, 0.19 * len(titles) + 1.0), sharey=True)
    for axis, head in zip(grid, heads):
        axis.axvline(0, color="#8A8A8A", linewidth=0.8, zorder=1)
        axis.set_title(head)
        axis.set_xlim(-REACH, REACH)
        axis.grid(False, axis="y")
        axis.tick_params(axis="y", length=0)
    grid[0].set_yticks([-place for place in range(len(titles))], titles)
    figure.supxlabel("gain of FIRE, in standard deviations of the paired differences", fontsize=8, y=0.06)
    figure.tight_layout(w_pad=0.6, rect=(0, 0.03, 1, 1))
    return figure, grid


def comparisons(table: pd.DataFrame) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what is drawn of FIRE against each (experiment, rival) of which two seeds ran, in standard deviations."""
    found = {}
    for row in claims.of_fire(table).to_dict("records"):
        confirmed, not_met = not pd.isna(row["gain"]), row["verdict"] == "premise not met"
        prefix = "" if confirmed else "exploring_"
        deviation = pd.Series(row[f"{prefix}gains"]).std()
        if deviation > 0:
            ends = {name: row[f"{prefix}{name}"] / deviation for name in ("gain", "low", "high")}
            colour = GREY if not_met else COLOUR if confirmed else PALE
            about = {"seeds": sorted(row[f"{prefix}gains"]), "colour": colour, "hollow": not_met}
            found[row["experiment"], row["worse"]] = ends | about | {"verdict": row["verdict"]}
    return found


def draw_row(axis: Axes, y: float, row: dict[str, Any], marker: str) -> None:
    inside = abs(row["gain"]) < WITHIN
    low, high = np.clip([row["low"], row["high"]], -REACH, REACH)
    if inside:
        axis.plot([low, high], [y, y], color=row["colour"], linewidth=1.4, solid_capstyle="butt", zorder=3)
    marker = marker if inside else ">" if row["gain"] > 0 else "<"
    filled, place = "white" if row["hollow"] else row["colour"], np.clip(row["gain"], -WITHIN, WITHIN)
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
