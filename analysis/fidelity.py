"""Comparison with the official code: writes FIDELITY.md and prints the largest difference of each cell and method.

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
from pathlib import Path

import pandas as pd

from fire_core.errors import UserError
from fire_core.methods import variants
from harness.runs.machine import describe

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "analysis" / "results" / "fidelity.csv"
PAGE = ROOT / "FIDELITY.md"
QUANTITY = ["kind", "row", "what"]
ASPECTS = ("net", "data", "schedule", "boundary", "optimizer", "tuned", "evaluation")
TESTS = (  # in addition to tests/test_official_*.py; these compare with something other than the official code
    "tests/test_language_model.py::test_loss_equals_transformers_gpt2_at_start_and_after_20_steps",
    "tests/test_language_model.py::test_paper_model_has_73_targets_and_124_million_weights",
    "tests/test_language_training.py::test_paper_settings_number_by_number",
    "tests/test_dqn.py::test_one_update_by_hand",
    "tests/test_dqn.py::test_paper_size_is_the_published_setting",
    "tests/test_sac_update.py::test_one_update_equals_the_reference",
    "tests/test_sac_train.py::test_paper_settings_number_by_number",
)
INTRODUCTION = """# Agreement with the official code

This page shows how closely the suite follows the authors' code. At `size=paper`, every panel of Figure 2 and every method in
it is compared with numbers that were recorded from that code ([tests/official](tests/official/README.md)). Nothing was
recorded for language and reinforcement learning; their section says what they are compared with instead.

Each number below is the largest difference that a test measured, and *exact* means 0. Differences near 1e-7 come from
rounding in float32, those near 1e-18 from rounding in float64. [DEVIATIONS.md](DEVIATIONS.md) lists the intended differences
and their switches.

`python -m analysis fidelity --run` runs the tests and rewrites this page.
[analysis/results/fidelity.csv](analysis/results/fidelity.csv) has every comparison, with its tolerance and the commit.
"""
COLUMNS = """The columns compare:

- *net*: logits, loss, gradients, running statistics, and the draw of the initial weights
- *data*: which images belong to which stage, the sizes of stages and batches, and the normalisation
- *schedule*: the learning rate in every epoch, for Adam and for Muon's two groups
- *boundary*: which methods act in which stage, whether the net is then in training or evaluation mode, and the buffers that
  a full reset restores
- *optimizer*: whether each stage begins with a new one, its settings, and the norm of the clipped gradients
- *tuned*: every tuned value of every method
- *evaluation*: the pixels of all test images as the net sees them, in one pass, before ReDo acts

The largest differences in *net* are those of gradients. Where the input of a ReLU is zero up to rounding, its gradient is
passed on or not, depending on the CPU's instructions, and the gradients of ResNet-18 and VGG-16 then change by up to 1e-3
(1e-2 in a probe). After the pass of zeros at the start, VGG-16's channels have no variance, and batch norm multiplies
rounding errors by 1 / sqrt(eps) in every layer: from the fifth layer on, its statistics are not compared. The next table
shows the logits in rows of their own.

*Optimizer*, *evaluation* and the net at a *boundary* are measured while a narrow net of the same architecture trains on a
few images in the protocol of the panel.
"""
QUANTITIES = """Rows that name `stages` count those that differ. A gradient probe is the product of a gradient with a fixed
vector; probes and gradient norms are compared relative to the gradient's norm.
"""
OTHERS = """## Language and reinforcement learning

No numbers were recorded from the official code of these parts. The suite is compared with the following instead:

- *Observations of the games* (`fig4a_*`): the official order of operations, rebuilt from gymnasium and OpenCV, over 400
  steps of each game.
- *Observation statistics and number of updates* (`fig4b`): the official rules, computed afterwards from the observations of
  a run. Differences in a mean are in standard deviations, those in a variance are relative.
