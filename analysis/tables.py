"""The tables of the documents, which `python -m analysis tables --write` fills in.

People write the documents. Between `<!-- table NAME -->` and `<!-- end -->` stands the table of that name, and between
`<!-- figure NAME -->` and `<!-- end -->` the caption of that figure.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import claims, estimates, measures, names, paper, rendering, trial_evidence
from analysis.figures import CAPTIONS, dial, fig5, forest, studies, timing
from analysis.measures import digits
from analysis.rendering import column, difference_text, gain_text, markdown, number, short, spread
from analysis.runs import RESULTS, SIZES, Results, at_largest_size, at_most, load_exported, settings
from analysis.stats import estimate
from fire_core.files import write_atomic

ROOT, DIAL, CONTROLS = RESULTS.parents[1], RESULTS / "dial", RESULTS / "controls"
PAGES = ("findings", "studies", "concepts/statistics", "how-to/batch_norm", "how-to/try_before_you_treat")
DOCUMENTS = ["README.md", "REPRODUCED.md", *(f"docs/{page}.md" for page in PAGES)]
GAINS = {names.panel(name): (name, "medium") for name in studies.GAINS}
EXPLORED = ("fire", "rescale", "shrink_perturb", "full_reset", "plasticity_injection")
# experiments in README.md's table, each with the size that is shown
OVERVIEW = dict.fromkeys([*studies.GAINS[:2], "fig3_60k", "fig4a_asterix", "fig4b_walk"], "medium")
OVERVIEW |= {"random_label": "small"}


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

    @cached_property
    def evidence(self) -> dict[str, pd.DataFrame]:
        """What the finished runs say about trials."""
        return trial_evidence.tables(trial_evidence.panels(self.parts(*trial_evidence.PATTERNS)))

    @property
    def planned(self) -> pd.DataFrame:
        return self.verdicts[self.verdicts["planned"] > 0]

    def parts(self, *patterns: str) -> list[Results]:
        """Each of these experiments at its largest size up to medium."""
        return settings(at_most(self.results.matching(patterns), "medium"))

    def gaps(self, reference: str, *experiments: str) -> pd.DataFrame:
        """The headline comparisons with `reference`, each experiment at its largest size."""
        rows = estimates.against(self.frame, reference)
        return at_largest_size(rows[rows["experiment"].isin(experiments)])


def comparisons(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of `claims.verdicts` as text: the exploring estimate, that of the confirming seeds, and the verdict."""
    table = []
    for row in rows.to_dict("records"):
        # where no comparison was planned and none of seeds 1 to 5 ran, those from 6 on explore
        fresh = " from 6 on" if not row["planned"] and min(row["exploring_gains"], default=0) > 5 else ""
        explored = f"{gain_text(row, 'exploring_')} ({row['exploring_seeds']}{fresh})"
        told = {"panel": names.panel(row["experiment"]), "size": row["size"], "comparison": claim_text(row)}
        theirs = paper.gain(row["experiment"], row["better"], row["worse"])
        told["paper's gain"] = number(theirs, row["decimals"], sign=True)
        told |= {"exploratory: gain [95 %] (seeds)": explored, "confirmatory: gain [95 %]": gain_text(row)}
        told["done"] = f"{row['seeds']} of {row['planned']}" if row["planned"] else "not planned"
        said = row["verdict"] + (f" ({row['note']})" if row["note"] else "")
        table.append(told | {"p, Holm": rendering.p_text(row["p_holm"]), "verdict": said})
    return pd.DataFrame(table)


def claim_text(claim: Mapping[str, Any]) -> str:
    """Return for example `FIRE > full reset`."""
    return f"{names.look(claim['better']).name} > {names.look(claim['worse']).name}"


def planned(material: Material, query: str) -> pd.DataFrame:
    return comparisons(material.planned.query(query)).drop(columns="size")


