"""The paper's values, read off its figures (see README.md in this folder)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).resolve().parent
LATEST_START = 0.95  # a curve that stops before this share of the axis has no end value
PANELS = {  # figure -> CSV file
    "fig2a": "fig2a",
    "fig2b": "fig2b",
    "fig2c": "fig2c",
    "fig3": "fig3",
    "fig4a": "fig4_dqn",
    "fig4b": "fig4_sac",
    "fig5a": "fig5",
    "fig5b": "fig5",
}
OTHER_NAMES = {"30k": "iter30k", "60k": "iter60k", "walk": "h1_walk", "run": "h1_run"}
OTHER_NAMES |= {"balance_simple": "h1_balance_simple"}
SAME_CELL = {"pictures_resnet18": ("fig2a", "cifar10_resnet18")}  # shown beside that experiment


@cache
def curves(file: str) -> pd.DataFrame:
    """Return one CSV of this folder. Those of figures have the columns figure, panel, method, x, y, lo, hi."""
    return pd.read_csv(FOLDER / f"{file}.csv")


def panel_of(figure: str, panel: str) -> pd.DataFrame:
    """Return the paper's curves of one panel, which is given by our names; empty if the paper has no such panel."""
    figure, panel = SAME_CELL.get(panel, (figure, panel))
    if figure not in PANELS:
        return curves("fig2a").iloc[:0]
    table = curves(PANELS[figure])
    part = table["figure"] == figure if PANELS[figure] == "fig5" else True
    return table[part & (table["panel"] == OTHER_NAMES.get(panel, panel))]


@cache
def end_values(figure: str, panel: str) -> dict[str, float]:
    """Return {method: last value of its curve}, without curves whose end is hidden in the figure. Empty for Figure 5,
    whose axis is not time."""
    table = panel_of(figure, panel)
    if table.empty or figure.startswith("fig5"):
        return {}
    last = table.sort_values("x", kind="stable").groupby("method").last()
    return last[last["x"] >= LATEST_START * table["x"].max()]["y"].to_dict()


def cells() -> list[tuple[str, str]]:
    """Return every (figure, panel) of Figures 2 to 4, in our names."""
    ours = {theirs: name for name, theirs in OTHER_NAMES.items()}
    return [(f, ours.get(p, p)) for f in PANELS if f[3] < "5" for p in curves(PANELS[f])["panel"].unique()]


def claims() -> pd.DataFrame:
    """Return the claims, each that `better` ends better than `worse` in one panel (columns figure, panel, better,
    worse, source, experiment)."""
    table = curves("claims").fillna("")
    names = [
        f"{figure}_{panel}" if figure else panel for figure, panel in zip(table["figure"], table["panel"])
    ]
    return table.assign(experiment=names)


def gain(figure: str, panel: str, better: str, worse: str) -> float:
    """Return the paper's difference between the end values of two methods, positive if the first ends better; NaN if one
    of them is not known."""
    ends = end_values(figure, panel)
    sign = -1 if figure == "fig3" else 1  # of losses
    return sign * (ends.get(better, float("nan")) - ends.get(worse, float("nan")))


def boundary_costs() -> dict[str, tuple[float, float]]:
    """Return the paper's Table 1 as {method: (seconds, MB)} of one boundary of a ResNet-18 on CIFAR-10."""
    table = curves("costs")
    return {row.method: (row.seconds, row.memory_mb) for row in table.itertuples()}
