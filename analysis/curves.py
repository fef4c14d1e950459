"""Lines with bands: what every figure draws, and the numbers behind it.

A band is the range over the seeds (lowest to highest), which assumes nothing; intervals are in the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.load import Results
from analysis.style import METHODS, look, ordered, split_label
from fire_core.errors import UserError

BINS = 50
ORDER = list(METHODS)


def with_progress(rows: pd.DataFrame, x: str = "auto") -> tuple[pd.DataFrame, str]:
    """Adds column `x`: epochs counted over all phases when every row has an epoch, else steps (`x` forces
    "epoch" or "step"). Returns the frame and the axis title."""
    if x == "step" or (x == "auto" and rows["epoch"].isna().any()):
        return rows.assign(x=rows["step"]), "step"
    spans = rows.groupby("phase")["epoch"].agg(["min", "max"]).sort_index()
    restarts = len(spans) > 1 and bool(
        (spans["min"].iloc[1:].to_numpy() <= spans["max"].iloc[:-1].to_numpy()).all()
    )
    offsets = spans["max"].cumsum().shift(fill_value=0.0) if restarts else spans["max"] * 0.0
    return rows.assign(x=rows["epoch"] + rows["phase"].map(offsets)), "epoch"


def boundaries(rows: pd.DataFrame) -> list[float]:
    """Where on `x` each boundary lies: the end of the phase before it."""
    ends = rows.groupby("phase")["x"].max().sort_index()
    return [float(value) for value in ends.iloc[:-1]]


def band(rows: pd.DataFrame, value: str = "value") -> pd.DataFrame:
    """Rows of one label -> mean, low, high, seeds per x. Where seeds were not measured at the same x
    (returns at the end of episodes) they are first averaged in BINS equal bins."""
    per_seed = rows.groupby(["seed", "x"], as_index=False)[value].last()
    points, seeds = per_seed["x"].nunique(), per_seed["seed"].nunique()
    if points > BINS and points > 1.5 * len(per_seed) / seeds:
        edges = np.linspace(per_seed["x"].min(), per_seed["x"].max(), BINS + 1)
        middle = (edges[:-1] + edges[1:]) / 2
        bins = np.clip(np.digitize(per_seed["x"], edges) - 1, 0, BINS - 1)
        per_seed = per_seed.assign(x=middle[bins]).groupby(["seed", "x"], as_index=False)[value].mean()
    return per_seed.groupby("x")[value].agg(mean="mean", low="min", high="max", seeds="count").reset_index()


def draw(axis: Axes, x: Sequence[float], table: pd.DataFrame, label: str, text: str | None = None) -> None:
    """One line with its band in the look of `label`."""
    style, every, method = look(label), max(1, len(table) // 8), split_label(label)[0]
    first = (
        ORDER.index(method) % every if method in ORDER else 0
    )  # markers of equal lines do not hide each other
    axis.plot(
        x,
        table["mean"],
        color=style.colour,
        linestyle=style.dash,
        marker=style.marker,
        markevery=(first, every),
        label=text or style.name,
        zorder=4 if label == "fire" else 3,
    )
    if "low" in table and (table["seeds"] > 1).any():
        axis.fill_between(x, table["low"], table["high"], color=style.colour, alpha=0.14, linewidth=0)


def draw_labels(axis: Axes, rows: pd.DataFrame, labels: Iterable[str] | None = None) -> pd.DataFrame:
    """Draw every label of `rows` (columns label, seed, x, value); returns what was drawn as one frame."""
    drawn = []
    for label in ordered(labels if labels is not None else rows["label"].unique()):
        part = rows[rows["label"] == label]
        if part.empty:
            continue
        table = band(part)
        draw(axis, table["x"], table, label)
        drawn.append(table.assign(label=label))
    return pd.concat(drawn, ignore_index=True) if drawn else pd.DataFrame()


def draw_level(axis: Axes, value: float, label: str, text: str | None = None) -> None:
    """A dashed horizontal reference."""
    style = look(label)
    axis.axhline(
        value, color=style.colour, linestyle=(0, (5, 3)), linewidth=1.1, label=text or style.name, zorder=2
    )


def mark_boundaries(axis: Axes, positions: Iterable[float]) -> None:
    positions = list(positions)
    width = 0.9 if len(positions) < 6 else 0.45
    for position in positions:
        axis.axvline(position, color="#8A8A8A", linestyle=":", linewidth=width, zorder=1)


def draw_paper(axis: Axes, curves: pd.DataFrame, scale: float = 1.0) -> None:
    """The paper's own curves (columns method, x, y), thin and dotted in the method's colour. `scale`
    stretches x."""
    for method in ordered(curves["method"].unique()):
        part = curves[curves["method"] == method].sort_values("x")
        if len(part) == 1 or part["x"].isna().all():
            axis.axhline(part["y"].iloc[0], color=look(method).colour, linestyle=":", linewidth=0.8, zorder=1)
        else:
            axis.plot(
                part["x"] * scale,
                part["y"],
                color=look(method).colour,
                linestyle=":",
                linewidth=0.9,
                zorder=1,
            )


def one_setting(results: Results, experiment: str) -> str:
    """The data set of an experiment's runs; UserError if sizes or data sets are mixed, which no picture may
    hide."""
    runs = results.finished[results.finished["experiment"] == experiment]
    for column in ("size", "data"):
        values = sorted(runs[column].unique())
        if len(values) > 1:
            raise UserError(
                f"runs of '{experiment}' differ in {column}: {', '.join(values)}; select one "
                "of them so that they are not drawn together"
            )
    return runs["data"].iloc[0] if len(runs) else "unknown"


def settings(results: Results, experiments: Sequence[str] | None = None) -> list[Results]:
    """The finished runs split by experiment, size and data set, in the order of `experiments`: what may
    share a panel."""
    done = results.finished
    names = experiments if experiments is not None else sorted(done["experiment"].unique())
    parts = []
    for name in names:
        rows = done[done["experiment"] == name]
        for size, data in sorted(set(zip(rows["size"], rows["data"]))):
            parts.append(results.select(experiment=name, size=size, data=data))
    return parts


def panel_title(results: Results, experiment: str) -> str:
    """Two lines: the panel, then size, data and seeds."""
    data = one_setting(results, experiment)
    runs = results.finished[results.finished["experiment"] == experiment]
    size = runs["size"].iloc[0]
    return f"{experiment}\n{data}, size {size}, {seeds_text(runs)}"


def seeds_text(runs: pd.DataFrame) -> str:
    """`3 seeds` or `1-3 seeds` when labels differ."""
    counts = runs.groupby("label")["seed"].nunique()
    low, high = int(counts.min()), int(counts.max())
    return f"{low} seed{'s' * (low > 1)}" if low == high else f"{low}-{high} seeds"


def trunk_commits(runs: pd.DataFrame) -> list[str]:
    """Commits that made shared first phases and none of these runs."""
    return sorted(set(runs["trunk_commit"].dropna()) - set(runs["commit"]) - {""})


def provenance(runs: pd.DataFrame) -> str:
    """What the runs share and where they differ: sizes, data, commits, machines. Says so when they are
    mixed."""
    finished = runs[runs["status"] == "done"]
    within = finished.groupby(["experiment", "size", "data"])["commit"].nunique()
    lines = []
    for column, one, many in (
        ("size", "size", "sizes MIXED"),
        ("data", "data", "data sets"),
        ("commit", "commit", "commits MIXED" if (within > 1).any() else "commits, one an experiment"),
        ("machine", "machine", "machines MIXED"),
    ):
        values = sorted(finished[column].unique())
        shown = (
            ", ".join(values) if len(values) <= 4 else f"{', '.join(values[:3])} and {len(values) - 3} more"
        )
        lines.append(f"{one if len(values) == 1 else many}: {shown}")
    if others := trunk_commits(finished):
        lines.append(f"first phases, shared, of commit{'s' * (len(others) > 1)} {', '.join(others)}")
    if finished["dirty"].any():
        lines.append(f"{int(finished['dirty'].sum())} of {len(finished)} runs from a changed checkout")
    return "; ".join(lines)
