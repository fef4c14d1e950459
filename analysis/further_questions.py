"""Questions about FIRE beyond the paper's experiments: its settings, Muon, the theorems, single layers."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis import estimates, plot, predictors, sensitivity, theory
from analysis.rendering import mean_text, render, short
from analysis.runs import RESULTS, Results, at_largest_size, at_most, settings
from analysis.tables import compared

SETTINGS = {"settings_random_label": "random labels", "settings_warm_start": "warm start"}
MUON = {"settings_random_label": "random labels", "muon_fig3_60k": "language, loss"}
VIT = "ablation_targets_vit"
TARGETS = {
    "qk": "queries and keys (the paper's choice)",
    "mlp": "MLPs",
    "attention": "attention",
    "all": "all",
}
STATES = {
    "none": "before FIRE",
    "fire": "after FIRE as published",
    "fire_exact": "after the exact projection",
}


def told(results: Results, frame: pd.DataFrame) -> dict[str, Any]:
    """Return the numbers of the items of REPRODUCED.md; those of a question without runs are empty."""
    return {
        "settings": settings_told(frame),
        "muon": muon_told(frame),
        "theory": theory_told(),
        "where": where_told(results),
        "vit": vit_told(frame),
        "predictors": predictors_told(results),
    }


def pages(frame: pd.DataFrame) -> dict[str, str]:
    """Return {name: text} of the pages "settings" and "theory", as far as their results exist."""
    found, rows = {}, settings_rows(frame)
    if len(rows):
        found["settings"] = render("settings", settings=settings_table(rows, frame))
    layers, nets = _theory_frames()
    if len(layers):
        commits, machines = (sorted(set(layers[column].str[:20])) for column in ("commit", "hardware"))
        premise = theory.premise_table(nets, layers)
        values = {"commits": [name[:10] for name in commits], "machines": machines, "premise": premise}
        found["theory"] = render("theory", theorems=theory.table(layers), **values)
    return found


def settings_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the headline comparisons of the runs in SETTINGS with FIRE as published."""
    rows = frame[frame["headline"] & frame["experiment"].isin(SETTINGS) & (frame["reference"] == "fire")]
    rows = rows[~rows["method"].isin(["muon", "fire_muon"])]
    return estimates.sides(rows)


