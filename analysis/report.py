"""The files with tables: documents, whose tables `python -m analysis tables --write` fills in, and pages of the site.

People write the documents of DOCUMENTS. Between `<!-- table NAME -->` and `<!-- end -->` stands the table
of that name, and between `<!-- figure NAME -->` and `<!-- end -->` the caption of that figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pandas as pd

from analysis import estimates, names, plot, tables
from analysis.figures import CAPTIONS
from analysis.rendering import fill, markdown
from analysis.runs import RESULTS, Results, load_exported, settings
from analysis.tables import TABLES, Material
from fire_core.files import write_atomic
from harness.config import sweeps

ROOT = RESULTS.parents[1]
DOCUMENTS = (
    "README.md",
    "REPRODUCED.md",
    "docs/findings.md",
    "docs/studies.md",
    "docs/concepts/statistics.md",
    "docs/how-to/batch_norm.md",
    "docs/how-to/try_before_you_treat.md",
)
PAGES = RESULTS / "pages"  # of the site, not committed


def write() -> list[Path]:
    """Fill the tables of every document from the committed results and return the paths."""
    return _write(texts(Material(load_exported())))


def texts(material: Material) -> dict[Path, str]:
    """Return {path: text} of every document."""
    make = {
        "table": {name: lambda table=table: markdown(table(material)) for name, table in TABLES.items()},
        "figure": {name: partial(str, text) for name, text in CAPTIONS.items()},
    }
    return {ROOT / name: fill((ROOT / name).read_text(encoding="utf-8"), make) for name in DOCUMENTS}


def write_pages() -> list[Path]:
    """Write a page for each experiment into PAGES, for the site, and return the paths."""
    material = Material(load_exported())
    experiments = sorted(material.results.finished["experiment"].unique())
    return _write({PAGES / f"{name}.md": page(material, name) for name in experiments})


def _write(written: dict[Path, str]) -> list[Path]:
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    return list(written)


def page(material: Material, experiment: str) -> str:
    """Return the page of one experiment: each size and data set in turn, with every measure."""
    text = f"# {tables.panel_of(experiment)}\n\nExperiment `{experiment}`.\n"
    for part in settings(material.results.select(experiment=experiment)):
        rows = estimates.of(material.frame, part)
        more = {
            "Comparisons": tables.comparisons(estimates.of(material.verdicts, part)),
            "Changed settings": tables.ablations(rows),
            "Right after the last boundary": tables.at_boundary(rows),
        }
        text += f"\n## Size {part.first['size']}: {names.one_line(part)}\n\n```\n{commands(part)}\n```\n\n"
        text += f"Runs: {plot.provenance(part.finished)}.\n{sections(rows, more)}"
    return text


def sections(rows: pd.DataFrame, more: Mapping[str, pd.DataFrame] | None = None) -> str:
    """Return the tables of one setting with headings: one per measure, and those of `more`."""
    ends, text = rows[rows["kind"] == "result"], ""
    titles = ends.drop_duplicates("metric").set_index("metric")["measure"]
    shown = {title: tables.ends(ends, metric) for metric, title in titles.items()}
    for title, table in (shown | (more or {})).items():
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
