"""Tables of docs/studies.md and of the site from measurements of `benchmarks/`: one CSV of `analysis/results` each."""

from __future__ import annotations

import pandas as pd

from analysis import paper
from analysis.rendering import short
from analysis.runs import RESULTS

THEOREMS = {
    "1": "1: shift of the features' covariance, squared",
    "2": "2: norm of the Hessian",
    "3": "3: effective rank of a layer's output, from below",
    "4": "4: activity of a unit, largest factor from the mean",
}


def read(name: str) -> pd.DataFrame:
    """Return one CSV of analysis/results."""
    return pd.read_csv(RESULTS / f"{name}.csv")


def convergence() -> pd.DataFrame:
    """Return the DfI after 5, 10, 20 and 40 iterations and of the exact solver."""
    rows = read("convergence").set_index("matrices").loc[:, :"exact"]
    return rows.map("{:.2g}".format).reset_index()


def table1() -> pd.DataFrame:
    """Return what one boundary costs, with the paper's Table 1 beside it."""
    names = {"boundary_seconds": "seconds", "boundary_mb": "MB"}
    rows, theirs = read("table1"), paper.boundary_costs()
    pairs = [theirs.get(method, ("-", "-")) for method in rows["method"]]
    rows = rows.assign(boundary_mb=rows["boundary_mb"].round().astype(int))
    table = rows[["method", "device", "hardware", "images", "batch", *names]].map(short)
    table[["paper (GPU), s", "paper, MB"]] = pairs
    return table.rename(columns=names)


def theorems() -> pd.DataFrame:
    """Return one row per theorem: how many layers have a bound, in how many it holds, and how far it is from the measured
    value. Theorem 1 compares a layer with itself before the method, so that `none` has no row there."""
    rows = read("theory").astype({"theorem": str})
    rows = rows[(rows["theorem"] != "1") | (rows["method"] != "none")]
    lines = []
    for theorem, title in THEOREMS.items():
        part = rows[rows["theorem"] == theorem]
        told = part[part["bound"].notna()]
        line = {
            "theorem": title,
            "layers with a bound": f"{len(told)} of {len(part)}",
            "bound holds in": told["holds"].astype(str).eq("True").sum(),
            "measured, median": f"{told['measured'].median():.3g}",
            "bound, median": f"{told['bound'].median():.3g}",
            "bound / measured, median": f"{(told['bound'] / told['measured']).median():.2g}",
        }
        lines.append(line)
    return pd.DataFrame(lines)


def premise() -> pd.DataFrame:
    """Return the share of matrices with DfI < 1, as stored and up to a scale: trained, after FIRE as published, and
    after the exact projection. A row of theory.csv is one layer, a row of theory_premise.csv one network."""
    layers = read("theory").astype({"theorem": str}).query("theorem == '3'")
    layers = layers.assign(matrices=1, below_1=layers["dfi"] < 1, below_1_scaled=layers["dfi_scaled"] < 1)
    both = pd.concat([layers, read("theory_premise")])
    counts = ["matrices", "below_1", "below_1_scaled"]
    sums = both.groupby(["network", "method"], sort=False)[counts].sum().astype(int)
    table = pd.DataFrame({"network": sums.index.unique("network")}).set_index("network")
    names = {"none": "trained", "fire": "FIRE as published", "fire_exact": "FIRE exact"}
    for method, name in names.items():
        part = sums.xs(method, level="method")
        table[f"{name}: as stored"] = (part["below_1"] / part["matrices"]).map("{:.0%}".format)
        table[f"{name}: up to a scale"] = (part["below_1_scaled"] / part["matrices"]).map("{:.0%}".format)
    return table.reset_index()
