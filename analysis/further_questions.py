"""Questions about FIRE beyond the paper's experiments: its settings, Muon, the theorems, single layers, what predicts its
gain, and boundaries other than the paper's. Each function returns numbers for an item of REPRODUCED.md, whose sentences
stand in templates/; those of a question without runs are empty."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis import estimates, plot, predictors, scaling, sensitivity, theory
from analysis.rendering import render, short, spread
from analysis.runs import Results, at_largest_size, at_most, settings

SETTINGS = {"settings_random_label": "random labels", "settings_warm_start": "warm start"}
MUON = {"settings_random_label": "random labels", "muon_fig3_60k": "language, loss"}
VITS = {"ablation_targets_vit": "warm start", "fig2c_cifar100_vit_tiny": "class-incremental"}
TARGETS = {
    "qk": "queries and keys (the paper's choice)",
    "fire": "queries and keys (the paper's choice)",
    "mlp": "MLPs",
    "attention": "attention",
    "attention,head": "attention and head",
    "no_head": "all but the last layer",
    "all": "all",
}
STATES = {
    "none": "before FIRE",
    "fire": "after FIRE as published",
    "fire_exact": "after the exact projection",
}
REPLAY = "replay_class_incremental"
LANGUAGE = {
    "language_domain": "new domain alone",
    "language_context": "windows of 512 after 128 tokens",
    "language_questions": "answers to questions",
}
DECODERS, ACTIVATIONS = "language_variants", {"squared_relu": "squared ReLU", "swiglu": "SwiGLU"}


def told(results: Results, frame: pd.DataFrame) -> dict[str, Any]:
    """Return the numbers of all items."""
    return {
        "settings": settings_told(frame),
        "muon": muon_told(frame),
        "theory": theory_told(),
        "where": where_told(results),
        "vit": vit_told(frame),
        "predictors": predictors_told(results),
        "scaling": scaling_told(results),
        "old_data": old_data_told(frame),
        "second_phases": second_phases_told(frame),
        "decoders": decoders_told(frame),
    }


def theory_page() -> dict[str, str]:
    """Return {"theory": text} of its page; empty if it was not measured."""
    layers, nets = theory.measured()
    if layers.empty:
        return {}
    commits, machines = (sorted(set(layers[column].str[:20])) for column in ("commit", "hardware"))
    values = {"commits": [name[:10] for name in commits], "machines": machines}
    values |= {"theorems": theory.table(layers), "premise": theory.premise_table(layers, nets)}
    return {"theory": render("theory", **values)}


def settings_told(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the settings that end better and worse than FIRE as published, for each experiment of SETTINGS."""
    rows = frame[frame["headline"] & (frame["reference"] == "fire") & (frame["difference"] != 0)]
    rows = estimates.sides(rows[~rows["method"].isin(["none", "muon", "fire_muon"])])
    changed = rows["label"].str.removeprefix("fire-").str.replace(r"-(?=\w+=)", " ", regex=True)
    rows, found = rows.assign(changed=changed), []
    for experiment, name in SETTINGS.items():
        part = rows[rows["experiment"] == experiment]
        sides = {word: part[part["word"] == word].to_dict("records") for word in ("better", "worse")}
        found += [{"experiment": experiment, "name": name, "count": len(part)} | sides] * (len(part) > 0)
    return found


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


def theory_told() -> dict[str, Any]:
    """Return how often the premise and the bounds of the theorems hold."""
    layers, nets = theory.measured()
    if layers.empty:
        return {}
    number = layers["theorem"].astype(str)
    moved = layers[(number == "1") & (layers["method"] != "none")]
    bounds = layers[layers["bound"].notna() & ~((number == "1") & (layers["method"] == "none"))]
    hessian = layers[number == "2"]
    counted = theory.premise_counts(layers, nets).groupby("method").sum(numeric_only=True)
    return {
        "shares": [{"name": name} | counted.loc[method].to_dict() for method, name in STATES.items()],
        "bounds": len(bounds),
        "held": (bounds["holds"].astype(str) == "True").sum(),
        "empty": (moved["bound"] >= 2).sum(),
        "moved": len(moved),
        "curvature": (hessian["bound"] / hessian["measured"]).median(),
    }


def where_told(results: Results) -> list[dict[str, Any]]:
    """Return the layer of each network that gains most, and that which gains least, from FIRE."""
    found = []
    for part in settings(results.starting(sensitivity.PREFIXES)):
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
    parts = settings(at_most(results.starting(predictors.PREFIXES), "medium"))
    found = predictors.errors(predictors.panels(parts))
    if found.empty:
        return {}
    best = found.loc[found["ratio"].idxmin()].to_dict()
    shown = found.drop(columns="measure").rename(
        columns={"title": "measured", "correlation": "rank correlation", "error_of_mean": "error of the mean"}
        | {"lowest": "lowest ratio", "highest": "highest ratio"}
    )
    return {"table": shown.map(short), "best": best}