def settings_table(rows: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per experiment and setting: DfI, residual and seconds of the boundary, and accuracy at the end."""
    table = []
    for experiment, name in SETTINGS.items():
        part = frame[(frame["experiment"] == experiment) & ~frame["method"].isin(["muon", "fire_muon"])]
        ends = estimates.means(part[part["headline"]]).set_index("label")
        measured = estimates.means(part[part["kind"] == "boundary"])
        measured = measured.pivot_table(index="label", columns="metric", values="mean")
        gaps = rows[rows["experiment"] == experiment].set_index("label")
        for label in plot.ordered(ends.index):
            cells = measured.loc[label] if label in measured.index else pd.Series(dtype=float)
            row = {"experiment": name, "setting": plot.look(label).name}
            for column, title in (("dfi_after", "DfI"), ("dfi_factor", "residual"), ("seconds", "seconds")):
                row[title] = short(float(cells.get(column, float("nan"))))
            row |= {"end accuracy [95 %]": mean_text(ends.loc[label])}
            table.append(row | compared(gaps, label, "minus FIRE [95 %]") | {"seeds": ends.loc[label, "n"]})
    return pd.DataFrame(table)


def settings_told(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the settings that end better and worse than FIRE as published, for each experiment of SETTINGS."""
    rows = settings_rows(frame)
    if rows.empty:
        return []
    rows = rows[(rows["method"] != "none") & (rows["difference"] != 0)]
    found = []
    for experiment, name in SETTINGS.items():
        part = rows[rows["experiment"] == experiment]
        changed = part["label"].str.removeprefix("fire-").str.replace(r"-(?=\w+=)", " ", regex=True)
        words = part.assign(changed=changed).groupby("word")
        row = {"name": name, "count": len(part)}
        found.append(row | {word: rows.to_dict("records") for word, rows in words})
    return [{"better": [], "worse": []} | row for row in found if row["count"]]


def muon_told(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return how FIRE with Muon compares with Muon alone and with FIRE alone."""
    rows = frame[frame["headline"] & frame["experiment"].isin(MUON) & (frame["label"] == "fire_muon")]
    rows = estimates.sides(rows[rows["reference"].isin(["muon", "fire"])])
    found = []
    for experiment, name in MUON.items():
        part = rows[rows["experiment"] == experiment].set_index("reference")
        if len(part) == 2:
            pair = [(title, part.loc[key]) for key, title in (("muon", "Muon"), ("fire", "FIRE"))]
            found.append({"experiment": experiment, "name": name, "rows": pair})
    return found


def _theory_frames() -> tuple[pd.DataFrame, pd.DataFrame]:
    paths = [RESULTS / "theory.csv", RESULTS / "theory_premise.csv"]
    return tuple(pd.read_csv(path) if path.exists() else pd.DataFrame() for path in paths)  # type: ignore[return-value]


def theory_told() -> dict[str, Any]:
    """Return how often the premise and the bounds of the theorems hold."""
    layers, nets = _theory_frames()
    if layers.empty:
        return {}
    number = layers["theorem"].astype(str)
    moved = layers[(number == "1") & (layers["method"] != "none")]
    bounds = layers[layers["bound"].notna() & ~((number == "1") & (layers["method"] == "none"))]
    hessian, mlp = layers[number == "2"], layers[number == "3"]
    shares = []
    for method, name in STATES.items():
        part, other = mlp[mlp["method"] == method], nets[nets["method"] == method]
        share = {"name": name, "total": len(part) + int(other["matrices"].sum())}
        share |= {"below": int((part["dfi"] < 1).sum() + other["below_1"].sum())}
        shares.append(share | {"scaled": int((part["dfi_scaled"] < 1).sum() + other["below_1_scaled"].sum())})
    return {
        "shares": shares,
        "bounds": len(bounds),
        "held": (bounds["holds"].astype(str) == "True").sum(),
        "empty": (moved["bound"] >= 2).sum(),
        "moved": len(moved),
        "curvature": (hessian["bound"] / hessian["measured"]).median(),
    }


def where_told(results: Results) -> list[dict[str, Any]]:
    """Return the layer of each network that gains most, and that which gains least, from FIRE."""
    found = []
    names = [name for name in results.runs["experiment"].unique() if name.startswith(sensitivity.PREFIXES)]
    for part in settings(results.select(experiment=names)):
        rows = sensitivity.differences(part)
        rows = rows.assign(layer_name=rows["label"].str.removeprefix(sensitivity.PREFIX))
        whole, rows = rows[rows["block"] == "all"], rows[rows["block"] != "all"]
        if len(rows):
            better = rows["difference"] * rows["higher_is_better"].map({True: 1, False: -1})
            best, worst = (rows.loc[place].to_dict() for place in (better.idxmax(), better.idxmin()))
            row = {"title": plot.title(part).splitlines()[0], "size": part.first["size"]}
            row |= {"seeds": best["pairs"], "best": best, "worst": worst, "count": len(rows)}
            found.append(row | {"decided": (rows["word"] != "").sum(), "whole": whole.to_dict("records")})
    return found


def predictors_told(results: Results) -> dict[str, Any]:
    """Return what was measured before the boundary and how well it predicts the gain of FIRE, with the best measure."""
    names = [name for name in results.runs["experiment"].unique() if name.startswith(predictors.PREFIXES)]
    parts = settings(at_most(results.select(experiment=names), "medium"))
    found = predictors.errors(predictors.panels(parts))
    if found.empty:
        return {}
    best = found.loc[found["ratio"].idxmin()].to_dict()
    shown = found.drop(columns="measure").rename(
        columns={"title": "measured", "correlation": "rank correlation", "error_of_mean": "error of the mean"}
    )
    return {"table": shown.map(short), "best": best}


def vit_told(frame: pd.DataFrame) -> dict[str, Any]:
    """Return FIRE on single kinds of matrices of a ViT, each against no treatment."""
    rows = frame[frame["headline"] & (frame["experiment"] == VIT) & (frame["reference"] == "none")]
    if rows.empty:
        return {}
    rows = estimates.sides(at_largest_size(rows))
    kinds = rows["label"].str.removeprefix(sensitivity.PREFIX)
    rows = rows.assign(name=kinds.map(TARGETS).fillna(rows["label"]))
    first = rows.iloc[0]
    about = {"data": plot.data_name(first["data"]), "size": first["size"], "seeds": first["pairs"]}
    return about | {"experiment": VIT, "rows": rows.to_dict("records")}
