"""Training curves: Figures 2 to 4 of the paper, the experiments beside them, and the picture of README.md."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from analysis import measures, names, paper, plot
from analysis.export import thin
from analysis.measures import Measure
from analysis.plot import Axes, Figure, plt
from analysis.runs import Results

ROWS = {"fig2a": "a  Warm start", "fig2b": "b  Continual", "fig2c": "c  Class-incremental", "fig3": ""}
ROWS |= {"fig4a": "a  DQN", "fig4b": "b  SAC"}  # of the paper's figures, with their headings
STARTS = {"best": "the best checkpoint", "30k": "iteration 30,000", "60k": "iteration 60,000"}
HEIGHTS = {"fig2": 7.2, "fig3": 2.9, "fig4": 5.0}  # of the figures
# methods that row a of Figure 2 shows by their end value alone, as the paper does
LEVELS = ("none", "full_reset")
BANDS = ("fire", "none")  # of five agents that end close together, more bands cannot be told apart
FEW = 7  # methods beside those of interest that a panel outside Figure 2 shows as curves, and not by their ends alone
BINS = 30  # of the returns of training episodes, over the whole run
# the last three end above FIRE
README = ("none", "shrink_perturb", "full_reset", "fire", "muon", "redo", "snr")


class Points(NamedTuple):
    """What a panel shows: `rows` (columns label, seed, phase, x, value), the unit of `x`, the boundaries on it, and where
    the part of the curves starts that sets the limits, if it is not all of them."""

    rows: pd.DataFrame
    unit: str
    boundaries: list[float]
    late: float | None = None


def points(part: Results, measure: Measure, paper: bool = True) -> Points:
    """Return the curves of one measure: stage 2 (Figure 2a), the ends of stages (2b and 2c) or phase 2 (Figure 3) as in the
    paper, else, and without `paper`, all phases. A first phase before a single boundary is cut to its end."""
    figure, domain = part.first["figure"] if paper else "", part.first["domain"]
    metrics = part.metrics[np.isfinite(part.metrics["value"]) & np.isfinite(part.metrics["step"])]
    if measure.reduce == "late_phases" or figure in ("fig2b", "fig2c"):
        rows = measures.phase_ends(metrics, measure.metric)
        return Points(rows.assign(x=rows["phase"] + 1.0), "stage" if figure else "task", [])
    if is_agent(part):
        rows = measures.with_acts(metrics, measure.metric)
        resets = plot.boundaries(rows.assign(x=rows["step"] / 1000))
        return Points(returns(rows, measure.metric), "environment step (thousands)", resets)
    ordered = measures.ordered_rows if domain == "vision" else measures.with_acts
    rows = ordered(metrics, measure.metric)
    last = rows[rows["phase"] == rows["phase"].max()]
    if figure == "fig3":
        rows = last.assign(x=last["step"] - last.groupby(["label", "seed"])["step"].transform("min"))
        return Points(rows, "iteration of phase 2", [], 0.25 * rows["x"].max())
    if figure == "fig2a":
        rows = plot.with_progress(last)[0]
        return Points(rows, "epoch of stage 2", [], 0.3 * rows["x"].max())
    rows, unit = plot.with_progress(ordered(thin(metrics), measure.metric))
    marks = plot.boundaries(rows)
    if len(marks) != 1:
        return Points(rows, unit, marks)
    first = rows["x"].where(rows["phase"] == rows["phase"].min())
    ends = first.groupby([rows["label"], rows["seed"]]).transform("max")
    rows["x"] += (marks[0] - ends).fillna(0) * (unit == "step")  # at which seeds may have their boundaries
    length = rows["x"].max() - marks[0]
    return Points(rows[rows["x"] >= marks[0] - 0.2 * length], unit, marks, marks[0] + 0.3 * length)


def is_agent(part: Results) -> bool:
    """Return whether runs are of DQN or SAC, whose first phase all methods share."""
    return part.first["figure"].startswith("fig4") or part.first["domain"] in ("dqn", "sac")


def returns(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return rows with `x` in thousands of environment steps. The part before the boundary, which all methods share, is
    kept for one label only; training returns are means over BINS equal parts of the run."""
    labels = set(rows["label"])
    shared = "none" if "none" in labels else min(labels)
    rows = rows[(rows["label"] == shared) | (rows["phase"] > 0)]
    if metric == "train_return":
        width = rows["step"].max() / BINS
        rows = rows.assign(step=(np.ceil(rows["step"] / width) - 0.5).clip(lower=0.5) * width)
        rows = rows.groupby(["label", "seed", "phase", "step"], as_index=False)["value"].mean()
    return rows.assign(x=rows["step"] / 1000)


def random_level(part: Results, metric: str) -> float | None:
    """Return the mean return of random actions, or None if it was not measured or `metric` is no return."""
    random = measures.random_returns(part.metrics)
    return float(np.mean(list(random.values()))) if random and metric.endswith("_return") else None


