"""The numbers in the documents: tables that `python -m analysis tables --write` fills in, and the pages of the site.

People write the documents of DOCUMENTS. Between `<!-- table NAME -->` and `<!-- end -->` stands the table
of that name, and between `<!-- figure NAME -->` and `<!-- end -->` the caption of that figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import pandas as pd

from analysis import benchmark_tables, claims, estimates, measures, names, paper, plot, tables
from analysis.figures import FIGURES, fig5, findings, forest, layers, scaling
from analysis.rendering import difference_text, fill, markdown, number, spread
from analysis.runs import RESULTS, Results, at_largest_size, at_most, load_exported, settings
from analysis.stats import estimate
from fire_core.files import write_atomic
from harness.config import sweeps

ROOT = RESULTS.parents[1]
DOCUMENTS = (
    "README.md",
    "REPRODUCED.md",
    "docs/findings.md",
    "docs/studies.md",
    "docs/concepts/statistics.md",
    "docs/how-to/try_before_you_treat.md",
)
PAGES = RESULTS / "pages"  # of the site, not committed


@dataclass(frozen=True)
class Material:
    """What the tables are made from."""

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

    def parts(self, prefixes: Sequence[str]) -> list[Results]:
        """Each of these experiments at its largest size up to medium."""
        return settings(at_most(self.results.starting(prefixes), "medium"))

    def gaps(self, reference: str, *experiments: str) -> pd.DataFrame:
        """Return the headline comparisons with `reference`, each experiment at its largest size."""
        rows = self.frame[self.frame["headline"] & (self.frame["reference"] == reference)]
        return at_largest_size(rows[rows["experiment"].isin(experiments)])


# ------------------------------------------------------------------------------------------------ verdicts
def counts(material: Material) -> pd.DataFrame:
    """Return the counts of verdicts on the paper's comparisons."""
    shown = {seeds: claims.largest(claims.of_paper(table)) for seeds, table in material.both.items()}
    return tables.counts_table({seeds: claims.counts(table) for seeds, table in shown.items()})


def pooled(material: Material) -> pd.DataFrame:
    """Return the pooled estimates."""
    return tables.pooled_table({seeds: claims.pooled(table) for seeds, table in material.both.items()})


def planned(material: Material, kind: str) -> pd.DataFrame:
    """Return the comparisons of one kind that have planned seeds."""
    rows = material.verdicts
    rows = rows[(rows["kind"] == kind) & (rows["planned"] > 0)]
    return tables.comparisons_table(rows).drop(columns="size")


def example(material: Material) -> pd.DataFrame:
    """Return the tests of the paper's claims about one panel, step by step, by p."""
    rows = material.verdicts
    rows = rows[(rows["experiment"] == "fig2a_cifar10_resnet18") & (rows["size"] == "medium")]
    table = []
    for row in rows[rows["kind"] == "claims"].sort_values("p").to_dict("records"):
        gains = pd.Series(row["gains"])
        error = gains.std() / len(gains) ** 0.5
        told = {"comparison": tables.claim_text(row), "mean difference": number(row["gain"], 4, sign=True)}
        told |= {"standard error": number(error, 4), "t": number(row["gain"] / error, 2, sign=True)}
        told |= {"p": f"{row['p']:.2g}", "times": str(4 - len(table)), "p, Holm": f"{row['p_holm']:.2g}"}
        table.append(told | {"verdict": row["verdict"]})
    return pd.DataFrame(table)


def verdict_grid(material: Material, rivals: Sequence[str]) -> pd.DataFrame:
    """Return one row per panel of the paper and one column per rival: where FIRE ends, by the verdict of the panel."""
    rows = material.verdicts[material.verdicts["planned"] > 0]
    table = []
    for figure, panel in paper.cells():
        own = rows[rows["experiment"] == f"{figure}_{panel}"].to_dict("records")
        said = {frozenset((row["better"], row["worse"])): side(row) for row in own}
        row = {rival: said.get(frozenset(("fire", rival)), "-") for rival in rivals}
        if set(row.values()) != {"-"}:
            titles = {rival: forest.SHORT.get(rival, names.look(rival).name) for rival in rivals}
            told = {f"against {titles[rival]}": text for rival, text in row.items()}
            table.append({"panel": names.panel(figure, panel)} | told)
    return pd.DataFrame(table)


