"""Figure 5: accuracy against the number of Newton-Schulz iterations (a); curvature, DfI and SFE right after the reset (b).

Panel (a) needs runs of `fire` with `method.iterations=5,20,40` beside the others; panel (b) reads the boundary reports.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis import estimates, paper, plot
from analysis.fig2 import PAIRS
from analysis.plot import Axes, Figure, plt
from analysis.runs import Results

PREFIXES = ("fig2a", "fig5a", "ablation_iterations")
INSTEAD = {"cifar10_resnet18": "ablation_iterations"}  # drawn if the pair's own experiment has no scan
ITERATIONS = 10  # of `fire` without overrides in the vision experiments
BARS = {
    estimates.HESSIAN: ("Largest Hessian eigenvalue", "hessian_lambda_max"),
    "common_dfi_after": ("DfI of the stored weights", "dfi"),
    "common_sfe_share": ("SFE / SFE of a full reset", "normalized_sfe"),
}
SHOWN = ("fire", "fire_exact", "shrink_perturb", "dash", "none", "full_reset")
CAPTION = (
    "Figure 5. (a) Accuracy at the end of training against the number of Newton-Schulz iterations of FIRE; dashed: levels "
    "of other methods. (b) Right after the reset: largest eigenvalue of the Hessian on the data to come, deviation from "
    "isometry, and distance moved relative to a full reset, both summed over the matrices that FIRE changes. Points and "
    "bars are means over the seeds; bands and error bars run from the lowest to the highest seed. Panels without runs are "
    "left out."
)


def draw(parts: Sequence[Results], paper_curves: bool = False, interest: Sequence[str] = SHOWN) -> Figure:
    """Return the figure: the panels of (a) that were run above those of (b); `paper_curves` draws the paper's panel under
    each."""
    frame = pd.concat(map(estimates.frame, parts), ignore_index=True)
    known = {part.first["experiment"]: part for part in parts}
    scans = {panel: part for panel in PAIRS if (part := scan_of(panel, known, frame)) is not None}
    seeds_of = hessians(frame).set_index("experiment")["n"]
    bars = known[max(known, key=lambda name: (seeds_of.get(name, 0), len(_bars(frame, known[name]))))]
    metrics = [metric for metric in BARS if metric in set(_bars(frame, bars)["metric"])]
    height, rows = 2 if paper_curves else 1, [row for row in (list(scans), metrics) if row]
    columns, count = max(map(len, rows), default=1), height * max(1, len(rows))
    figure, grid = plt.subplots(count, columns, figsize=(3.1 * columns + 0.2, 2.8 * count), squeeze=False)
    for axis in grid.ravel():
        axis.set_visible(False)
    for column, panel in enumerate(scans):
        axis = _shown(grid[0, column])
        draw_iterations(axis, scans[panel], frame, known.get(f"fig2a_{panel}", scans[panel]))
        if paper_curves:
            draw_paper_iterations(_shown(grid[1, column]), panel, PAIRS[panel])
    for column, metric in enumerate(metrics):
        (text, name), axis = BARS[metric], _shown(grid[-height, column])
        rows = _bars(frame, bars)
        seeds = plot.seeds_text(rows[(rows["metric"] == metric) & rows["label"].isin(interest)]["n"])
        draw_bars(axis, rows, metric, f"{text}\n{plot.title(bars).splitlines()[0]}\n{seeds}", interest)
        if paper_curves:
            draw_paper_bars(_shown(grid[-1, column]), name, text)
    if scans:
        plot.row_heading(grid[0, 0], "a  Number of iterations")
        plot.legend(figure, grid[0])
    if metrics:
        plot.row_heading(grid[-height, 0], "b  Right after the reset", up=38)
    figure.tight_layout(h_pad=1.6)
    return figure


def _shown(axis: Axes) -> Axes:
    axis.set_visible(True)
    return axis


def _bars(frame: pd.DataFrame, part: Results) -> pd.DataFrame:
    """Return what panel (b) shows of one setting. The weights that `none` trains on are those that FIRE finds; they have
    not moved."""
    rows = of(frame, part)
    found = rows[rows["metric"].isin(BARS) & rows["label"].isin(SHOWN)]
    before = rows[(rows["metric"] == "common_dfi_before") & (rows["label"] == "fire")]
    untreated = before.assign(metric="common_dfi_after", label="none", method="none")
    return pd.concat([found, untreated]) if "none" in set(rows["label"]) else found


def hessians(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the largest Hessian eigenvalue right after the reset, one row per setting, for FIRE and S&P, with the
    smaller number of seeds."""
    rows = estimates.means(frame[(frame["metric"] == estimates.HESSIAN) & frame["figure"].eq("fig2a")])
    wide = rows.pivot(index=["experiment", "size"], columns="label", values="mean")
    wide = wide.reindex(columns=["fire", "shrink_perturb"]).dropna()
    both = rows[rows["label"].isin(wide.columns)].groupby(["experiment", "size"])["n"].min()
    return wide.join(both).reset_index()


def of(frame: pd.DataFrame, part: Results) -> pd.DataFrame:
    """Return the estimates of one setting without their comparisons."""
    return estimates.means(estimates.of(frame, part))


