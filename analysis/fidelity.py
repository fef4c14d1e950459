"""Comparison with the official code: fills docs/FIDELITY.md and prints the largest difference of each cell and method.

    FIDELITY_RECORD=notes.jsonl python -m pytest tests/official tests/language tests/rl  # writes what they compare
    python -m analysis fidelity notes.jsonl                                              # takes it into the record

The record is analysis/results/fidelity.csv, with one line per quantity that a test compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd

import vision.official  # noqa: F401 (registers the variants)
from analysis.rendering import fill
from fire_core.methods import variants
from harness.runs.machine import describe

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "analysis" / "results" / "fidelity.csv"
PAGE = ROOT / "docs" / "FIDELITY.md"
QUANTITY = ["kind", "row", "what"]
ASPECTS = ("net", "data", "schedule", "boundary", "optimizer", "tuned", "evaluation")


def main(given: Sequence[str] | None = None) -> int:
    """Print the comparison with the official code and fill docs/FIDELITY.md, after taking the comparisons of `notes` into
    the record. Return 1 if a difference exceeds its tolerance, else 0."""
    parser = argparse.ArgumentParser(prog="python -m analysis fidelity", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("notes", nargs="?", type=Path, help="what tests wrote with FIDELITY_RECORD")
    options = parser.parse_args(given)
    record = pd.read_csv(RECORD)
    if options.notes:
        record = renewed(record, pd.read_json(options.notes, lines=True))
        record.to_csv(RECORD, index=False)
    for (kind, row), lines in record.groupby(["kind", "row"], sort=False):
        worst = lines.loc[lines["difference"].idxmax()]
        print(
            f"{kind:<9} {row:<26} {shown(lines):<22} {len(lines):>4} quantities, largest in {worst['what']}"
        )
    PAGE.write_text(page(record), encoding="utf-8")
    print(f"\nwritten to {PAGE.relative_to(ROOT)}, from {RECORD.relative_to(ROOT)}")
    return int(len(failed(record)) > 0)


def renewed(record: pd.DataFrame, notes: pd.DataFrame) -> pd.DataFrame:
    """Return the record with the comparisons of `notes` in place of earlier ones of the same quantities. Of several tests
    of one quantity, the one that found the largest difference counts."""
    fresh = notes.sort_values("difference", ascending=False, kind="stable", na_position="first")
    fresh = fresh.assign(test=fresh["test"].str.split("[").str[0], commit=describe()["commit"])
    both = pd.concat([fresh, record]).drop_duplicates(QUANTITY)
    return both.sort_values(QUANTITY, kind="stable")


def failed(record: pd.DataFrame) -> pd.DataFrame:
    """Return the lines whose difference exceeds the tolerance or is NaN."""
    return record[~(record["difference"] <= record["tolerance"])]  # NaN fails


def shown(lines: pd.DataFrame) -> str:
    """Return the largest difference of `lines` as docs/FIDELITY.md prints it, marked where one exceeds its tolerance."""
    if len(wrong := failed(lines)):
        return f"**differs: {wrong['difference'].max():.2g}**"
    largest = lines["difference"].max()
    return "exact" if largest == 0 else f"{largest:.1g}"


def page(record: pd.DataFrame) -> str:
    """Return the text of docs/FIDELITY.md with the tables of `record`."""
    figure_2 = record[(record["kind"] == "cell") & record["row"].str.startswith("fig2")]
    figure_2 = figure_2.assign(aspect=figure_2["what"].str.split(":").str[0])
    panels = [
        [row, *(shown(part) if len(part := lines[lines["aspect"] == aspect]) else "" for aspect in ASPECTS)]
        for row, lines in figure_2.groupby("row")
    ]
    # The eight cells share most quantities; the names of methods, seeds and settings are left to the CSV.
    quantity = figure_2["what"].str.replace(r"(?<=tuned: ).*", "every value", regex=True)
    grouped = figure_2.assign(quantity=quantity).sort_values("quantity", kind="stable")
    methods = [
        [row, variant_of(row), len(lines), shown(lines), tests_of(lines)]
        for row, lines in record[record["kind"] == "method"].groupby("row", sort=False)
    ]
    others = record[~record["row"].str.startswith("fig2") & (record["kind"] != "method")]
    head = ["largest difference", "allowed", "test"]
    found = {
        "panels": (["panel", *ASPECTS], panels),
        "quantities": (["quantity", *head], compared_rows(grouped, ["quantity"])),
        "methods": (["method", "variant", "quantities", head[0], "test"], methods),
        "others": (
            ["experiment", "quantity", *head],
            compared_rows(others.sort_values(["row", "what"]), ["row", "what"]),
        ),
    }
    made = {name: partial(table, *each) for name, each in found.items()}
    return fill(PAGE.read_text(encoding="utf-8"), {"table": made})


def variant_of(method: str) -> str:
    """Return "official" if the method has a variant of that name, which is then the one compared."""
    return "official" if "official" in variants(method) else "the same in both"


def compared_rows(record: pd.DataFrame, by: list[str]) -> list[list[str]]:
    """Return one row of cells per value of the columns `by`: these, then difference, tolerance and tests."""
    return [
        [*names, shown(lines), f"{lines['tolerance'].max():.1g}", tests_of(lines)]
        for names, lines in record.groupby(by, sort=False)
    ]


def tests_of(lines: pd.DataFrame) -> str:
    """Return the names of the tests behind `lines`, as Markdown."""
    return ", ".join(f"`{name.removeprefix('tests/')}`" for name in lines["test"].unique())


def table(head: list[str], rows: list[list[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