def premises(material: Material) -> pd.DataFrame:
    """Return what the rule asks in each panel of Figures 2 and 4: full reset minus none, or the return before the reset
    divided by that of random actions, on seeds 1 to 5 and on all seeds before the second round."""
    table, said = [], {True: "met", False: "not met", None: "-"}
    for part in material.parts("fig2*", "fig4*"):
        first, last = claims.premise(part, rounds=1), claims.premise(part)
        if first.measured is None or part.first["experiment"] not in paper.panels():
            continue
        second, level = last.measured.n > first.measured.n, part.first["figure"].startswith("fig2")
        row = {"panel": names.panel(part.first["experiment"]), "size": part.first["size"]}
        row["round"] = 2 if second else 1
        everything = last if second else claims.premise(part, "all")
        for seeds, found in (("seeds 1 to 5", first), ("all seeds before round 2", everything)):
            row[seeds] = f"{spread(*found.measured[:3], 4 if level else 2, sign=level)} ({found.measured.n})"
            row[f"{seeds}: premise"] = said[found.holds]
        table.append(row)
    return pd.DataFrame(table)


def counts(material: Material) -> pd.DataFrame:
    shown = {seeds: claims.largest(claims.of_paper(table)) for seeds, table in material.both.items()}
    rows = pd.DataFrame({"seeds": seeds} | claims.counts(table) for seeds, table in shown.items())
    titles = {"all": "comparisons whose premise is met", "not planned": "no seeds planned"}
    return rows.rename(columns=titles | {"suite_wide": "hold, suite-wide correction"})


def pooled(material: Material) -> pd.DataFrame:
    """Return the pooled estimates, with the number of the paper's panels in which its FIRE ends ahead."""
    table = []
    for seeds, verdicts in material.both.items():
        for row in claims.pooled(verdicts).to_dict("records"):
            theirs = pd.Series([paper.gain(panel, "fire", row["rival"]) for panel in paper.panels()])
            gain = spread(row["mean"], row["low"], row["high"], 2, sign=True)
            told = {"FIRE against": names.look(row["rival"]).name, "seeds": seeds, "panels": row["panels"]}
            told |= {"FIRE ahead": row["ahead"], "standardised gain [95 %]": gain}
            i2 = "-" if pd.isna(row["i2"]) else f"{row['i2']:.0%}"
            told |= {"I²": i2, "p, Holm": rendering.p_text(row["p_holm"])}
            told["in the paper, all panels"] = f"{(theirs > 0).sum()} of {theirs.count()}"
            table.append(told)
    return pd.DataFrame(table)


def example(material: Material) -> pd.DataFrame:
    """Return the tests of the paper's claims about one panel, step by step, by p."""
    rows = material.planned.query("experiment == 'fig2a_cifar10_resnet18' and kind == 'claims'")
    rows = rows.sort_values("p")
    error = rows["gains"].map(lambda gains: pd.Series(gains).sem())
    table = {"comparison": column(claim_text, rows), "mean difference": rows["gain"].map("{:+.4f}".format)}
    table |= {"standard error": error.map("{:.4f}".format), "t": (rows["gain"] / error).map("{:+.2f}".format)}
    table |= {"p": rows["p"].map("{:.2g}".format), "times": range(len(rows), 0, -1)}
    return pd.DataFrame(table | {"p, Holm": rows["p_holm"].map("{:.2g}".format), "verdict": rows["verdict"]})


def grid(material: Material, rivals: Sequence[str], cell: Callable[..., str]) -> pd.DataFrame:
    """Return FIRE against rivals, each comparison as the text `cell`: a row per panel of the paper, a column per rival."""
    rows = claims.of_fire(material.planned)
    wide = rows.assign(cell=column(cell, rows)).pivot(index="experiment", columns="worse", values="cell")
    wide = wide.reindex(paper.panels(), columns=rivals).dropna(how="all").fillna("-")
    return wide.rename(columns=lambda rival: names.look(rival).name)


