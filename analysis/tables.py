"""Every table, made from the frames of estimates and verdicts. TABLES are those of the documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pandas as pd

from analysis import benchmark_tables, claims, estimates, measures, names, paper
from analysis.figures import fig5, forest, studies
from analysis.measures import digits
from analysis.rendering import column, difference_text, mean_text, number, p_text, short, spread
from analysis.runs import SIZES, Results, at_largest_size, at_most, settings
from analysis.stats import estimate

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


@dataclass(frozen=True)
class Material:
    """What the tables of the documents are made from."""

    results: Results

    @cached_property
    def frame(self) -> pd.DataFrame:
        return estimates.sides(estimates.frame(self.results))

    @cached_property
    def verdicts(self) -> pd.DataFrame:
        return claims.verdicts(self.results)

    @cached_property
    def both(self) -> dict[str, pd.DataFrame]:
        """The verdicts, and what the exploratory seeds alone would say by the same rule."""
        return {"exploratory": claims.verdicts(self.results, "exploring"), "confirmatory": self.verdicts}

    @property
    def planned(self) -> pd.DataFrame:
        """The verdicts that have planned seeds."""
        return self.verdicts[self.verdicts["planned"] > 0]

    def parts(self, *patterns: str) -> list[Results]:
        """Each of these experiments at its largest size up to medium."""
        return settings(at_most(self.results.matching(patterns), "medium"))

    def gaps(self, reference: str, *experiments: str) -> pd.DataFrame:
        """Return the headline comparisons with `reference`, each experiment at its largest size."""
        rows = self.frame[self.frame["headline"] & (self.frame["reference"] == reference)]
        return at_largest_size(rows[rows["experiment"].isin(experiments)])


def panel_of(experiment: str) -> str:
    """Return the name of a panel of the paper, given its experiment."""
    return names.panel(*experiment.split("_", 1))


# ------------------------------------------------------------------------------------------------ verdicts
def comparisons(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of `claims.verdicts` as text: the exploring estimate, that of the confirming seeds, and the verdict."""
    table = []
    for row in rows.to_dict("records"):
        decimals = row["decimals"]
        explored, ours = (
            spread(*(row[f"{seeds}{name}"] for name in ("gain", "low", "high")), decimals, sign=True)
            for seeds in ("exploring_", "")
        )
        # where no comparison was planned and none of seeds 1 to 5 ran, those from 6 on explore
        fresh = " from 6 on" if not row["planned"] and min(row["exploring_gains"], default=0) > 5 else ""
        told = {
            "panel": names.panel(row["figure"], row["panel"]),
            "size": row["size"],
            "comparison": claim_text(row),
            "paper's gain": number(paper_gain(row), decimals, sign=True),
            "exploratory: gain [95 %] (seeds)": f"{explored} ({row['exploring_seeds']}{fresh})",
            "confirmatory: gain [95 %]": ours,
            "done": f"{row['seeds']} of {row['planned']}" if row["planned"] else "not planned",
            "p, Holm": p_text(row["p_holm"]),
            "verdict": row["verdict"] + (f" ({row['note']})" if row["note"] else ""),
        }
        table.append(told)
    return pd.DataFrame(table)


def paper_gain(row: Mapping[str, Any]) -> float:
    """Return the paper's gain in a comparison."""
    return paper.gain(row["figure"], row["panel"], row["better"], row["worse"])


def claim_text(claim: Mapping[str, Any]) -> str:
    """Return for example `FIRE > full reset`."""
    return f"{names.look(claim['better']).name} > {names.look(claim['worse']).name}"


def planned(material: Material, kind: str) -> pd.DataFrame:
    """Return the comparisons of one kind that have planned seeds."""
    rows = material.planned
    return comparisons(rows[rows["kind"] == kind]).drop(columns="size")


def premises(parts: Sequence[Results]) -> pd.DataFrame:
    """Return what the rule asks in each panel of Figures 2 and 4: full reset minus none, or the return before the reset
    divided by that of random actions, on seeds 1 to 5 and on all seeds before the second round."""
    table, said = [], {True: "met", False: "not met", None: "-"}
    for part in parts:
        figure, panel = part.first[["figure", "panel"]]
        first, last = claims.premise(part, rounds=1), claims.premise(part)
        second = first.measured and last.measured.n > first.measured.n
        everything = last if second else claims.premise(part, "all")
        if first.measured is None or (figure, panel) not in paper.cells():
            continue
        row = {"panel": names.panel(figure, panel), "size": part.first["size"], "round": 2 if second else 1}
        for seeds, found in (("seeds 1 to 5", first), ("all seeds before round 2", everything)):
            level = figure.startswith("fig2")
            row[seeds] = f"{spread(*found.measured[:3], 4 if level else 2, sign=level)} ({found.measured.n})"
            row[f"{seeds}: premise"] = said[found.holds]
        table.append(row)
    return pd.DataFrame(table)