def scaling_told(results: Results) -> dict[str, Any]:
    """Return the differences of the scaling study as a table, and where FIRE ends ahead of a full reset and where behind."""
    found = scaling.differences(settings(at_most(results.starting(scaling.PREFIXES), "medium")))
    if found.empty:
        return {}
    found["pair"] = [
        f"{plot.look(a).name} minus {plot.look(b).name}" for a, b in zip(found["better"], found["worse"])
    ]
    numbers = zip(found["mean"], found["low"], found["high"], found["seeds"])
    found["text"] = [f"{spread(*row, sign=True)} ({seeds})" for *row, seeds in numbers]
    table = found.pivot(index=["study", "images"], columns="pair", values="text").reset_index()
    fire = found[(found["better"] == "fire") & (found["worse"] == "full_reset")]
    where = fire["images"].map("{:,}".format) + " images (" + fire["study"] + ")"
    ahead, behind = where[fire["low"] > 0].tolist(), where[fire["high"] < 0].tolist()
    table["images"] = table["images"].map("{:,}".format)
    return {"table": table.fillna("-"), "ahead": ahead, "behind": behind, "count": fire["low"].notna().sum()}


def vit_told(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return FIRE on single kinds of matrices of a ViT, each against no treatment, in the experiments of VITS."""
    rows = frame[frame["headline"] & (frame["reference"] == "none")]
    resets = rows[rows["label"] == "full_reset"]
    rows = rows[rows["label"].str.startswith(sensitivity.PREFIX) | (rows["label"] == "fire")]
    names = rows["label"].str.removeprefix(sensitivity.PREFIX)
    rows, found = rows.assign(name=names.map(TARGETS).fillna(rows["label"])), []
    for experiment, title in VITS.items():
        part = rows[rows["experiment"] == experiment]
        if (part["label"] != "fire").any():
            part = estimates.sides(at_largest_size(part))
            about = part.iloc[0][["data", "size"]].to_dict() | {"experiment": experiment, "title": title}
            about |= {"data": plot.data_name(about["data"]), "gaining": int((part["word"] == "better").sum())}
            reset = at_largest_size(resets[resets["experiment"] == experiment]).to_dict("records")
            found.append(about | {"reset": reset[0] if reset else None, "rows": part.to_dict("records")})
    return found


# ------------------------------------------------------------------------------------------------ other boundaries
def against_none(frame: pd.DataFrame, experiment: str) -> pd.DataFrame:
    """Return the headline comparisons of an experiment with `none`, methods in the order of every table."""
    rows = frame[frame["headline"] & (frame["experiment"] == experiment) & (frame["reference"] == "none")]
    order = plot.ordered(rows["method"])
    return estimates.sides(rows).sort_values(
        "method", key=lambda names: names.map(order.index), kind="stable"
    )


def old_data_told(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the comparisons for each share of old images, and whether a full reset is nowhere better than `none`."""
    rows = against_none(frame, REPLAY)
    rows = rows.assign(share=rows["label"].str.extract(r"replay=([\d.]+)")[0].astype(float))
    resets = rows[rows["method"] == "full_reset"]
    shares = [
        {"share": f"{share:.0%}", "rows": part.to_dict("records")} for share, part in rows.groupby("share")
    ]
    no_loss = len(resets) > 0 and not (resets["word"] == "better").any()
    return {"shares": shares, "no_loss": no_loss, "experiment": REPLAY} if shares else {}


def second_phases_told(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the comparisons with `none` of each second phase."""
    parts = {experiment: against_none(frame, experiment) for experiment in LANGUAGE}
    return [
        {"experiment": experiment, "name": LANGUAGE[experiment], "rows": rows.to_dict("records")}
        for experiment, rows in parts.items()
        if len(rows)
    ]


def decoders_told(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the dormant shares of decoders with two activations."""
    rows = frame[(frame["experiment"] == DECODERS) & (frame["metric"] == "dormant_share")]
    rows = estimates.means(rows)
    rows = rows.set_index(rows["label"].astype(str).str.extract("activation=(.*)")[0])
    named = [(name, rows.loc[net]) for net, name in ACTIVATIONS.items() if net in rows.index]
    one_seed = rows["n"].max() == 1
    return {"rows": named, "one_seed": one_seed, "experiment": DECODERS} if len(named) == 2 else {}
