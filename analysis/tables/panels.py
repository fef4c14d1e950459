"""Tables of the estimates in one setting, or in a few of them: ends, boundaries, differences from `none`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from analysis import estimates, measures, names, paper
from analysis.figures import studies
from analysis.measures import digits
from analysis.rendering import column, difference_text, markdown, mean_text, number, short, spread
from analysis.runs import SIZES, at_most, settings
from analysis.stats import estimate
from analysis.tables.material import Material

OVERVIEW = {  # experiments in README.md's table, each with the size that is shown
    "fig2a_cifar10_resnet18": "medium",
    "fig2a_tiny_imagenet_vgg16": "medium",
    "fig3_60k": "medium",
    "fig4b_walk": "medium",
    "random_label": "small",
}
EXPLORATORY = {  # of which no seeds were planned, or which are not judged
    "Asterix": ("fig4a_asterix", "medium"),
    "Asterix, slower recipe": ("fig4a_asterix_early", "medium"),
    "BeamRider": ("fig4a_beam_rider", "medium"),
    "Breakout": ("fig4a_breakout", "small"),
    "H1 walk": ("fig4b_walk", "medium"),
    "H1 balance": ("fig4b_balance_simple", "medium"),
    "H1 run": ("fig4b_run", "medium"),
    "random labels": ("random_label", "small"),
    "random, then true labels": ("label_noise", "small"),
    "ResNet-18, own pictures": ("pictures_resnet18", "small"),
}


def ends(part: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return one row per method of one setting and measure, over all seeds: mean and difference from `none` with their
    intervals and, at size paper, the paper's end value."""
    rows = estimates.minus(part[part["metric"] == measure], "none")
    about, decimals = rows.iloc[0], digits(measure, rows["mean"])
    table = {"method": rows["name"], "all seeds: mean [95 %]": column(mean_text, rows, decimals)}
    table |= {"seeds": rows["n"], "all seeds: minus none [95 %]": column(difference_text, rows, decimals)}
    shown = about["headline"] and about["size"] == "paper"
    if theirs := paper.end_values(about["experiment"]) if shown else {}:
        table["paper"] = [number(theirs.get(label), decimals) for label in rows["label"]]
    return pd.DataFrame(table)


def sections(rows: pd.DataFrame) -> str:
    """Return the tables of one setting with headings, one per measure."""
    rows, text = rows[rows["kind"] == "result"], ""
    for metric, title in rows.drop_duplicates("metric").set_index("metric")["measure"].items():
        text += f"\n### {title[0].upper()}{title[1:]}\n\n{markdown(ends(rows, metric))}\n"
    return text


def at_boundary(part: pd.DataFrame) -> pd.DataFrame:
    """Return the means of all measures at the last boundary, one row per method."""
    rows = estimates.means(part[part["kind"] == "boundary"])
    changed = rows.loc[(rows["metric"] == "matrices") & (rows["mean"] > 0), "mean"]
    if changed.nunique() < 2:  # all change the same ones
        rows = rows[~rows["metric"].str.startswith("common_")]
    if rows.empty:
        return pd.DataFrame()
    wide = rows.pivot_table(index="name", columns="measure", values="mean", sort=False)
    wide = wide.loc[part["name"].drop_duplicates()[lambda kept: kept.isin(wide.index)]]
    return wide[rows["measure"].unique()].map(short).rename_axis("method").reset_index()


def overview(material: Material) -> pd.DataFrame:
    """Return the ends of `none`, a full reset and FIRE in the settings of OVERVIEW, FIRE's difference from `none` over all
    seeds, and the verdict on it, for README.md."""
    table = []
    for part in settings(material.results):
        rows = estimates.of(material.frame, part).query("headline")
        if rows.empty or OVERVIEW.get(part.first["experiment"]) != part.first["size"]:
            continue
        means, about = estimates.means(rows).set_index("label")["mean"], rows.iloc[0]
        decimals = min(3, digits(about["metric"]))
        row = {"experiment": names.title(part).splitlines()[0], "measure": about["measure"].split(",")[0]}
        for label in ("none", "full_reset", "fire"):
            row[names.look(label).name] = number(means.get(label), decimals)
        for gap in rows[(rows["label"] == "fire") & (rows["reference"] == "none")].to_dict("records"):
            row |= {"FIRE minus none [95 %]": difference_text(gap, decimals), "seeds": gap["pairs"]}
        verdicts = estimates.of(material.verdicts, part)
        said = verdicts.query("better == 'fire' and worse == 'none'")["verdict"]
        table.append(row | {"FIRE > none": said.iloc[0] if len(said) else "-"})
    return pd.DataFrame(table)