def counts(material: Material) -> pd.DataFrame:
    """Return the counts of verdicts on the paper's comparisons."""
    titles = {"all": "comparisons whose premise is met", "not planned": "no seeds planned"}
    titles["suite_wide"] = "hold, suite-wide correction"
    shown = {seeds: claims.largest(claims.of_paper(table)) for seeds, table in material.both.items()}
    rows = [{"seeds": seeds} | claims.counts(table) for seeds, table in shown.items()]
    return pd.DataFrame(rows).rename(columns=titles)


def pooled(material: Material) -> pd.DataFrame:
    """Return the pooled estimates, with the number of the paper's panels in which its FIRE ends ahead."""
    table = []
    for seeds, verdicts in material.both.items():
        for row in claims.pooled(verdicts).to_dict("records"):
            theirs = [paper.gain(*cell, "fire", row["rival"]) for cell in paper.cells()]
            known = [gap for gap in theirs if gap == gap]
            told = {
                "FIRE against": names.look(row["rival"]).name,
                "seeds": seeds,
                "panels": row["panels"],
                "FIRE ahead": row["ahead"],
                "standardised gain [95 %]": spread(row["mean"], row["low"], row["high"], 2, sign=True),
                "I²": "-" if pd.isna(row["i2"]) else f"{row['i2']:.0%}",
                "p, Holm": p_text(row["p_holm"]),
                "in the paper, all panels": f"{sum(gap > 0 for gap in known)} of {len(known)}",
            }
            table.append(told)
    return pd.DataFrame(table)


def example(material: Material) -> pd.DataFrame:
    """Return the tests of the paper's claims about one panel, step by step, by p."""
    rows = material.planned.query("experiment == 'fig2a_cifar10_resnet18' and kind == 'claims'").sort_values(
        "p"
    )
    error = rows["gains"].map(lambda gains: pd.Series(gains).sem())
    columns = {
        "comparison": [claim_text(row) for row in rows.to_dict("records")],
        "mean difference": rows["gain"].map("{:+.4f}".format),
        "standard error": error.map("{:.4f}".format),
        "t": (rows["gain"] / error).map("{:+.2f}".format),
        "p": rows["p"].map("{:.2g}".format),
        "times": range(len(rows), 0, -1),
        "p, Holm": rows["p_holm"].map("{:.2g}".format),
        "verdict": rows["verdict"],
    }
    return pd.DataFrame(columns)


def verdict_grid(material: Material, rivals: Sequence[str]) -> pd.DataFrame:
    """Return one row per panel of the paper and one column per rival: where FIRE ends, by the verdict of the panel."""
    rows, panels = claims.of_fire(material.planned), ["_".join(cell) for cell in paper.cells()]
    rows = rows.assign(side=[side(row) for row in rows.to_dict("records")])
    grid = rows.pivot(index="experiment", columns="worse", values="side").reindex(panels, columns=rivals)
    grid = grid.dropna(how="all").fillna("-").rename(index=panel_of).rename_axis("panel")
    return grid.rename(columns=lambda rival: f"against {forest.short(rival)}").reset_index()


def side(row: Mapping[str, Any]) -> str:
    """Return where FIRE ends by the verdict: beats, loses to, or what else the verdict says."""
    if row["verdict"] not in claims.DECIDED:
        return row["verdict"]
    ahead = (row["gain"] > 0) == (row["better"] == "fire")
    return "beats" if ahead else "loses to"


def contradictions(material: Material) -> pd.DataFrame:
    """Return the decided comparisons whose order is not the paper's, and the order of curvature in Figure 5b."""
    table = []
    for row in material.planned.to_dict("records"):
        theirs = paper_gain(row)
        if row["verdict"] in claims.DECIDED and theirs * row["gain"] < 0:
            ours = spread(row["gain"], row["low"], row["high"], row["decimals"], sign=True)
            told = {"panel": panel_of(row["experiment"]), "comparison": claim_text(row)}
            table.append(told | {"paper": number(theirs, row["decimals"], sign=True), "ours [95 %]": ours})
    theirs = paper.panel_of("fig5b", "hessian_lambda_max").set_index("method")["y"]
    for row in fig5.hessians(at_largest_size(material.frame)).to_dict("records"):
        told = {"panel": f"5b, {panel_of(row['experiment'])}"}
        told["comparison"] = "largest Hessian eigenvalue: FIRE, S&P"
        told["paper"] = f"{theirs['fire']:.1f}, {theirs['shrink_perturb']:.1f} (network not named)"
        ours = f"{row['fire']:.0f}, {row['shrink_perturb']:.0f} ({row['n']} seeds)"
        table.append(told | {"ours [95 %]": ours})
    return pd.DataFrame(table)


