"""Tables of docs/studies.md: single questions, and measurements of `benchmarks/`."""

from __future__ import annotations

import pandas as pd

from analysis import names, paper
from analysis.figures import studies
from analysis.rendering import column, difference_text, short, spread
from analysis.runs import RESULTS, at_largest_size
from analysis.tables.material import Material

THEOREMS = {
    "1": "1: shift of the features' covariance, squared",
    "2": "2: norm of the Hessian",
    "3": "3: effective rank of a layer's output, from below",
    "4": "4: activity of a unit, largest factor from the mean",
}


def single_questions(material: Material) -> pd.DataFrame:
    """Return settings of FIRE that differ clearly, FIRE with Muon, single layers, and the matrices of a ViT."""
    found = []

    def add(where: str, rows: pd.DataFrame, other: str) -> None:
        what = rows["name"] + f" minus {names.look(other).name.partition(' (')[0]}"
        texts = {"difference [95 %]": column(difference_text, rows), "seeds": rows["pairs"]}
        found.append(pd.DataFrame({"where": where, "what": what} | texts))

    for experiment, title in (
        ("settings_random_label", "random labels"),
        ("settings_warm_start", "warm start"),
    ):
        rows = material.gaps("fire", experiment)
        clear = (rows["word"] != "") & (rows["difference"] != 0)
        add(f"settings, {title}", rows[clear & ~rows["method"].isin(["none", "muon", "fire_muon"])], "fire")
    for experiment, title in (
        ("settings_random_label", "random labels"),
        ("muon_fig3_60k", "language, loss"),
    ):
        for other in ("muon", "fire"):
            add(f"Muon, {title}", material.gaps(other, experiment).query("label == 'fire_muon'"), other)
    for part in material.parts("sensitivity_*"):
        rows = studies.layers(part)
        single = rows[rows["block"] != "all"]
        ranked = single.loc[[single["gain"].idxmax(), single["gain"].idxmin()]]
        ranked = ranked.assign(name=["best single layer, ", "worst single layer, "] + ranked["name"])
        shown = pd.concat([ranked, rows[rows["block"] == "all"]])
        add(f"layers, {names.title(part).splitlines()[0]}", shown, "none")
    for experiment, title in (
        ("ablation_targets_vit", "warm start"),
        ("fig2c_cifar100_vit_tiny", "class-incremental"),
    ):
        rows = material.gaps("none", experiment)
        shown = rows["changed"].str.startswith("targets=") | rows["label"].isin(["fire", "full_reset"])
        add(f"ViT-Tiny, {title}", rows[shown], "none")
    return pd.concat(found)


def other_boundaries(material: Material) -> pd.DataFrame:
    """Return FIRE, S&P and others against `none` where old data are dropped, and at other boundaries of language."""
    replay = material.gaps("none", "replay_class_incremental")
    shares = replay.groupby(replay["changed"].str.removeprefix("protocol.replay=").astype(float))
    kept = "one class after another, {:.0%} of the old images kept"
    found = [(kept.format(share), "accuracy", rows) for share, rows in shares]
    titles = {"language_domain": "language, new domain alone", "language_context": "language, windows of 512 after 128",
              "language_questions": "language, answers to questions"}  # fmt: skip
    found += [(title, "loss", material.gaps("none", name)) for name, title in titles.items()]
    table = [
        {"boundary": boundary, "measure": measure}
        | {names.look(row["method"]).name: difference_text(row, 3) for row in rows.to_dict("records")}
        for boundary, measure, rows in found
    ]
    return pd.DataFrame(table).fillna("-")