def against_none(
    frame: pd.DataFrame, rows: Mapping[str, tuple[str, str]], methods: Sequence[str]
) -> pd.DataFrame:
    """Return the headline differences from `none`, all seeds: one row per title with its experiment and size, one column
    per method."""
    gaps = frame[frame["headline"] & (frame["reference"] == "none")]
    cells = dict(zip(zip(gaps["experiment"], gaps["size"], gaps["label"]), column(difference_text, gaps)))
    return pd.DataFrame(
        {"panel": title} | {names.look(method).name: cells.get((*setting, method), "-") for method in methods}
        for title, setting in rows.items()
    )


def gains(material: Material) -> pd.DataFrame:
    """Return the gains over `none` of FIRE and of its parts, over all seeds."""
    rows = {names.panel(name): (name, "medium") for name in studies.GAINS}
    return against_none(estimates.gains(material.frame), rows, studies.PARTS)


def exploratory(material: Material) -> pd.DataFrame:
    """Return differences from `none` that no seeds were planned for or that are not judged, over all seeds."""
    methods = ("fire", "rescale", "shrink_perturb", "full_reset", "plasticity_injection")
    return against_none(material.frame, EXPLORATORY, methods)


def costs(material: Material) -> pd.DataFrame:
    """Return the measure right before the last boundary, right after it and at the end, over all seeds."""
    table, renewed = [], studies.renewed()
    for part in settings(at_most(material.results.select(experiment=studies.COSTS), "medium")):
        _, new = renewed.get(part.first["experiment"], ({}, {}))
        panel = names.panel(part.first["experiment"])
        decimals = digits(measures.AT_BOUNDARY[part.first["figure"][:4]][0].metric)
        for label, row in studies.costs(part).iterrows():
            texts = {moment: spread(*found[:3], decimals) for moment, found in row.items()}
            again = estimate(new.get(str(label), {}))
            texts["new statistics (seeds)"] = f"{spread(*again[:3])} ({again.n})" if again.n else "-"
            texts["end"] = texts.pop("end")
            table.append({"panel": panel, "method": names.look(label).name} | texts | {"seeds": row["end"].n})
    return pd.DataFrame(table)


def batch_norm(_: Material) -> pd.DataFrame:
    """Return the test accuracy right after the first boundary, with the old and with new statistics of batch norm."""
    table = []
    for experiment, (old, new) in studies.renewed().items():
        for method in names.ordered(old):
            told = {age: estimate(values[method]) for age, values in (("old", old), ("new", new))}
            row = {"panel": names.panel(experiment), "method": names.look(method).name}
            row |= {f"{age} statistics": spread(*each[:3]) for age, each in told.items()}
            table.append(row | {"seeds": told["new"].n})
    return pd.DataFrame(table)


def triggers(material: Material) -> pd.DataFrame:
    """Return FIRE under each trigger and the methods at boundaries, in the headline measure: how often they acted in a run
    and their differences from FIRE at the boundaries."""
    (part,) = settings(material.results.select(experiment="trigger_random_label"))
    rows = estimates.minus(estimates.of(material.frame, part).query("headline"), "fire")
    acted = part.boundaries[part.boundaries["matrices"] > 0].groupby("label").size()
    acts = rows["label"].map(acted).fillna(0) / rows["label"].map(part.finished.groupby("label").size())
    table = {"method": rows["name"], "acts": acts.map(short), "mean [95 %]": column(mean_text, rows)}
    return pd.DataFrame(table | {"minus FIRE [95 %]": column(difference_text, rows), "seeds": rows["n"]})


def random_labels(material: Material) -> pd.DataFrame:
    """Return every method at its own settings on random labels, best first, and its difference from FIRE."""
    rows = material.gaps("fire", "random_label")
    rows = rows[rows["label"] == rows["method"]].sort_values("difference", ascending=False)
    texts = column(difference_text, rows)
    return pd.DataFrame({"method": rows["name"], "minus FIRE [95 %]": texts, "seeds": rows["pairs"]})


def status(material: Material) -> pd.DataFrame:
    """Return the methods, seeds and data that are finished: one row per panel of the paper, one column per size."""
    rows = {panel: dict.fromkeys(SIZES[:-1], "not run") for panel in paper.panels()}
    for (experiment, size), runs in material.results.finished.groupby(["experiment", "size"]):
        if experiment in rows:
            own = runs[runs["label"] == runs["method"]]
            seeds = (own if len(own) else runs).groupby("label")["seed"].nunique()
            most = f"{seeds.max()}" if seeds.nunique() == 1 else f"{seeds.min()}-{seeds.max()}"
            text = f"{len(seeds)} methods x {most} seeds, {names.data(runs['data'].iloc[0])}"
            rows[experiment][size] = text
    return pd.DataFrame({"panel": names.panel(panel)} | row for panel, row in rows.items())