def scan_of(panel: str, known: dict[str, Results], frame: pd.DataFrame) -> Results | None:
    """Return the runs that panel (a) shows for `panel`, a data set and network of the paper.

    These are the first of `fig5a_<panel>`, `fig2a_<panel>` and INSTEAD[panel] that have FIRE with more than one number
    of iterations; None if none has.
    """
    for name in (f"fig5a_{panel}", f"fig2a_{panel}", INSTEAD.get(panel)):
        if name in known and len(iterations(of(frame, known[name]))) > 1:
            return known[name]
    return None


def iterations(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the headline estimates of `fire`, one row per number of iterations, in ascending order."""
    rows = rows[rows["headline"] & (rows["method"] == "fire")].copy()
    found = [re.fullmatch(r"fire(?:-(?:method\.)?iterations=(\d+))?", label) for label in rows["label"]]
    rows["iterations"] = [int(match[1] or ITERATIONS) if match else None for match in found]
    return rows.dropna(subset=["iterations"]).drop_duplicates("iterations").sort_values("iterations")


def draw_iterations(axis: Axes, part: Results, frame: pd.DataFrame, others: Results) -> None:
    """Draw accuracy against iterations for `part`, with other methods as levels; the levels are from `others` if
    `part` has no run of `none`."""
    rows = of(frame, part)
    table, look = iterations(rows), plot.look("fire")
    style = {"color": look.colour, "marker": look.marker, "markersize": 4, "label": look.name}
    axis.plot(table["iterations"], table["mean"], **style)
    plot.draw_band(axis, table["iterations"], table["lowest"], table["highest"], look.colour, 0.15)
    levels = rows[rows["headline"]].set_index("label")["mean"]
    if "none" not in levels:
        levels = of(frame, others).query("headline").set_index("label")["mean"]
    for label in ("none", "full_reset", "fire_exact"):
        if label in levels:
            plot.draw_level(axis, levels[label], label)
    number_ticks(axis, table["iterations"])
    axis.set_title(plot.title(part))
    axis.set_xlabel("Newton-Schulz iterations")
    axis.set_ylabel(rows[rows["headline"]]["measure"].iloc[0].split(",")[0])


def number_ticks(axis: Axes, iterations: Sequence[float]) -> None:
    """Make the horizontal axis logarithmic, with one tick per number of iterations that was run."""
    axis.set_xscale("log")
    axis.set_xticks(iterations, [f"{number:.0f}" for number in iterations])
    axis.minorticks_off()


def draw_bars(
    axis: Axes, rows: pd.DataFrame, metric: str, text: str, interest: Sequence[str] = SHOWN
) -> None:
    """Draw one bar per method with its value above, and error bars from the lowest to the highest seed. The axis is
    logarithmic where the means span more than a factor of 20. Values of 0 or less are left out."""
    rows = rows[(rows["metric"] == metric) & rows["label"].isin(interest) & (rows["mean"] > 0)]
    rows = rows.set_index("label").loc[plot.ordered(rows["label"])]
    span = rows["mean"].max() / rows["mean"].min()
    named_bars(axis, rows["mean"])
    errors = [rows["mean"] - rows["lowest"], rows["highest"] - rows["mean"]]
    errors = [error.clip(lower=0) for error in errors]  # equal seeds, whose mean is rounded
    axis.errorbar(range(len(rows)), rows["mean"], errors, fmt="none", ecolor="#222222", elinewidth=1)
    for place, (value, top) in enumerate(zip(rows["mean"], rows["highest"])):
        text_above = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
        axis.annotate(text_above, (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=6.5)
    if span > 20:
        axis.set_yscale("log")
        axis.set_ylim(rows["lowest"].clip(lower=rows["mean"] / 10).min() / 3, rows["highest"].max() * 4)
    else:
        axis.set_ylim(0, rows["highest"].max() * 1.15)
    axis.set_title(text)


def named_bars(axis: Axes, heights: pd.Series) -> Any:
    """Draw one bar per method, the index of `heights`, with its name below, and return the bars."""
    looks = [plot.look(label) for label in heights.index]
    axis.set_xticks(range(len(looks)), [look.name for look in looks], rotation=30, ha="right")
    axis.grid(False, axis="x")
    return axis.bar(range(len(looks)), heights, color=[look.colour for look in looks], width=0.65)


def draw_paper_iterations(axis: Axes, panel: str, text: str) -> None:
    """Draw the paper's panel of (a)."""
    plot.draw_paper(axis, "fig5a", panel, text)
    points = paper.panel_of("fig5a", panel)
    number_ticks(axis, points["x"].dropna().unique())
    axis.set_xlabel("Newton-Schulz iterations")


def draw_paper_bars(axis: Axes, panel: str, text: str) -> None:
    """Draw the paper's panel of (b)."""
    rows = paper.panel_of("fig5b", panel).set_index("method")
    axis.bar_label(
        named_bars(axis, rows["y"].loc[plot.ordered(rows.index)]), fmt="%.3g", padding=2, fontsize=6.5
    )
    axis.set_title(f"{text}\nthe paper", color="#555555")
    axis.set_facecolor("#F8F6F1")
