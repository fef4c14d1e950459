"""The generated documents: REPRODUCED.md, the pages in analysis/results/pages/, and the table in README.md.

Numbers are collected here; the sentences around them stand in templates/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis import (
    benchmark_tables,
    claims,
    estimates,
    fig2,
    fig5,
    further_questions,
    paper,
    plot,
    ranking,
    tables,
)
from analysis.rendering import render
from analysis.runs import RESULTS, SIZES, Results, at_largest_size, at_most, load_exported, settings
from fire_core.errors import UserError
from fire_core.files import write_atomic
from harness.config import sweeps

ROOT = RESULTS.parents[1]
FOLDER = RESULTS / "pages"
PAGES = "analysis/results/pages"  # the same folder in the links of REPRODUCED.md
START, END = "<!-- results -->", "<!-- /results -->"
FIGURES = {
    "fig2": "Figure 2: images",
    "fig3": "Figure 3: language",
    "fig4": "Figure 4: reinforcement learning",
    "fig5": "Figure 5: iterations, and the weights after the reset",
    "probes": "Beside the paper's panels",
    "ranking": "All methods, ranked over panels",
}
TRIGGER = "trigger_random_label"


def write() -> list[Path]:
    """Regenerate every document from the committed results and return the paths. Outdated pages are deleted."""
    written = texts()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in set(FOLDER.glob("*.md")) - set(written):
        old.unlink()
    for path, text in written.items():
        write_atomic(path, text)
    return list(written)


def texts() -> dict[Path, str]:
    """Return {path: text} of every document. Raises UserError if no finished run was exported."""
    results = load_exported()
    if results.finished.empty:
        raise UserError(
            f"no finished run in {RESULTS}: run something and export it first (python -m analysis export)"
        )
    frame, readme, compared = estimates.frame(results), ROOT / "README.md", claims.verdicts(results)
    of_paper, report = claims.of_paper(compared), report_tables(results, compared)
    beside = compared[(compared["kind"] == "claims") & ~compared.index.isin(of_paper.index)]
    benchmarks = benchmark_tables.benchmark_tables()
    found = {
        "benchmarks": render("benchmarks", found=benchmarks),
        "claims": render("claims", **report, claims=tables.comparisons_table(of_paper)),
        "beside_the_paper": render(
            "beside_the_paper",
            claims=tables.comparisons_table(beside),
            learning=tables.learning_table(frame, compared),
        ),
    }
    for kind in ("controls", "rivals"):
        rows = compared[compared["kind"] == kind]
        found[kind] = render(kind, **{kind: tables.comparisons_table(rows)})
    found |= further_questions.theory_page()
    for experiment in sorted(results.finished["experiment"].unique()):
        found[experiment] = page(results.select(experiment=experiment), frame, compared)
    overview = render("overview", table=tables.overview_table(results, frame, compared), **report)
    return (
        {ROOT / "REPRODUCED.md": reproduced(results, frame, compared, report | {"benchmarks": benchmarks})}
        | {FOLDER / f"{name}.md": text for name, text in found.items()}
        | {readme: fill(readme.read_text(encoding="utf-8"), overview)}
    )


def report_tables(results: Results, compared: pd.DataFrame) -> dict[str, Any]:
    """Return the counts of verdicts and the pooled estimates, with the exploring and with the confirming seeds."""
    verdicts = {"seeds 1 to 5, exploring": claims.verdicts(results, "exploring"), "seeds from 6 on": compared}
    of_paper = {seeds: claims.largest(claims.of_paper(table)) for seeds, table in verdicts.items()}
    counts = {seeds: claims.counts(table) for seeds, table in of_paper.items()}
    pooled = {seeds: claims.pooled(table) for seeds, table in verdicts.items()}
    held = of_paper["seeds from 6 on"].query("verdict == 'holds'")
    return {
        "at_paper": "paper" in set(results.finished["size"]),
        "counts": tables.counts_table(counts),
        "confirmed": counts["seeds from 6 on"],
        "held_in_language": int(held["figure"].eq("fig3").sum()),
        "pooled": tables.pooled_table(pooled),
        "pooled_rows": pooled["seeds from 6 on"].dropna(subset="p_holm").to_dict("records"),
    }


def reproduced(results: Results, frame: pd.DataFrame, compared: pd.DataFrame, report: dict[str, Any]) -> str:
    """Return the text of REPRODUCED.md."""
    cells = ["_".join(cell) for cell in paper.cells()]
    shown = claims.largest(claims.of_paper(compared))
    controls = compared[(compared["kind"] == "controls") & compared["experiment"].isin(cells)]
    return render(
        "reproduced",
        pages=PAGES,
        status=tables.status_matrix(results),
        convergence=benchmark_tables.convergence_in_short()
        if "convergence" in report["benchmarks"]
        else None,
        forest=forest["caption"] if (forest := _figure("claims", "")) else "",
        figures=[
            figure
            | {"finding": ahead(compared, name), "ranks": ranking.told(results) if name == "ranking" else []}
            for name, title in FIGURES.items()
            if (figure := _figure(name, title))
        ],
        moved=fig2.moved_by_fire(at_largest_size(results.boundaries)),
        hessians=fig5.hessians(at_largest_size(frame)).to_dict("records"),
        theirs=paper.panel_of("fig5b", "hessian_lambda_max").set_index("method")["y"].round(1).to_dict(),
        paper_sfe=paper.panel_of("fig5b", "normalized_sfe").set_index("method")["y"]["fire"],
        **report,
        claims=tables.comparisons_table(shown).drop(columns="size", errors="ignore"),
        premises=tables.fresh_premises(settings(at_most(results, "medium"))),
        not_run=not_run(compared),
        controls=tables.comparisons_table(at_largest_size(controls)).drop(
            columns=["size", "paper's gain"], errors="ignore"
        ),
        triggers=triggers(results, frame),
        others=tables.other_experiments(results),
        **further_questions.told(results, frame),
    )


def _figure(name: str, title: str) -> dict[str, Any] | None:
    """Return the picture of the largest size that was drawn, with its caption, and the stems of the other sizes and of
    the picture that has the paper's panels too."""
    drawn = {path.stem for path in (RESULTS / "figures").glob("*.png")}
    stems = [f"{name}-{size}" for size in SIZES if f"{name}-{size}" in drawn]
    if not stems:
        return None
    caption = (RESULTS / "figures" / f"{stems[0]}.md").read_text(encoding="utf-8").split("\n")[0]
    size = stems[0].rpartition("-")[2]
    both = f"{stems[0]}-with-paper"
    others = stems[1:] + [both] * (both in drawn)
    return {"title": title, "stem": stems[0], "caption": caption, "size": size, "others": others}


