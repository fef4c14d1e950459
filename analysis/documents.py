"""The generated documents: REPRODUCED.md, the pages in analysis/results/pages/, and the table in README.md.

Numbers are collected here; the sentences around them stand in templates/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis import benchmark_tables, estimates, further_questions, other_boundaries, paper, plot, tables
from analysis.rendering import render
from analysis.runs import RESULTS, SIZES, Results, at_largest_size, load_exported, settings
from fire_core.errors import UserError

ROOT = RESULTS.parents[1]
FOLDER = RESULTS / "pages"
PAGES = "analysis/results/pages"  # the same folder in the links of REPRODUCED.md
START, END = "<!-- results -->", "<!-- /results -->"
TARGETS = {"language": "language-sweep", "dqn": "dqn-sweep", "sac": "sac-sweep", "vision": "vision-sweep"}
FIGURES = {
    "fig2": "Figure 2: images",
    "fig3": "Figure 3: language",
    "fig4": "Figure 4: reinforcement learning",
    "fig5": "Figure 5: iterations, and the weights after the reset",
    "probes": "Beside the paper's panels",
}
TRIGGER = "trigger_random_label"


def write() -> list[Path]:
    """Regenerate every document from the committed results and return the paths. Outdated pages are deleted."""
    written = texts()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in set(FOLDER.glob("*.md")) - set(written):
        old.unlink()
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    return list(written)


def texts() -> dict[Path, str]:
    """Return {path: text} of every document. Raises UserError if no finished run was exported."""
    results = load_exported()
    if results.finished.empty:
        raise UserError(
            f"no finished run in {RESULTS}: run something and export it first (python -m analysis export)"
        )
    frame, readme = estimates.frame(results), ROOT / "README.md"
    claims, controls = tables.claim_rows(frame), tables.against_controls(frame)
    of_paper = claims["source"].str.startswith("the paper's")
    found = {
        "benchmarks": render("benchmarks", found=benchmark_tables.benchmark_tables()),
        "claims": render("claims", **_counted(claims[of_paper]), wins=tables.wins_table(frame)),
        "controls": render(
            "controls", told=controls_told(controls), controls=tables.controls_table(controls)
        ),
        "beside_the_paper": render(
            "beside_the_paper", **_counted(claims[~of_paper]), learning=tables.learning_table(frame)
        ),
    }
    found |= other_boundaries.pages(frame) | further_questions.pages(frame)
    for experiment in sorted(results.finished["experiment"].unique()):
        found[experiment] = page(results.select(experiment=experiment), frame)
    overview = render("overview", table=tables.overview_table(results, frame))
    return (
        {ROOT / "REPRODUCED.md": reproduced(results, frame)}
        | {FOLDER / f"{name}.md": text for name, text in found.items()}
        | {readme: fill(readme.read_text(encoding="utf-8"), overview)}
    )


def reproduced(results: Results, frame: pd.DataFrame) -> str:
    """Return the text of REPRODUCED.md."""
    benchmarks, claims, controls = (
        benchmark_tables.benchmark_tables(),
        tables.claim_rows(frame),
        tables.against_controls(frame),
    )
    of_paper = claims[claims["source"].str.startswith("the paper's")]
    cells = ["_".join(cell) for cell in paper.cells()]
    shown = at_largest_size(of_paper[of_paper["experiment"].isin(cells)], ["experiment", "better", "worse"])
    wins = tables.wins_table(frame)
    return render(
        "reproduced",
        pages=PAGES,
        status=tables.status_matrix(results),
        benchmarks=benchmarks,
        convergence=benchmark_tables.convergence_in_short() if "convergence" in benchmarks else None,
        figures=[figure for name, title in FIGURES.items() if (figure := _figure(name, title))],
        counts=claim_counts(of_paper),
        claims=tables.claims_table(shown).drop(columns=["data", "source"]),
        not_run=not_run(claims),
        wins=wins[wins["size"] == wins["size"].iloc[0]] if len(wins) else wins,
        controls_told=controls_told(controls),
        controls=tables.controls_table(at_largest_size(controls[controls["experiment"].isin(cells)])),
        triggers=triggers(results, frame),
        experiments=sorted(results.finished["experiment"].unique()),
        **further_questions.told(results, frame),
        **other_boundaries.told(frame),
    )


def _figure(name: str, title: str) -> dict[str, Any] | None:
    """Return the picture of the largest size that was drawn, with its caption and the other sizes."""
    stems = [f"{name}-{size}" for size in SIZES if (RESULTS / "figures" / f"{name}-{size}.png").exists()]
    if not stems:
        return None
    caption = (RESULTS / "figures" / f"{stems[0]}.md").read_text(encoding="utf-8").split("\n")[0]
    size = stems[0].rpartition("-")[2]
    return {"title": title, "stem": stems[0], "caption": caption, "size": size, "others": stems[1:]}


def _counted(claims: pd.DataFrame) -> dict[str, Any]:
    return {"counts": claim_counts(claims), "claims": tables.claims_table(claims)}


def claim_counts(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one row per size with the numbers of claims that were run, that hold, and that are contradicted."""
    return [
        {"size": size, "run": len(group), "positive": (group["difference"] > 0).sum()}
        | {name: (group["word"] == word).sum() for name, word in (("holds", "better"), ("opposite", "worse"))}
        for size, group in rows.groupby("size")
    ]