def side(row: dict) -> str:
    """Return where FIRE ends by the verdict: beats, loses to, or what else the verdict says."""
    if row["verdict"] not in claims.DECIDED:
        return row["verdict"]
    ahead = (row["gain"] > 0) == (row["better"] == "fire")
    return "beats" if ahead else "loses to"


def contradictions(material: Material) -> pd.DataFrame:
    """Return the decided comparisons whose order is not the paper's, and the order of curvature in Figure 5b."""
    table = []
    for row in material.verdicts[material.verdicts["planned"] > 0].to_dict("records"):
        theirs = paper.gain(row["figure"], row["panel"], row["better"], row["worse"])
        if side(row) in ("beats", "loses to") and theirs * row["gain"] < 0:
            ours = spread(row["gain"], row["low"], row["high"], row["decimals"], sign=True)
            told = {"panel": names.panel(row["figure"], row["panel"]), "comparison": tables.claim_text(row)}
            table.append(told | {"paper": number(theirs, row["decimals"], sign=True), "ours [95 %]": ours})
    theirs = paper.panel_of("fig5b", "hessian_lambda_max").set_index("method")["y"]
    for row in fig5.hessians(at_largest_size(material.frame)).to_dict("records"):
        panel = names.panel(*row["experiment"].split("_", 1))
        told = {"panel": f"5b, {panel}", "comparison": "largest Hessian eigenvalue: FIRE, S&P"}
        told["paper"] = f"{theirs['fire']:.1f}, {theirs['shrink_perturb']:.1f} (network not named)"
        ours = f"{row['fire']:.0f}, {row['shrink_perturb']:.0f} ({row['n']} seeds)"
        table.append(told | {"ours [95 %]": ours})
    return pd.DataFrame(table)


# ------------------------------------------------------------------------------------------------ findings
def gains(material: Material) -> pd.DataFrame:
    """Return the gains over `none` of FIRE and of its parts, over all seeds."""
    rows = [(names.panel(*name.split("_", 1)), name, "medium") for name in findings.GAINS]
    found = material.frame.copy()
    losses = ~found["higher_is_better"].astype(bool)
    ends = ["difference", "difference_low", "difference_high"]
    found.loc[losses, ends] = -found.loc[losses, [ends[0], ends[2], ends[1]]].to_numpy()
    return tables.against(found, "none", rows, findings.PARTS)


def costs(material: Material) -> pd.DataFrame:
    """Return the measure right before the last boundary, right after it and at the end, over all seeds."""
    table = []
    for part in settings(at_most(material.results.select(experiment=findings.COSTS), "medium")):
        of = measures.AT_BOUNDARY[part.first["figure"][:4]]
        found = [measures.values(part.metrics, each) for each in of]
        for label in findings.TREATED:
            row = {"panel": names.panel(*part.first[["figure", "panel"]]), "method": names.look(label).name}
            for moment, values in zip(findings.MOMENTS, found):
                told = estimate(list(values[label].values()))
                row[moment] = spread(*told[:3], measures.digits(of[0].metric))
            table.append(row | {"seeds": told.n})
    return pd.DataFrame(table)