def ahead(compared: pd.DataFrame, figure: str) -> list[tuple[str, int, int]]:
    """Return (rival, panels in which FIRE's mean is ahead of it, panels that have both) over the panels of a figure of the
    paper whose premise is met, each at the size of `claims.largest`. Confirming seeds count where all planned ones have
    run, else the exploring ones."""
    cells = ["_".join(cell) for cell in paper.cells() if cell[0].startswith(figure)]
    rows = claims.largest(compared[compared["experiment"].isin(cells) & compared["premise"]])
    rows = rows[(rows["better"] == "fire") | (rows["worse"] == "fire")]
    wins: dict[str, list[bool]] = {rival: [] for rival in claims.GROUPS}
    for row in rows.to_dict("records"):
        first = row["better"] == "fire"
        gain = row["exploring_gain"] if pd.isna(row["gain"]) else row["gain"]
        if (rival := row["worse" if first else "better"]) in wins and not pd.isna(gain):
            wins[rival].append(gain > 0 if first else gain < 0)
    return [(rival, sum(won), len(won)) for rival, won in wins.items() if won]


def triggers(results: Results, frame: pd.DataFrame) -> dict[str, Any]:
    """Return how FIRE under a trigger compares with FIRE at announced boundaries; empty if it was not run."""
    rows = frame[frame["headline"] & (frame["experiment"] == TRIGGER)]
    if rows.empty:
        return {}
    part = results.select(experiment=TRIGGER, size=rows["size"].iloc[0])
    _, words = tables.triggers_table(part, rows[rows["size"] == rows["size"].iloc[0]])
    return {"title": plot.title(part).replace("\n", ", "), "words": words, "experiment": TRIGGER}