# ------------------------------------------------------------------------------------------------ one setting
def ends(part: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return one row per method of one setting and measure, over all seeds: mean and difference from `none` with their
    intervals and, at size paper, the paper's end value."""
    rows = estimates.minus(part[part["metric"] == measure], "none")
    about, decimals = rows.iloc[0], digits(measure, rows["mean"])
    table = {"method": rows["name"], "all seeds: mean [95 %]": column(mean_text, rows, decimals)}
    table |= {"seeds": rows["n"], "all seeds: minus none [95 %]": column(difference_text, rows, decimals)}
    shown = about["headline"] and about["size"] == "paper"
    if theirs := paper.end_values(about["figure"], about["panel"]) if shown else {}:
        table["paper"] = [number(theirs.get(label), decimals) for label in rows["label"]]
    return pd.DataFrame(table)


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


def ablations(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per label with overrides, in the headline measure, with the difference from the same method
    without overrides where that was run."""
    rows = estimates.minus(frame[frame["headline"] & (frame["changed"] != "")], "unchanged")
    table = {"method": [names.look(method).name for method in rows["method"]], "changed": rows["changed"]}
    table |= {"mean [95 %]": column(mean_text, rows), "minus unchanged [95 %]": column(difference_text, rows)}
    return rows[["experiment", "size"]].assign(**table, seeds=rows["n"])


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


# ------------------------------------------------------------------------------------------------ several settings
def status(results: Results) -> pd.DataFrame:
    """Return the methods, seeds and data that are finished: one row per panel of the paper, one column per size."""
    rows = {cell: dict.fromkeys(SIZES[:-1], "not run") for cell in paper.cells()}
    for (figure, panel, size), runs in results.finished.groupby(["figure", "panel", "size"]):
        if (figure, panel) in rows:
            own = runs[runs["label"] == runs["method"]]
            seeds = (own if len(own) else runs).groupby("label")["seed"].nunique()
            most = f"{seeds.max()}" if seeds.nunique() == 1 else f"{seeds.min()}-{seeds.max()}"
            text = f"{len(seeds)} methods x {most} seeds, {names.data(runs['data'].iloc[0])}"
            rows[figure, panel][size] = text
    return pd.DataFrame({"panel": names.panel(*cell)} | row for cell, row in rows.items())


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
    rows = {panel_of(name): (name, "medium") for name in studies.GAINS}
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
        panel = panel_of(part.first["experiment"])
        decimals = digits(measures.AT_BOUNDARY[part.first["figure"][:4]][0].metric)
        for label, row in studies.costs(part).iterrows():
            texts = {moment: spread(*found[:3], decimals) for moment, found in row.items()}
            again = estimate(new.get(str(label), {}))
            texts["new statistics (seeds)"] = f"{spread(*again[:3])} ({again.n})" if again.n else "-"
            texts["end"] = texts.pop("end")
            table.append({"panel": panel, "method": names.look(label).name} | texts | {"seeds": row["end"].n})
    return pd.DataFrame(table)


def batch_norm(material: Material) -> pd.DataFrame:
    """Return the test accuracy right after the first boundary, with the old and with new statistics of batch norm."""
    table = []
    for experiment, (old, new) in studies.renewed().items():
        for method in names.ordered(old):
            told = {age: estimate(values[method]) for age, values in (("old", old), ("new", new))}
            row = {"panel": panel_of(experiment), "method": names.look(method).name}
            row |= {f"{age} statistics": spread(*each[:3]) for age, each in told.items()}
            table.append(row | {"seeds": told["new"].n})
    return pd.DataFrame(table)


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


def moved(material: Material) -> pd.DataFrame:
    """Return how far FIRE moves the queries and keys of ViT-Tiny: its squared distance over that of a reset of the same
    matrices, at the first and at the last boundary, means over the seeds."""
    rows = at_largest_size(material.results.boundaries)
    rows = rows[rows["experiment"].str.fullmatch(r"fig2[abc]_\w+_vit_tiny") & rows["label"].eq("fire")]
    shares = rows.groupby(["experiment", "phase"])["sfe_share"].mean().groupby(level=0).agg(["first", "last"])
    theirs = paper.panel_of("fig5b", "normalized_sfe").set_index("method")["y"]["fire"]
    shares = shares.assign(paper=theirs).map("{:.2f}".format).rename(index=panel_of).rename_axis("panel")
    heads = {"first": "first boundary", "last": "last boundary", "paper": "paper (network not named)"}
    return shares.rename(columns=heads).reset_index()


TABLES: dict[str, Callable[[Material], pd.DataFrame]] = {
    "counts": counts,
    "pooled": pooled,
    "claims": partial(planned, kind="claims"),
    "controls": lambda material: planned(material, "controls").drop(columns="paper's gain"),
    "rivals": partial(planned, kind="rivals"),
    "premises": lambda material: premises(material.parts("fig2*", "fig4*")),
    "example": example,
    "verdicts": partial(verdict_grid, rivals=claims.GROUPS),
    "instead": partial(verdict_grid, rivals=forest.RIVALS),
    "exploratory": exploratory,
    "random_labels": random_labels,
    "contradictions": contradictions,
    "gains": gains,
    "costs": costs,
    "batch_norm": batch_norm,
    "status": lambda material: status(material.results),
    "overview": overview,
    "scaling": lambda material: studies.scaling_table(material.parts("scaling_warm_start*")),
    "studies": single_questions,
    "triggers": triggers,
    "boundaries": other_boundaries,
    "moved": moved,
    "theorems": lambda material: benchmark_tables.theorems(),
    "dfi": lambda material: benchmark_tables.premise(),
    "convergence": lambda material: benchmark_tables.convergence(),
    "table1": lambda material: benchmark_tables.table1(),
}