def draw_panel(axis: Axes, part: Results, interest: Sequence[str], sized: bool = False) -> pd.DataFrame:
    """Draw the headline of one setting and return its curves (see `plot.draw_curves`)."""
    part = part.plain
    first, looks, measure = part.first, names.looks(part), measures.of(part)[0]
    (rows, unit, marks, late), ends = points(part, measure), measures.values(part.metrics, measure)
    images, warm, agent = first["figure"].startswith("fig2"), first["figure"] == "fig2a", is_agent(part)
    levels = {label: np.mean(list(ends[label].values())) for label in LEVELS if warm and label in ends}
    apart = [label for label in looks if label not in interest]
    if not images and (agent or first["domain"] != "vision" or len(apart) <= FEW):
        apart = []
    shown = rows[~rows["label"].isin([*apart, *levels])]
    bands = BANDS if agent else interest
    drawn = plot.draw_curves(axis, shown if len(shown) else rows, looks, interest, bands)
    beside = {label: ends[label] for label in apart if label in ends and len(shown)}
    ended = plot.draw_ends(axis, beside, looks, drawn["x"].max())
    for label, value in levels.items():
        plot.draw_level(axis, value, label)
    if agent and (level := random_level(part, measure.metric)) is not None:
        plot.draw_level(axis, level, "random_actions")
    if late is not None:
        plot.fit_limits(axis, drawn, late, [*levels.values(), *ended] if warm else ())
    for place in marks:
        axis.axvline(place, color="#C8C8C8", linewidth=0.7, zorder=1)
    if (first["figure"] or agent) and (text := plot.premise_text(part)):
        style = {"va": "top", "color": "#6F6F6F", "fontsize": 6.5, "zorder": 5, "transform": axis.transAxes}
        axis.text(0.02, 0.98, text, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5}, **style)
    if images:
        ticks = sorted({int(x) for x in drawn["x"].unique()})
        axis.set_xticks(ticks[:: max(1, drawn["x"].nunique() // 5)])
    elif not agent:
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.set_title(names.title(part) + (f", {first['size']}" if sized else ""))
    axis.set(xlabel=unit, ylabel=measure.axis)
    return drawn


def draw_paper(name: str, parts: Sequence[Results], interest: Sequence[str] = plot.INTEREST) -> Figure:
    """Return a figure of the paper with all of its panels, DQN by its training returns, SAC by its evaluations."""
    rows = {row: heading for row, heading in ROWS.items() if row.startswith(name)}
    known = {part.first["experiment"]: part for part in parts}
    size, language, drawn = (9.3, HEIGHTS[name]), name == "fig3", []
    sized = len({part.first["size"] for part in parts}) > 1
    figure, grid = plt.subplots(len(rows), 3, figsize=size, sharey=language, squeeze=False)
    for (row, heading), axes in zip(rows.items(), grid):
        panels = [panel for panel in paper.panels() if panel.startswith(row)]
        axes = axes[-len(panels) :]  # row c has two, and the legend
        for axis, panel in zip(axes, panels):
            if part := known.get(panel):
                drawn.append(draw_panel(axis, part, interest, sized))
                if language:
                    axis.set_title(fork_title(part.plain))
            else:
                plot.draw_empty(axis, names.panel(panel))
        plot.row_heading(axes[0], heading)
    if language and drawn:  # one axis for all panels, fitted to the thick lines
        curves = pd.concat(drawn)
        bright = curves[curves["label"].isin(interest)]
        plot.fit_limits(grid[0, 0], bright if len(bright) else curves, 0.25 * curves["x"].max())
        for axis in grid[0]:
            axis.set_ylabel("validation loss (nats)" if axis is grid[0, 0] else "")
    return plot.with_legend(figure, grid.ravel(), where=grid[2, 0] if name == "fig2" else None, h_pad=1.6)


def fork_title(part: Results) -> str:
    """Return the title of a panel of Figure 3: where phase 2 starts, here and in the paper, then network and data."""
    start = STARTS[part.first["panel"]]
    steps = points(part, measures.of(part)[0]).rows.groupby(["label", "seed"])["step"].min().unique()
    ours = f"iteration {steps[0]:,}"
    if start.startswith("iteration") and len(steps) == 1 and ours != start:
        start = f"{ours} (paper: {start.removeprefix('iteration ')})"
    return f"From {start}\nGPT, {names.title(part).partition(chr(10))[2]}\n{names.data(part.first['data'])}"


def draw_probes(parts: Sequence[Results]) -> Figure:
    figure, axes = plot.panels(len(parts), 3, 3.1, 2.6)
    for axis, part in zip(axes, parts):
        draw_panel(axis, part, plot.INTEREST, sized=len({part.first["size"] for part in parts}) > 1)
    return plot.with_legend(figure, axes, h_pad=1.4)


def draw_readme(parts: Sequence[Results]) -> Figure | None:
    """Return the picture of README.md: one probe, four methods and the three best ones, readable at 700 pixels."""
    if (four := parts[0].select(label=README[:4])).finished.empty:
        return None
    figure, axis = plt.subplots(figsize=(5.2, 2.9))
    draw_panel(axis, parts[0].select(label=README), plot.INTEREST)
    axis.set_title(names.title(four, ", "))
    return plot.with_legend(figure, [axis])