- *Weights after one update, and the language model*: an implementation by hand, or that of another library.
- *Settings*: the values in the released scripts, as we read them. The rows count the settings that differ.
"""
METHODS = """Some methods have two variants ([DEVIATIONS.md](DEVIATIONS.md#methods)). The one compared here is `official`,
which follows the authors' code.
"""
UNKNOWN = """## What is not known

- **The seeds of the figures.** The paper does not say which seeds its figures show. Seeds 1 to 3 select the same images as
  in the official code. The initial weights and the order of batches come from our own random streams, so curves agree in
  distribution but not point by point.
- **The appendix of the paper.** Its settings were not available to us; the tuned values are those of the released run
  scripts.
- **Training in language, DQN and SAC.** No official curves, weights or losses were recorded to compare with.
- **The humanoid environments.** The authors used their own fork of humanoid-bench; its environment files are not in the
  release.
- **Plasticity injection in SAC.** The paper's figure shows it, but the released code does not have it.
  [DEVIATIONS.md](DEVIATIONS.md) describes ours.
- **Figure 7.** Neither the number of steps of Muon's iteration nor the paper's results are known to us.
"""


def main(given: Sequence[str] | None = None) -> int:
    """Print the comparison with the official code and write FIDELITY.md, with --run after renewing the record. Return
    1 if a difference exceeds its tolerance, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis fidelity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", action="store_true", help="run the tests and replace the record")
    options = parser.parse_args(given)
    if options.run:
        record = compare()
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
        record = pd.read_csv(RECORD)
    for (kind, row), lines in record.groupby(["kind", "row"], sort=False):
        worst = lines.loc[lines["difference"].idxmax()]
        print(
            f"{kind:<9} {row:<26} {shown(lines):<22} {len(lines):>4} quantities, largest in {worst['what']}"
        )
    PAGE.write_text(page(record), encoding="utf-8")
    print(f"\nwritten to {PAGE.relative_to(ROOT)}, from {RECORD.relative_to(ROOT)}")
    return int(bool(len(failed(record))))


def compare() -> pd.DataFrame:
    """Run the tests and return one line per quantity, with the largest difference that any test measured."""
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_official_*.py"))
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
    return record.assign(commit=describe()["commit"])


def not_in(record: pd.DataFrame, earlier: pd.DataFrame) -> pd.DataFrame:
    """Return the quantities of `earlier` that `record` does not have, with the columns QUANTITY."""
    both = earlier[QUANTITY].merge(record[QUANTITY], how="left", indicator=True)
    return both.loc[both["_merge"] == "left_only", QUANTITY]


def failed(record: pd.DataFrame) -> pd.DataFrame:
    """Return the lines whose difference exceeds the tolerance or is NaN."""
    return record[~(record["difference"] <= record["tolerance"])]  # NaN fails


def shown(lines: pd.DataFrame) -> str:
    """Return the largest difference of `lines` as FIDELITY.md prints it, marked where one exceeds its tolerance."""
    if len(wrong := failed(lines)):
        return f"**differs: {wrong['difference'].max():.2g}**"
    largest = lines["difference"].max()
    return "exact" if largest == 0 else f"{largest:.1g}"


def page(record: pd.DataFrame) -> str:
    """Return the text of FIDELITY.md."""
    cells = record[record["kind"] == "cell"]
    figure_2 = cells[cells["row"].str.startswith("fig2")]
    figure_2 = figure_2.assign(aspect=figure_2["what"].str.split(":").str[0])
    blocks = [INTRODUCTION, "## Panels of Figure 2\n"]
    rows = [
        [row, *(shown(part) if len(part := lines[lines["aspect"] == aspect]) else "" for aspect in ASPECTS)]
        for row, lines in figure_2.groupby("row")
    ]
    blocks.append(table(["panel", *ASPECTS], rows))
    blocks += [COLUMNS, "### The quantities behind the columns, over all panels\n", QUANTITIES]
    # The eight cells share most quantities; the names of methods, seeds and settings are left to the CSV.
    grouped = figure_2.assign(
        quantity=figure_2["what"].str.replace(r"(?<=tuned: ).*", "every value", regex=True)
    )
    rows = [
        [quantity, shown(lines), f"{lines['tolerance'].max():.1g}", tests_of(lines)]
        for quantity, lines in grouped.groupby("quantity")
    ]
    head = ["quantity", "largest difference", "allowed", "test"]
    blocks += [table(head, rows), "## Methods\n", METHODS]
    methods = record[record["kind"] == "method"]
    rows = [
        [row, variant_of(row), str(len(lines)), shown(lines), tests_of(lines)]
        for row, lines in methods.groupby("row", sort=False)
    ]
    blocks.append(table(["method", "variant", "quantities", *head[1:2], "test"], rows))
    others = record[~record["row"].str.startswith("fig2") & (record["kind"] != "method")]
    blocks += [
        OTHERS,
        table(["experiment", *head], single_rows(others.sort_values(["row", "what"]))),
        UNKNOWN,
    ]
    return "\n".join(blocks)


def variant_of(method: str) -> str:
    """Return "official" if the method has a variant of that name, which is then the one compared."""
    return "official" if "official" in variants(method) else "the same in both"


def single_rows(record: pd.DataFrame) -> list[list[str]]:
    """Return one row of cells per quantity: cell, quantity, difference, tolerance, tests."""
    return [
        [row, what, shown(lines), f"{lines['tolerance'].max():.1g}", tests_of(lines)]
        for (row, what), lines in record.groupby(["row", "what"], sort=False)
    ]


def tests_of(lines: pd.DataFrame) -> str:
    """Return the names of the tests behind `lines`, as Markdown."""
    return ", ".join(f"`{name.removeprefix('tests/')}`" for name in lines["test"].unique())


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