def scaling(material: Material) -> pd.DataFrame:
    """Return the differences by the number of images as text, one row per study and number of images."""
    rows = studies.scaling(material.parts("scaling_warm_start*"))
    texts = [
        f"{spread(*row, sign=True)} ({n})" for *row, n in rows[["mean", "low", "high", "n"]].to_numpy(object)
    ]
    rows = rows.assign(pair=rows["pair"].map(studies.pair_title), text=texts)
    wide = rows.pivot(index=["study", "images"], columns="pair", values="text").fillna("-").reset_index()
    return wide.assign(images=wide["images"].map("{:,}".format))


def moved(material: Material) -> pd.DataFrame:
    """Return how far FIRE moves the queries and keys of ViT-Tiny: its squared distance over that of a reset of the same
    matrices, at the first and at the last boundary, means over the seeds."""
    rows = at_largest_size(material.results.boundaries)
    rows = rows[rows["experiment"].str.fullmatch(r"fig2[abc]_\w+_vit_tiny") & rows["label"].eq("fire")]
    shares = rows.groupby(["experiment", "phase"])["sfe_share"].mean().groupby(level=0).agg(["first", "last"])
    theirs = paper.figure_5b("normalized_sfe")["fire"]
    shares = shares.assign(paper=theirs).map("{:.2f}".format).rename(index=names.panel).rename_axis("panel")
    heads = {"first": "first boundary", "last": "last boundary", "paper": "paper (network not named)"}
    return shares.rename(columns=heads).reset_index()


# ------------------------------------------------------------------------------------------------ benchmarks
def convergence(_: Material) -> pd.DataFrame:
    """Return the DfI after 5, 10, 20 and 40 iterations and of the exact solver."""
    rows = pd.read_csv(RESULTS / "convergence.csv").set_index("matrices").loc[:, :"exact"]
    return rows.map("{:.2g}".format).reset_index()


def table1(_: Material) -> pd.DataFrame:
    """Return what one boundary costs, with the paper's Table 1 beside it."""
    heads = {"boundary_seconds": "seconds", "boundary_mb": "MB"}
    heads |= {"seconds": "paper (GPU), s", "memory_mb": "paper, MB"}
    theirs = pd.read_csv(paper.FOLDER / "costs.csv", dtype=str)
    rows = pd.read_csv(RESULTS / "table1.csv").merge(theirs, "left", "method")
    rows = rows.assign(boundary_mb=rows["boundary_mb"].round().astype(int))
    return rows[["method", "device", "hardware", "images", "batch", *heads]].map(short).rename(columns=heads)


def theorems(material: Material) -> pd.DataFrame:
    """Return one row per theorem: how many layers have a bound, in how many it holds, and how far it is from the measured
    value. Theorem 1 compares a layer with itself before the method, so that `none` has no row there."""
    rows = pd.read_csv(RESULTS / "theory.csv").astype({"theorem": str})
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


def premise(material: Material) -> pd.DataFrame:
    """Return the share of matrices with DfI < 1, as stored and up to a scale: trained, after FIRE as published, and
    after the exact projection. A row of theory.csv is one layer, a row of theory_premise.csv one network."""
    layers = pd.read_csv(RESULTS / "theory.csv").astype({"theorem": str}).query("theorem == '3'")
    layers = layers.assign(matrices=1, below_1=layers["dfi"] < 1, below_1_scaled=layers["dfi_scaled"] < 1)
    both = pd.concat([layers, pd.read_csv(RESULTS / "theory_premise.csv")])
    counts = ["matrices", "below_1", "below_1_scaled"]
    sums = both.groupby(["network", "method"], sort=False)[counts].sum().astype(int)
    table = pd.DataFrame({"network": sums.index.unique("network")}).set_index("network")
    names = {"none": "trained", "fire": "FIRE as published", "fire_exact": "FIRE exact"}
    for method, name in names.items():
        part = sums.xs(method, level="method")
        table[f"{name}: as stored"] = (part["below_1"] / part["matrices"]).map("{:.0%}".format)
        table[f"{name}: up to a scale"] = (part["below_1_scaled"] / part["matrices"]).map("{:.0%}".format)
    return table.reset_index()
