"""The paper's values, read off its figures (see README.md in this folder). Its panels have the names of our experiments."""

from functools import cache
from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).resolve().parent
OVER_TIME = ("fig2a", "fig2b", "fig2c", "fig3", "fig4_dqn", "fig4_sac")  # files of Figures 2 to 4
LATEST_START = 0.95  # a curve that stops before this share of the axis has no end value
OURS = {"fig4_dqn": "fig4a", "fig4_sac": "fig4b", "iter30k": "30k", "iter60k": "60k"}
OURS |= {"h1_walk": "walk", "h1_run": "run", "h1_balance_simple": "balance_simple"}


@cache
def curves(*files: str) -> pd.DataFrame:
    """Return files of this folder with the columns experiment, method, x, y, lo, hi."""
    table = pd.concat([pd.read_csv(FOLDER / f"{file}.csv") for file in files]).replace(OURS)
    return table.assign(experiment=table["figure"] + "_" + table["panel"])


@cache
def panels() -> list[str]:
    """Return the panels of Figures 2 to 4, in the paper's order."""
    return curves(*OVER_TIME)["experiment"].unique().tolist()


@cache
def end_values(experiment: str) -> dict[str, float]:
    """Return {method: last value of its curve} of a panel of Figures 2 to 4, without ends that are hidden there."""
    table = curves(*OVER_TIME).query("experiment == @experiment")
    last = table.sort_values("x", kind="stable").groupby("method").last()
    return last[last["x"] >= LATEST_START * table["x"].max()]["y"].to_dict()


def figure_5b(quantity: str) -> dict[str, float]:
    return curves("fig5").query("panel == @quantity").set_index("method")["y"].to_dict()


@cache
def claims() -> pd.DataFrame:
    """Return the claims (columns experiment, figure, panel, better, worse, source): `better` ends better than `worse`."""
    table = pd.read_csv(FOLDER / "claims.csv").fillna("")
    return table.assign(experiment=(table["figure"] + "_" + table["panel"]).str.lstrip("_"))


def gain(experiment: str, better: str, worse: str) -> float:
    """Return how far one method ends ahead of another in the paper; NaN if the end of one of them is not known."""
    ends, sign = end_values(experiment), -1 if experiment.startswith("fig3") else 1  # of losses
    return sign * (ends.get(better, float("nan")) - ends.get(worse, float("nan")))
