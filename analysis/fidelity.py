"""Comparison with the official code: fills docs/FIDELITY.md and prints the largest difference of each cell and method.

    python -m analysis fidelity          # from the committed record
    python -m analysis fidelity --run    # runs the tests and renews the record first, a few minutes on a laptop

The record is analysis/results/fidelity.csv, with one line per quantity that a test compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd

import vision.official  # noqa: F401 (registers the variants)
from analysis.rendering import fill
from fire_core.errors import UserError
from fire_core.methods import variants
from harness.runs.machine import describe

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "analysis" / "results" / "fidelity.csv"
PAGE = ROOT / "docs" / "FIDELITY.md"
QUANTITY = ["kind", "row", "what"]
ASPECTS = ("net", "data", "schedule", "boundary", "optimizer", "tuned", "evaluation")
TESTS = (  # in addition to tests/official/test_official_*.py; these compare with something other than the official code
    "tests/language/test_language_model.py::test_loss_equals_transformers_gpt2_at_start_and_after_20_steps",
    "tests/language/test_language_model.py::test_paper_model_has_73_targets_and_124_million_weights",
    "tests/language/test_language_training.py::test_paper_settings_number_by_number",
    "tests/rl/test_dqn.py::test_one_update_by_hand",
    "tests/rl/test_dqn.py::test_paper_size_is_the_published_setting",
    "tests/rl/test_sac_update.py::test_one_update_equals_the_reference",
    "tests/rl/test_sac_train.py::test_paper_settings_number_by_number",
)


def main(given: Sequence[str] | None = None) -> int:
    """Print the comparison with the official code and fill docs/FIDELITY.md, with --run after renewing the record. Return
    1 if a difference exceeds its tolerance or a test fails, else 0."""
    parser = argparse.ArgumentParser(prog="python -m analysis fidelity", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--run", action="store_true", help="run the tests and replace the record")
    options = parser.parse_args(given)
    if options.run:
        record, code = compare()
        if RECORD.exists() and len(lost := not_in(record, pd.read_csv(RECORD))):
            raise UserError(
                f"{len(lost)} quantities of {RECORD.name} were not compared, among them {', '.join(lost.iloc[0])}: "
                "tests were skipped or have changed. If they were skipped, install what `make test` installs; if they have "
                f"changed, delete {RECORD.name} first"
            )
        record.to_csv(RECORD, index=False)
    elif not RECORD.exists():
        raise UserError(f"{RECORD.relative_to(ROOT)} is missing: run python -m analysis fidelity --run")
    else:
        record, code = pd.read_csv(RECORD), 0
    for (kind, row), lines in record.groupby(["kind", "row"], sort=False):
        worst = lines.loc[lines["difference"].idxmax()]
        print(
            f"{kind:<9} {row:<26} {shown(lines):<22} {len(lines):>4} quantities, largest in {worst['what']}"
        )
    PAGE.write_text(page(record), encoding="utf-8")
    print(f"\nwritten to {PAGE.relative_to(ROOT)}, from {RECORD.relative_to(ROOT)}")
    return int(code != 0 or len(failed(record)) > 0)


def compare() -> tuple[pd.DataFrame, int]:
    """Run the tests and return (one line per quantity, with the largest difference that any test measured, the tests' exit
    code)."""
    tests = sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "official").glob("test_official_*.py")
    )
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "record.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", *tests, *TESTS]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"FIDELITY_RECORD": str(notes)})
        if not notes.exists():
            raise UserError(
                f"no test recorded a comparison (exit code {done.returncode}); see its output above"
            )
        lines = [json.loads(line) for line in notes.read_text().splitlines()]
    record = pd.DataFrame(lines).sort_values("difference", ascending=False, kind="stable")
    record["test"] = record["test"].str.split("[").str[0]
    record = record.drop_duplicates(QUANTITY).sort_values(QUANTITY, kind="stable")
    return record.assign(commit=describe()["commit"]), done.returncode


def not_in(record: pd.DataFrame, earlier: pd.DataFrame) -> pd.DataFrame:
    """Return the quantities of `earlier` that `record` does not have, with the columns QUANTITY."""
    both = earlier[QUANTITY].merge(record[QUANTITY], how="left", indicator=True)
    return both.loc[both["_merge"] == "left_only", QUANTITY]


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
