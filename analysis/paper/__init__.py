"""The paper's values, as read off its figures (see README.md beside this file)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).resolve().parent
LATEST_START = 0.95  # an end value is taken from the last 5 % of the axis only
PANELS = {  # our experiment -> (file, panel)
    "fig2a": "fig2a",
    "fig2b": "fig2b",
    "fig2c": "fig2c",
    "fig3": "fig3",
    "fig4a": "fig4_dqn",
    "fig4b": "fig4_sac",
}
OTHER_NAMES = {"30k": "iter30k", "60k": "iter60k", "walk": "h1_walk", "run": "h1_run"}
OTHER_NAMES |= {"balance_simple": "h1_balance_simple"}


@cache
def curves(file: str) -> pd.DataFrame:
    """figure, panel, method, x, y, lo, hi of one CSV."""
    return pd.read_csv(FOLDER / f"{file}.csv")


def panel_of(figure: str, panel: str) -> pd.DataFrame:
    """The paper's curves of one of our experiments (split as by load.figure_and_panel); empty if it has no
    such panel."""
    file = PANELS.get(figure)
    if file is None:
        return curves("fig2a").iloc[:0]
    table = curves(file)
    return table[table["panel"] == OTHER_NAMES.get(panel, panel)]


@cache
def end_values(figure: str, panel: str) -> dict[str, float]:
    """{method: last value of its curve}; a curve whose end is hidden in the figure is absent."""
    table = panel_of(figure, panel)
    if table.empty:
        return {}
    last = table.sort_values("x", kind="stable").groupby("method").last()
    return last[last["x"] >= LATEST_START * table["x"].max()]["y"].to_dict()


def cells() -> list[tuple[str, str]]:
    """Every (figure, panel) of the paper's curves, in our names."""
    ours = {theirs: name for name, theirs in OTHER_NAMES.items()}
    found = []
    for figure, file in PANELS.items():
        found += [(figure, ours.get(panel, panel)) for panel in curves(file)["panel"].unique()]
    return found


def iterations() -> pd.DataFrame:
    """Figure 5a: panel, method, x (iterations, empty for levels), y."""
    table = curves("fig5")
    return table[table["figure"] == "fig5a"]


def boundary_costs() -> dict[str, tuple[float, float]]:
    """Table 1: method -> (seconds, MB) of one boundary, ResNet-18 on CIFAR-10."""
    table = curves("costs")
    return {row.method: (row.seconds, row.memory_mb) for row in table.itertuples()}