def by_rival(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of `grid` with one row per rival and one column per panel."""
    return table.rename(index=names.panel).T.rename_axis("FIRE against").reset_index()


def side(row: Mapping[str, Any]) -> str:
    """Return where FIRE ends by the verdict in a row of `claims.of_fire`: beats, loses to, or what else it says."""
    if row["verdict"] not in claims.DECIDED:
        return row["verdict"]
    return "beats" if row["gain"] > 0 else "loses to"


def verdict_text(row: Mapping[str, Any]) -> str:
    """Return for example `+0.0386 [+0.0186, +0.0585], FIRE ahead`, or the verdict alone where there is no gain yet."""
    return row["verdict"] if pd.isna(row["gain"]) else f"{gain_text(row)}, {row['verdict']}"


def contradictions(material: Material) -> pd.DataFrame:
    """Return the decided comparisons whose order is not the paper's, and the order of curvature in Figure 5b."""
    table = []
    for row in material.planned[material.planned["verdict"].isin(claims.DECIDED)].to_dict("records"):
        theirs = paper.gain(row["experiment"], row["better"], row["worse"])
        if theirs * row["gain"] < 0:
            found = number(theirs, row["decimals"], sign=True)
            table.append((names.panel(row["experiment"]), claim_text(row), found, gain_text(row)))
    theirs, seen = paper.figure_5b("hessian_lambda_max"), measures.OLD_CURVATURE.metric
    told = f"{theirs['fire']:.1f}, {theirs['shrink_perturb']:.1f} (network not named)"
    for row in fig5.hessians(at_largest_size(material.frame)).to_dict("records"):
        where = ", here on images seen before" if row["metric"] == seen else ""
        what = f"largest Hessian eigenvalue{where}: FIRE, S&P"
        ours = f"{row['fire']:.0f}, {row['shrink_perturb']:.0f} ({row['n']} seeds)"
        table.append((f"5b, {names.panel(row['experiment'])}", what, told, ours))
    return pd.DataFrame(table, columns=["panel", "comparison", "paper", "ours [95 %]"])


def ends(part: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return mean and difference from `none` of each method, over all seeds, and at size paper the paper's end value."""
    rows = estimates.minus(part[part["metric"] == measure], "none")
    about, decimals = rows.iloc[0], digits(measure, rows["mean"])
    table = {"method": rows["name"], "all seeds: mean [95 %]": column(rendering.mean_text, rows, decimals)}
    fewer = rows["difference"].notna() & (rows["pairs"] < rows["n"])
    seeds = [f"{n} ({m} of none)" if less else n for n, m, less in zip(rows["n"], rows["pairs"], fewer)]
    table |= {"seeds": seeds, "all seeds: minus none [95 %]": column(difference_text, rows, decimals)}
    shown = about["headline"] and about["size"] == "paper"
    if theirs := paper.end_values(about["experiment"]) if shown else {}:
        table["paper"] = [number(theirs.get(label), decimals) for label in rows["label"]]
    return pd.DataFrame(table)


def overview(material: Material) -> pd.DataFrame:
    """Return the ends in the settings of OVERVIEW, FIRE's difference from `none` over all seeds, and the verdict on it."""
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
        for gap in rows.query("label == 'fire' and reference == 'none'").to_dict("records"):
            row |= {"FIRE minus none [95 %]": difference_text(gap, decimals), "seeds": gap["pairs"]}
        said = estimates.of(material.verdicts, part).query("better == 'fire' & worse == 'none' & planned > 0")
        table.append(row | {"FIRE > none": said["verdict"].iloc[0] if len(said) else "not planned"})
    return pd.DataFrame(table)


def minus_none(frame: pd.DataFrame, rows: Mapping[str, Any], methods: Sequence[str]) -> pd.DataFrame:
    """Return the headline differences from `none`, all seeds: a row per title, with its experiment and size."""
    gaps = estimates.against(frame, "none")
    cells = dict(zip(zip(gaps["experiment"], gaps["size"], gaps["label"]), column(difference_text, gaps)))
    return pd.DataFrame(
        {"panel": title} | {names.look(method).name: cells.get((*setting, method), "-") for method in methods}
        for title, setting in rows.items()
    )


def costs(material: Material) -> pd.DataFrame:
    """Return the measure right before the last boundary, right after it and at the end, over all seeds."""
    table = []
    for part in material.parts(*studies.COSTS):
        decimals = digits(measures.AT_BOUNDARY[part.first["figure"][:4]][0].metric)
        for label, moments in studies.costs(part).iterrows():
            row = {"panel": names.panel(part.first["experiment"]), "method": names.look(label).name}
            row |= {moment: spread(*each[:3], decimals) for moment, each in moments.items()}
            table.append(row | {"seeds": moments["end"].n})
    return pd.DataFrame(table)


def batch_norm(_: Material) -> pd.DataFrame:
    """Return the test accuracy right after the first boundary, with the old and with new statistics of batch norm."""
    table = []
    for experiment, both in studies.renewed().items():
        for method in names.ordered(both[0]):
            old, new = (estimate(values[method]) for values in both)
            row = {"panel": names.panel(experiment), "method": names.look(method).name}
            row |= {"old statistics": spread(*old[:3]), "new statistics": spread(*new[:3])}
            table.append(row | {"seeds": new.n})
    return pd.DataFrame(table)


def trials(_: Material) -> pd.DataFrame:
    """Return what the trials on fresh seeds chose in each panel, and the share of the range that each choice lost."""
    titles = {"the leader": "the trial", "the cautious": "the cautious trial"}
    titles |= {"none": "always `none`", "fire": "always FIRE"}
    panels = trial_evidence.fresh(load_exported(RESULTS / "trial")).groupby("experiment")
    losses = panels[[f"loss of {way}" for way in titles]].mean()
    losses.loc["mean"] = losses.mean()
    table = losses.map("{:.2f}".format).set_axis([f"loss of {title}" for title in titles.values()], axis=1)
    chosen = {name: leaders.value_counts() for name, leaders in panels["leader"]}
    told = {n: ", ".join(f"{names.look(m).name} {k}" for m, k in each.items()) for n, each in chosen.items()}
    table.insert(0, "chosen by the trials", table.index.map(told).fillna(""))
    return by_panel(table)


def triggers(material: Material) -> pd.DataFrame:
    """Return how often FIRE acted in a run under each trigger, and the differences from FIRE at the boundaries."""
    (part,) = settings(material.results.select(experiment="trigger_random_label"))
    rows = estimates.minus(estimates.of(material.frame, part).query("headline"), "fire")
    acted = part.boundaries[part.boundaries["matrices"] > 0].groupby("label").size()
    acts = rows["label"].map(acted).fillna(0) / rows["label"].map(part.finished.groupby("label").size())
    table = {"method": rows["name"], "acts": acts.map(short)}
    table["mean [95 %]"] = column(rendering.mean_text, rows)
    return pd.DataFrame(table | {"minus FIRE [95 %]": column(difference_text, rows), "seeds": rows["n"]})


def random_labels(material: Material) -> pd.DataFrame:
    """Return every method at its own settings on random labels, best first, and its difference from FIRE."""
    rows = material.gaps("fire", "random_label").query("label == method")
    rows = rows.sort_values("difference", ascending=False)
    texts = column(difference_text, rows)
    return pd.DataFrame({"method": rows["name"], "minus FIRE [95 %]": texts, "seeds": rows["pairs"]})


def status(material: Material) -> pd.DataFrame:
    """Return the methods, seeds and data that are finished: one row per panel of the paper, one column per size."""
    cells = {}
    for setting, runs in material.results.finished.groupby(["experiment", "size"]):
        own = runs[runs["label"] == runs["method"]]
        seeds = (own if len(own) else runs).groupby("label")["seed"].nunique()
        most = f"{seeds.max()}" if seeds.nunique() == 1 else f"{seeds.min()}-{seeds.max()}"
        cells[setting] = f"{len(seeds)} methods x {most} seeds, {names.data(runs['data'].iloc[0])}"
    table = pd.Series(cells).unstack().reindex(paper.panels(), columns=SIZES[:-1])
    return by_panel(table.astype(object).fillna("not run"))


def by_panel(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose index are experiments with the names of their panels in its first column."""
    return table.rename(index=names.panel).rename_axis("panel").reset_index()


def single_questions(material: Material) -> pd.DataFrame:
    """Return settings of FIRE that differ clearly, FIRE with Muon, single layers, and the matrices of a ViT."""
    found = []  # (where, rows, what they are compared with)
    labels = ("settings_random_label", "random labels")
    for experiment, title in (labels, ("settings_warm_start", "warm start")):
        rows = material.gaps("fire", experiment)
        clear = (rows["word"] != "") & (rows["difference"] != 0)
        others = rows["method"].isin(["none", "muon", "fire_muon"])
        found.append((f"settings, {title}", rows[clear & ~others], "fire"))
    for experiment, title in (labels, ("muon_fig3_60k", "language, loss")):
        for other in ("muon", "fire"):
            rows = material.gaps(other, experiment).query("label == 'fire_muon'")
            found.append((f"Muon, {title}", rows, other))
    for part in material.parts("sensitivity_*"):
        rows = studies.layers(part)
        single = rows[rows["block"] != "all"]
        ranked = single.loc[[single["gain"].idxmax(), single["gain"].idxmin()]]
        ranked = ranked.assign(name=["best single layer, ", "worst single layer, "] + ranked["name"])
        shown = pd.concat([ranked, rows[rows["block"] == "all"]])
        found.append((f"layers, {names.title(part).splitlines()[0]}", shown, "none"))
    vits = {"ablation_targets_vit": "warm start", "fig2c_cifar100_vit_tiny": "class-incremental"}
    for experiment, title in vits.items():
        rows = material.gaps("none", experiment)
        shown = rows["changed"].str.startswith("targets=") | rows["label"].isin(["fire", "full_reset"])
        found.append((f"ViT-Tiny, {title}", rows[shown], "none"))
    rows = pd.concat(rows.assign(where=where, other=other) for where, rows, other in found)
    other = rows["other"].map(lambda method: names.look(method).name.partition(" (")[0])
    texts = {"difference [95 %]": column(difference_text, rows), "seeds": rows["pairs"]}
    return pd.DataFrame({"where": rows["where"], "what": rows["name"] + " minus " + other} | texts)


def other_boundaries(material: Material) -> pd.DataFrame:
    """Return FIRE, S&P and others against `none` where old data are dropped, and at other boundaries of language."""
    replay = material.gaps("none", "replay_class_incremental")
    shares = replay.groupby(replay["changed"].str.removeprefix("protocol.replay=").astype(float))
    kept = "one class after another, {:.0%} of the old images kept"
    found = [(kept.format(share), "accuracy", rows) for share, rows in shares]
    titles = {"domain": "new domain alone", "context": "windows of 512 after 128"}
    for name, title in (titles | {"questions": "answers to questions"}).items():
        found.append((f"language, {title}", "loss", material.gaps("none", f"language_{name}")))
    table = [
        {"boundary": boundary, "measure": measure}
        | {names.look(row["method"]).name: difference_text(row, 3) for row in rows.to_dict("records")}
        for boundary, measure, rows in found
    ]
    return pd.DataFrame(table).fillna("-")


def scaling(material: Material) -> pd.DataFrame:
    """Return the differences by the number of images as text, one row per study and number of images."""
    rows = studies.scaling(material.parts("scaling_warm_start*"))
    cells = rows[["mean", "low", "high", "n"]].to_numpy(object)
    rows = rows.assign(text=[f"{spread(*cell, sign=True)} ({n})" for *cell, n in cells])
    rows["pair"] = rows["pair"].map(studies.pair_title)
    wide = rows.pivot(index=["study", "images"], columns="pair", values="text").fillna("-").reset_index()
    return wide.assign(images=wide["images"].map("{:,}".format))


def moved(material: Material) -> pd.DataFrame:
    """Return how far FIRE moves the queries and keys of ViT-Tiny: its squared distance over that of a reset of the same
    matrices, at the first and at the last boundary, means over the seeds."""
    rows = at_largest_size(material.results.boundaries)
    rows = rows[rows["experiment"].str.fullmatch(r"fig2[abc]_\w+_vit_tiny") & rows["label"].eq("fire")]
    means = rows.groupby(["experiment", "phase"])["sfe_share"].mean().groupby(level=0)
    table = {"first boundary": means.first(), "last boundary": means.last()}
    table["paper (network not named)"] = paper.figure_5b("normalized_sfe")["fire"]
    return by_panel(pd.DataFrame(table).map("{:.2f}".format))


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


TABLES: dict[str, Callable[[Material], pd.DataFrame]] = {
    "claims": partial(planned, query="kind == 'claims'"),
    "controls": lambda material: planned(material, "kind == 'controls'").drop(columns="paper's gain"),
    "rivals": partial(planned, query="kind == 'rivals' and worse not in @forest.LATER"),
    "verdicts": lambda material: by_panel(grid(material, claims.GROUPS, side).rename(columns="against {}".format)),
    "instead": lambda material: by_rival(grid(material, forest.RIVALS, side)),
    "later": lambda material: by_rival(grid(material, forest.LATER, verdict_text)),
    "studies": single_questions,
    "boundaries": other_boundaries,
    "gains": lambda material: minus_none(estimates.gains(material.frame), GAINS, studies.PARTS),
    "exploratory": lambda material: minus_none(material.frame, names.NAMES["exploratory"], EXPLORED),
    "trial-share": lambda material: material.evidence["by share"],
    "trial-repeats": lambda material: material.evidence["by repeats"],
    "trial-agreement": lambda material: material.evidence["agreement"],
    "dial": lambda _: dial.table(settings(load_exported(DIAL))),
    "timing": lambda material: timing.table(material.parts("mistiming*", "gradual*", *timing.BASES.values())),
    "cap": lambda material: dial.confirmed(settings(load_exported(DIAL)), material.results),
    "optimizer": lambda material: dial.controlled(settings(load_exported(CONTROLS)), material.results),
} | {
    table.__name__: table
    for table in (counts, pooled, premises, example, contradictions, random_labels, costs, batch_norm,
                  status, overview, trials, triggers, scaling, moved, convergence, table1)
}  # fmt: skip
BLOCK = re.compile(r"(<!-- ((?:table|figure) [\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write() -> list[Path]:
    """Fill the tables of every document from the committed results and return the paths."""
    written = texts(Material(load_exported()))
    for path, text in written.items():
        write_atomic(path, text)
    return list(written)


def texts(material: Material) -> dict[Path, str]:
    """Return {path: text} of every document."""
    blocks = {f"table {name}": markdown(table(material)) for name, table in TABLES.items()}
    blocks |= {f"figure {name}": text for name, text in CAPTIONS.items()}
    return {ROOT / name: fill((ROOT / name).read_text(encoding="utf-8"), blocks) for name in DOCUMENTS}


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Return a document with `blocks`[NAME] between `<!-- NAME -->` and `<!-- end -->`."""
    return BLOCK.sub(lambda match: f"{match[1]}{blocks[match[2]]}\n{match[3]}", text)