def not_run(compared: pd.DataFrame) -> dict[str, list[str]]:
    """Return {experiment: claims without a run}."""
    ran = set(zip(compared["experiment"], compared["better"], compared["worse"]))
    panels: dict[str, list[str]] = {}
    for claim in paper.claims().to_dict("records"):
        if (claim["experiment"], claim["better"], claim["worse"]) not in ran:
            panels.setdefault(claim["experiment"], []).append(tables.claim_text(claim))
    return panels


def page(results: Results, frame: pd.DataFrame, compared: pd.DataFrame) -> str:
    """Return the page of one experiment: each size and data set in turn."""
    parts = []
    for part in settings(results):
        rows = estimates.of(frame, part)
        results_of = rows[rows["kind"] == "result"].groupby("metric", sort=False)
        shown = [  # not what all methods share, as the return before the boundary
            (group["measure"].iloc[0], tables.end_table(rows, metric))
            for metric, group in results_of
            if group["mean"].nunique() > 1 or len(group) == 1
        ]
        sections = [
            ("Comparisons", _of_one(tables.comparisons_table(estimates.of(compared, part)))),
            ("Overrides", _of_one(tables.ablation_table(rows))),
            ("Learning before the boundary", _of_one(tables.learning_table(rows, compared))),
            ("Right after the last boundary", tables.wide_table(rows, "boundary")),
        ]
        under_triggers = None
        if part.first["experiment"] == TRIGGER and rows["headline"].any():
            table, words = tables.triggers_table(part, rows[rows["headline"]])
            under_triggers = {"table": table, "words": words}
        parts.append(origin(part) | {"measures": shown, "sections": sections, "triggers": under_triggers})
    first = results.first
    return render("experiment", experiment=first["experiment"], title=heading(first), parts=parts)


def heading(run: pd.Series) -> str:
    """Return the title of an experiment's page, as in `Figure 2a: ResNet-18`."""
    name = plot.panel_name(run["figure"], run["panel"])
    return f"Figure {name.replace(' ', ': ', 1)}" if run["figure"] and " " in name else name


def _of_one(table: pd.DataFrame) -> pd.DataFrame:
    return table.drop(columns=["experiment", "panel", "size"], errors="ignore")


def origin(part: Results) -> dict[str, Any]:
    """Return what the command needs that repeats the runs of one setting, and where they were made."""
    runs, first = part.finished, part.first
    labels = plot.ordered(runs["label"][runs["label"] == runs["method"]]) or plot.ordered(runs["method"])
    return {
        "size": first["size"],
        "title": plot.title(part).replace("\n", ", "),
        "target": f"{first['domain']}-sweep",
        "sweep": " ".join(first["command"].split()[:2]) if sweeps(first["experiment"]) else "",
        "apart": [
            f"{command} seed={{seed}}"
            for command in runs["command"][runs["label"] == runs["method"]].unique()
        ],
        "labels": labels,
        "seeds": sorted(runs["seed"].unique()),
        "own_pictures": first["data"] == "image_folder",
        "overrides": (runs["label"] != runs["method"]).any(),
        "untuned": _untuned(first["experiment"], labels),
        "source": plot.provenance(runs),
    }


def _untuned(experiment: str, methods: list[str]) -> list[str]:
    """Return the methods that have `tuned` settings but get none from this experiment's file in conf/experiment."""
    conf = ROOT / "conf"

    def text(name: str) -> str:
        path = conf / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    tuned = (yaml.safe_load(text(f"experiment/{experiment}.yaml")) or {}).get("tuned") or {}
    return [m for m in methods if m not in tuned and f"tuned.{m}." in text(f"method/{m}.yaml")]


def fill(text: str, table: str) -> str:
    """Return `text` with `table` between the two markers. Raises UserError unless there is one pair of markers."""
    if len(re.findall(f"{START}.*?{END}", text, re.DOTALL)) != 1:
        raise UserError(f"README.md needs exactly one pair of {START} and {END}")
    head, rest = text.split(START)
    return f"{head}{START}\n{table}\n{END}{rest.split(END)[1]}"
