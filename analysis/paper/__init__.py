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
    "fig5a": "fig5",
    "fig5b": "fig5",
}
OTHER_NAMES = {"30k": "iter30k", "60k": "iter60k", "walk": "h1_walk", "run": "h1_run"}
OTHER_NAMES |= {"balance_simple": "h1_balance_simple"}
SAME_CELL = {"pictures_resnet18": ("fig2a", "cifar10_resnet18")}  # the paper's values are shown beside ours


@cache
def curves(file: str) -> pd.DataFrame:
    """figure, panel, method, x, y, lo, hi of one CSV."""
    return pd.read_csv(FOLDER / f"{file}.csv")


def panel_of(figure: str, panel: str) -> pd.DataFrame:
    """The paper's curves of one panel, in our names; empty if it has no such panel."""
    figure, panel = SAME_CELL.get(panel, (figure, panel))
    if figure not in PANELS:
        return curves("fig2a").iloc[:0]
    table = curves(PANELS[figure])
    part = table["figure"] == figure if PANELS[figure] == "fig5" else True
    return table[part & (table["panel"] == OTHER_NAMES.get(panel, panel))]


@cache
def end_values(figure: str, panel: str) -> dict[str, float]:
    """{method: last value of its curve}; a curve whose end is hidden in the figure is absent."""
    table = panel_of(figure, panel)
    if table.empty or figure.startswith("fig5"):  # against iterations, not against time
        return {}
    last = table.sort_values("x", kind="stable").groupby("method").last()
    return last[last["x"] >= LATEST_START * table["x"].max()]["y"].to_dict()


def cells() -> list[tuple[str, str]]:
    """Every (figure, panel) of the paper's curves, in our names."""
    ours = {theirs: name for name, theirs in OTHER_NAMES.items()}
    return [(f, ours.get(p, p)) for f in PANELS if f[3] < "5" for p in curves(PANELS[f])["panel"].unique()]


def claims() -> pd.DataFrame:
    """figure, panel, better, worse, source: `better` ends better than `worse` in one panel, and who says so."""
    table = curves("claims").fillna("")
    names = [
        f"{figure}_{panel}" if figure else panel for figure, panel in zip(table["figure"], table["panel"])
    ]
    return table.assign(experiment=names)


def boundary_costs() -> dict[str, tuple[float, float]]:
    """Table 1: method -> (seconds, MB) of one boundary, ResNet-18 on CIFAR-10."""
    table = curves("costs")
    return {row.method: (row.seconds, row.memory_mb) for row in table.itertuples()}
