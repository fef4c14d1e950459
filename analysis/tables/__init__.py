"""The tables of the documents, which `python -m analysis tables --write` fills in.

People write the documents. Between `<!-- table NAME -->` and `<!-- end -->` stands the table of that name, and between
`<!-- figure NAME -->` and `<!-- end -->` the caption of that figure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pandas as pd

from analysis import claims
from analysis.figures import CAPTIONS, forest
from analysis.rendering import markdown
from analysis.runs import RESULTS, load_exported
from analysis.tables import panels, studies, verdicts
from analysis.tables.material import Material
from analysis.tables.panels import at_boundary, ends
from analysis.tables.verdicts import comparisons
from fire_core.files import write_atomic

__all__ = ["DOCUMENTS", "TABLES", "Material", "at_boundary", "comparisons", "ends", "fill", "texts", "write"]

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
TABLES: dict[str, Callable[[Material], pd.DataFrame]] = {
    "counts": verdicts.counts,
    "pooled": verdicts.pooled,
    "claims": partial(verdicts.planned, kind="claims"),
    "controls": lambda material: verdicts.planned(material, "controls").drop(columns="paper's gain"),
    "rivals": partial(verdicts.planned, kind="rivals"),
    "premises": verdicts.premises,
    "example": verdicts.example,
    "verdicts": partial(verdicts.grid, rivals=claims.GROUPS),
    "instead": partial(verdicts.grid, rivals=forest.RIVALS),
    "contradictions": verdicts.contradictions,
    "exploratory": panels.exploratory,
    "random_labels": panels.random_labels,
    "gains": panels.gains,
    "costs": panels.costs,
    "batch_norm": panels.batch_norm,
    "status": panels.status,
    "overview": panels.overview,
    "triggers": panels.triggers,
    "scaling": studies.scaling,
    "studies": studies.single_questions,
    "boundaries": studies.other_boundaries,
    "moved": studies.moved,
    "theorems": studies.theorems,
    "dfi": studies.premise,
    "convergence": studies.convergence,
    "table1": studies.table1,
}
BLOCK = re.compile(r"(<!-- ((?:table|figure) [\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write() -> list[Path]:
    """Fill the tables of every document from the committed results and return the paths."""
    written = texts(Material(load_exported()))
    for path, text in written.items():
        write_atomic(path, text)
    return list(written)


def texts(material: Material) -> dict[Path, str]:
    """Return {path: text} of every document."""
    make = {f"table {name}": lambda table=table: markdown(table(material)) for name, table in TABLES.items()}
    make |= {f"figure {name}": partial(str, text) for name, text in CAPTIONS.items()}
    return {ROOT / name: fill((ROOT / name).read_text(encoding="utf-8"), make) for name in DOCUMENTS}


def fill(text: str, make: Mapping[str, Callable[[], str]]) -> str:
    """Return a document with what `make`[NAME] returns between `<!-- NAME -->` and `<!-- end -->`. Raises KeyError for a
    table or figure that is not there."""
    return BLOCK.sub(lambda match: f"{match[1]}{make[match[2]]()}\n{match[3]}", text)