def controls_told(rows: pd.DataFrame) -> dict[str, Any]:
    """Return in how many settings FIRE is better than `none`, and among these than two of the controls."""
    if rows.empty:
        return {}
    words = rows.pivot_table(index=["experiment", "size"], columns="label", values="word", aggfunc="last")
    better = words[words.reindex(columns=["none"])["none"] == "worse"]  # than FIRE
    against = [
        (plot.look(label).name, (better[label] == "worse").sum(), better[label].notna().sum())
        for label in ("rescale", "random_orthogonal")
        if len(better) and label in better
    ]
    return {"better": len(better), "settings": len(words), "against": against}


def triggers(results: Results, frame: pd.DataFrame) -> dict[str, Any]:
    """Return how FIRE under a trigger compares with FIRE at announced boundaries; empty if it was not run."""
    rows = frame[frame["headline"] & (frame["experiment"] == TRIGGER)]
    if rows.empty:
        return {}
    part = results.select(experiment=TRIGGER, size=rows["size"].iloc[0])
    _, words = tables.triggers_table(part, rows[rows["size"] == rows["size"].iloc[0]])
    return {"title": _title(part), "words": words, "experiment": TRIGGER}


def not_run(claims: pd.DataFrame) -> dict[str, list[str]]:
    """Return {experiment: claims without a run}."""
    ran = set(zip(claims["experiment"], claims["better"], claims["worse"]))
    panels: dict[str, list[str]] = {}
    for claim in paper.claims().to_dict("records"):
        if (claim["experiment"], claim["better"], claim["worse"]) not in ran:
            panels.setdefault(claim["experiment"], []).append(tables.claim_text(claim))
    return panels


def page(results: Results, frame: pd.DataFrame) -> str:
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
            ("FIRE against each other method", tables.against_table(rows)),
            ("Overrides", _of_one(tables.ablation_table(rows))),
            ("Learning before the boundary", _of_one(tables.learning_table(rows))),
            ("Right after the last boundary", tables.wide_table(rows, "boundary")),
            ("Cost", tables.wide_table(rows, "cost")),
        ]
        under_triggers = None
        if part.first["experiment"] == TRIGGER and rows["headline"].any():
            table, words = tables.triggers_table(part, rows[rows["headline"]])
            under_triggers = {"table": table, "words": words}
        parts.append(origin(part) | {"measures": shown, "sections": sections, "triggers": under_triggers})
    return render("experiment", experiment=results.first["experiment"], parts=parts)


def _of_one(table: pd.DataFrame) -> pd.DataFrame:
    return table.drop(columns=["experiment", "size"], errors="ignore")


def _title(part: Results) -> str:
    return plot.title(part).replace("\n", ", ")


def origin(part: Results) -> dict[str, Any]:
    """Return what the command needs that repeats the runs of one setting, and where they were made."""
    runs, first = part.finished, part.first
    labels = plot.ordered(runs["label"][runs["label"] == runs["method"]]) or plot.ordered(runs["method"])
    return {
        "size": first["size"],
        "title": _title(part),
        "target": TARGETS.get(first["domain"], "vision-sweep"),
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
