"""Comparison with the official code: fills docs/FIDELITY.md and prints what exceeds its tolerance.

    FIDELITY_RECORD=notes.jsonl python -m pytest tests/official tests/language tests/rl  # writes what they compare
    python -m analysis.fidelity notes.jsonl                                              # takes it into the record

The record is analysis/results/fidelity.csv.gz, with one line per quantity that a test compared.
"""

import sys
from collections.abc import Sequence

import pandas as pd

import vision.official  # noqa: F401 (registers the variants)
from analysis.rendering import markdown
from analysis.runs import RESULTS
from analysis.tables import ROOT, fill
from fire_core.errors import clean_exit
from fire_core.methods import variants
from harness.runs.machine import describe

RECORD = RESULTS / "fidelity.csv.gz"
PAGE = ROOT / "docs" / "FIDELITY.md"
QUANTITY = ["kind", "row", "what"]
HEAD = ("largest difference", "allowed", "test")
ASPECTS = ("net", "data", "schedule", "boundary", "optimizer", "tuned", "evaluation")


def main(given: Sequence[str]) -> int:
    """Take in the comparisons of a file and fill the page. Print what differs by too much, and return 1 if anything does."""
    record = pd.read_csv(RECORD)
    if given:
        record = renewed(record, pd.read_json(given[0], lines=True))
        record.to_csv(RECORD, index=False, compression={"method": "infer", "mtime": 0})
    PAGE.write_text(page(record), encoding="utf-8")
    for row in (wrong := failed(record)).itertuples():
        print(f"{row.kind} {row.row}: {row.what} differs: {row.difference:.2g}")
    print(f"{PAGE.relative_to(ROOT)} is written; {len(wrong)} of {len(record)} quantities differ")
    return int(len(wrong) > 0)


def renewed(record: pd.DataFrame, notes: pd.DataFrame) -> pd.DataFrame:
    """Return the record with the comparisons of `notes` in place of earlier ones of the same quantities. Of several tests
    of one quantity, the one that found the largest difference counts."""
    fresh = notes.sort_values("difference", ascending=False, kind="stable", na_position="first")
    fresh = fresh.assign(test=fresh["test"].str.split("[").str[0], commit=describe()["commit"])
    return pd.concat([fresh, record]).drop_duplicates(QUANTITY).sort_values(QUANTITY, kind="stable")


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
    figure_2, methods = record["row"].str.startswith("fig2"), record[record["kind"] == "method"]
    cells, others = record[figure_2], record[~figure_2 & (record["kind"] != "method")]
    others = others.sort_values(["row", "what"]).rename(columns={"row": "experiment", "what": "quantity"})
    # The eight cells share most quantities; the names of methods, seeds and settings are left to the CSV.
    quantity = cells["what"].str.replace(r"(?<=tuned: ).*", "every value", regex=True)
    cells = cells.assign(aspect=cells["what"].str.split(":").str[0], quantity=quantity)
    panels = summary(cells, "row", "aspect").pivot(index="row", columns="aspect", values=HEAD[0])
    compared = summary(methods.rename(columns={"row": "method"}), "method")
    official = compared["method"].map(lambda method: "official" in variants(method))
    compared["variant"] = official.map({True: "official", False: "the same in both"})  # what was compared
    quantities = summary(cells.sort_values("quantity", kind="stable"), "quantity")
    made = {
        "table panels": panels.fillna("").rename_axis("panel").reset_index()[["panel", *ASPECTS]],
        "table quantities": quantities[["quantity", *HEAD]],
        "table methods": compared[["method", "variant", "quantities", HEAD[0], HEAD[2]]],
        "table others": summary(others, "experiment", "quantity").drop(columns="quantities"),
    }
    return fill(PAGE.read_text(encoding="utf-8"), {name: markdown(each) for name, each in made.items()})


def summary(record: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Return one row per value of the columns `by`: the number of quantities, largest difference, tolerance and tests."""
    return pd.DataFrame(
        dict(zip(by, key))
        | {"quantities": len(lines), HEAD[0]: shown(lines), HEAD[1]: f"{lines['tolerance'].max():.1g}"}
        | {HEAD[2]: ", ".join(f"`{name.removeprefix('tests/')}`" for name in lines["test"].unique())}
        for key, lines in record.groupby(list(by), sort=False)
    )


if __name__ == "__main__":
    with clean_exit():
        sys.exit(main(sys.argv[1:]))