def exploratory(material: Material) -> pd.DataFrame:
    """Return differences from `none` that no seeds were planned for or that are not judged, over all seeds."""
    shown = {
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
    rows = [(title, *setting) for title, setting in shown.items()]
    methods = ("fire", "rescale", "shrink_perturb", "full_reset", "plasticity_injection")
    return tables.against(material.frame, "none", rows, methods)


def random_labels(material: Material) -> pd.DataFrame:
    """Return every method at its own settings on random labels, best first, and its difference from FIRE."""
    rows = material.gaps("fire", "random_label")
    rows = rows[rows["label"] == rows["method"]].sort_values("difference", ascending=False)
    numbers = {"minus FIRE [95 %]": [difference_text(row) for _, row in rows.iterrows()]}
    return pd.DataFrame({"method": rows["name"]} | numbers | {"seeds": rows["pairs"]})


# ------------------------------------------------------------------------------------------------ studies
def lines(where: str, rows: pd.DataFrame, minus: str, what: str = "") -> list[dict[str, object]]:
    """Return one line of the table of studies for each comparison."""
    return [
        {"where": where, "what": f"{what or row['name']} minus {minus}"}
        | {"difference [95 %]": difference_text(row), "seeds": row["pairs"]}
        for _, row in rows.iterrows()
    ]


def studies(material: Material) -> pd.DataFrame:
    """Return settings of FIRE that differ clearly, FIRE with Muon, single layers, and the matrices of a ViT."""
    table = []
    titles = {"settings_random_label": "random labels", "settings_warm_start": "warm start"}
    for experiment, title in titles.items():
        rows = material.gaps("fire", experiment)
        rows = rows[(rows["word"] != "") & (rows["difference"] != 0)]
        rows = rows[~rows["method"].isin(["none", "muon", "fire_muon"])]
        table += lines(f"settings, {title}", rows, "FIRE")
    titles = {"settings_random_label": "random labels", "muon_fig3_60k": "language, loss"}
    for experiment, title in titles.items():
        for other in ("muon", "fire"):
            rows = material.gaps(other, experiment)
            table += lines(f"Muon, {title}", rows[rows["label"] == "fire_muon"], names.look(other).name)
    for part in material.parts(layers.PREFIXES):
        rows, where = layers.differences(part), f"layers, {names.title(part).splitlines()[0]}"
        single = rows[rows["block"] != "all"]
        for word, place in (("best", single["gain"].idxmax()), ("worst", single["gain"].idxmin())):
            row = single.loc[[place]]
            table += lines(where, row, "none", f"{word} single layer, {row['name'].item()}")
        table += lines(where, rows[rows["block"] == "all"], "none")
    titles = {"ablation_targets_vit": "warm start", "fig2c_cifar100_vit_tiny": "class-incremental"}
    for experiment, title in titles.items():
        rows = material.gaps("none", experiment)
        shown = rows["changed"].str.startswith("targets=") | rows["label"].isin(["fire", "full_reset"])
        table += lines(f"ViT-Tiny, {title}", rows[shown], "none")
    return pd.DataFrame(table)


def triggers(material: Material) -> pd.DataFrame:
    """Return FIRE under triggers beside FIRE at the boundaries."""
    (part,) = settings(material.results.select(experiment="trigger_random_label"))
    rows = estimates.of(material.frame, part)
    return tables.triggers_table(part, rows[rows["headline"]])


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
        | {names.look(row["method"]).name: difference_text(row, 3) for _, row in rows.iterrows()}
        for boundary, measure, rows in found
    ]
    return pd.DataFrame(table).fillna("-")


def moved(material: Material) -> pd.DataFrame:
    """Return how far FIRE moves the queries and keys of ViT-Tiny: its squared distance over that of a reset of the same
    matrices, at the first and at the last boundary, means over the seeds."""
    rows = at_largest_size(material.results.boundaries)
    rows = rows[rows["experiment"].str.fullmatch(r"fig2[abc]_\w+_vit_tiny") & rows["label"].eq("fire")]
    shares = rows.groupby(["experiment", "phase"])["sfe_share"].mean()
    theirs = paper.panel_of("fig5b", "normalized_sfe").set_index("method")["y"]["fire"]
    table = [
        {"panel": names.panel(*str(experiment).split("_", 1)), "first boundary": f"{each.iloc[0]:.2f}",
         "last boundary": f"{each.iloc[-1]:.2f}", "paper (network not named)": f"{theirs:.2f}"}
        for experiment, each in shares.groupby(level=0)
    ]  # fmt: skip
    return pd.DataFrame(table)


