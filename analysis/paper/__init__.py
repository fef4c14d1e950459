"""The paper's values, read off its figures (see README.md in this folder). Its panels have the names of our experiments."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).resolve().parent
LATEST_START = 0.95  # a curve that stops before this share of the axis has no end value
OURS = {"fig4_dqn": "fig4a", "fig4_sac": "fig4b", "iter30k": "30k", "iter60k": "60k"}
OURS |= {"h1_walk": "walk", "h1_run": "run", "h1_balance_simple": "balance_simple"}


@cache
def curves(*files: str) -> pd.DataFrame:
    """Return files of this folder with the columns experiment, method, x, y, lo, hi."""
    table = pd.concat([pd.read_csv(FOLDER / f"{file}.csv") for file in files]).replace(OURS)
    return table.assign(experiment=table["figure"] + "_" + table["panel"])


def over_time() -> pd.DataFrame:
    """Return the curves of Figures 2 to 4."""
    return curves("fig2a", "fig2b", "fig2c", "fig3", "fig4_dqn", "fig4_sac")


@cache
def panels() -> list[str]:
    """Return the panels of Figures 2 to 4, in the paper's order."""
    return over_time()["experiment"].unique().tolist()


@cache
def end_values(experiment: str) -> dict[str, float]:
    """Return {method: last value of its curve} of a panel of Figures 2 to 4, without curves whose end is hidden in the
    figure; {} for another experiment."""
    table = over_time().query("experiment == @experiment")
    last = table.sort_values("x", kind="stable").groupby("method").last()
    return last[last["x"] >= LATEST_START * table["x"].max()]["y"].to_dict()


def figure_5b(quantity: str) -> dict[str, float]:
    """Return {method: value} of the bars of Figure 5b."""
    return curves("fig5").query("panel == @quantity").set_index("method")["y"].to_dict()


@cache
def claims() -> pd.DataFrame:
    """Return the claims, each that `better` ends better than `worse` in one panel (columns experiment, figure, panel,
    better, worse, source)."""
    table = pd.read_csv(FOLDER / "claims.csv").fillna("")
    return table.assign(experiment=(table["figure"] + "_" + table["panel"]).str.lstrip("_"))


def gain(experiment: str, better: str, worse: str) -> float:
    """Return the paper's difference between the end values of two methods, positive if the first ends better; NaN if one
    of them is not known."""
    ends, sign = end_values(experiment), -1 if experiment.startswith("fig3") else 1  # of losses
    return sign * (ends.get(better, float("nan")) - ends.get(worse, float("nan")))