TABLES: dict[str, Callable[[Material], pd.DataFrame]] = {
    "counts": counts,
    "pooled": pooled,
    "claims": lambda material: planned(material, "claims"),
    "controls": lambda material: planned(material, "controls").drop(columns="paper's gain"),
    "rivals": lambda material: planned(material, "rivals"),
    "premises": lambda material: tables.premises_table(material.parts(("fig2", "fig4"))),
    "example": example,
    "verdicts": partial(verdict_grid, rivals=claims.GROUPS),
    "instead": partial(verdict_grid, rivals=forest.RIVALS),
    "exploratory": exploratory,
    "random_labels": random_labels,
    "contradictions": contradictions,
    "gains": gains,
    "costs": costs,
    "status": lambda material: tables.status_matrix(material.results),
    "overview": lambda material: tables.overview_table(material.results, material.frame, material.verdicts),
    "scaling": lambda material: scaling.table(scaling.differences(material.parts(scaling.PREFIXES))),
    "studies": studies,
    "triggers": triggers,
    "boundaries": other_boundaries,
    "moved": moved,
    "theorems": lambda material: benchmark_tables.theorems(),
    "dfi": lambda material: benchmark_tables.premise(),
    "convergence": lambda material: benchmark_tables.convergence(),
    "table1": lambda material: benchmark_tables.table1(),
}


# ------------------------------------------------------------------------------------------------ documents
def write() -> list[Path]:
    """Fill the tables of every document from the committed results and return the paths."""
    written = texts(Material(load_exported()))
    for path, text in written.items():
        write_atomic(path, text)
    return list(written)


def texts(material: Material) -> dict[Path, str]:
    """Return {path: text} of every document."""
    make = {
        "table": {name: partial(_text, table, material) for name, table in TABLES.items()},
        "figure": {name: partial(str, drawing.caption) for name, drawing in FIGURES.items()},
    }
    paths = [ROOT / name for name in DOCUMENTS]
    return {path: fill(path.read_text(encoding="utf-8"), make) for path in paths}


def _text(table: Callable[[Material], pd.DataFrame], material: Material) -> str:
    return markdown(table(material))


# ------------------------------------------------------------------------------------------------ pages of the site
def write_pages() -> list[Path]:
    """Write a page for each experiment into PAGES, for the site, and return the paths."""
    material = Material(load_exported())
    experiments = sorted(material.results.finished["experiment"].unique())
    pages = {experiment: page(material, experiment) for experiment in experiments}
    PAGES.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        write_atomic(PAGES / f"{name}.md", text)
    return [PAGES / f"{name}.md" for name in pages]


def page(material: Material, experiment: str) -> str:
    """Return the page of one experiment: each size and data set in turn, with every measure."""
    results = material.results.select(experiment=experiment)
    first = results.first
    text = f"# {names.panel(first['figure'], first['panel'])}\n\nExperiment `{experiment}`.\n"
    for part in settings(results):
        rows = estimates.of(material.frame, part)
        verdicts = tables.comparisons_table(estimates.of(material.verdicts, part))
        ends = rows[rows["kind"] == "result"]
        titles = ends.drop_duplicates("metric").set_index("metric")["measure"]
        shown = {title: tables.end_table(ends, metric) for metric, title in titles.items()}
        shown |= {
            "Comparisons": verdicts,
            "Changed settings": tables.ablation_table(rows),
            "Right after the last boundary": tables.wide_table(rows, "boundary"),
        }
        text += f"\n## Size {part.first['size']}: {names.one_line(part)}\n\n```\n{commands(part)}\n```\n\n"
        text += f"Runs: {plot.provenance(part.finished)}.\n"
        for title, table in shown.items():
            if len(table):
                table = table.drop(columns=["panel", "experiment", "size"], errors="ignore")
                text += f"\n### {title[0].upper()}{title[1:]}\n\n{markdown(table)}\n"
    return text


def commands(part: Results) -> str:
    """Return the commands that repeat the runs of one setting."""
    runs, first = part.finished, part.first
    seeds = ",".join(map(str, sorted(runs["seed"].unique())))
    script = " ".join(first["command"].split()[:2])
    line = f"{script} -m experiment={first['experiment']} size={first['size']} seed={seeds}"
    own = names.ordered(runs["method"][runs["label"] == runs["method"]])
    if sweeps(first["experiment"]):  # which has its methods in its file
        apart = runs["command"][runs["label"] == runs["method"]].unique()
        return "\n".join([line, *(f"{command} seed={first['seed']}" for command in apart)])
    return f"{line} method={','.join(own or names.ordered(runs['method']))}"
