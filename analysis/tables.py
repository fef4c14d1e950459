"""REPRODUCED.md, whose numbers are never typed, and every table of results as Markdown, CSV and LaTeX.

python -m analysis.tables --write REPRODUCED.md          from analysis/results
python -m analysis.tables --root runs --out runs/tables  every table in three formats
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import yaml

from analysis import curves, measures, style
from analysis.benchmark_tables import RESULTS, tables_of
from analysis.figure import experiment_of, open_results, plain, with_finished_runs
from analysis.load import Results, write_frame
from analysis.result_tables import (
    ablation_table,
    boundary_table,
    claim_table,
    contrast_table,
    cost_table,
    end_value_table,
    is_waiting,
    learning_table,
    not_run,
    provenance_lines,
)
from analysis.tabulate import latex, markdown
from fire_core.errors import UserError

CONF = Path(__file__).resolve().parents[1] / "conf"
HEAD = """# Reproduced

For each claim of the paper: its number, ours, at which size and on which data, how sure, and how to run it again.
Written by `python -m analysis.tables --write REPRODUCED.md` from `analysis/results/`; do not edit.

How to read it

- **Size** `paper` is the paper's own setting; `small` is a setting for a laptop on data that ships with the project.
  Only `paper` can reproduce a number of the paper. At `small` the question is whether the same method wins.
- **Paper** columns are read off the paper's figures (`analysis/paper/`), on the paper's data. The difference between
  a `small` result and the paper's number says nothing by itself.
- **Intervals** are 95 %: Student's t over seeds below 10 seeds, percentile bootstrap from 10 on; one seed has none.
  Differences are paired by seed: same data order, same first weights. With 3 seeds only large effects can be told
  from chance, and one in twenty of many intervals misses its truth.
- What differs from the paper or its code on purpose: `DEVIATIONS.md`.
"""


SAID = {
    "FIRE is better": "FIRE is better than",
    "FIRE is worse": "FIRE is worse than",
    "cannot be told apart": "FIRE cannot be told apart from",
    "one seed: nothing can be said": "one seed, nothing can be said against",
}
CLAIM_NOTE = """Each row: two methods, the one that is said to end better first. `paper` and `ours` give both end values; the
gain is positive when it falls as claimed. *holds* and *the opposite holds*: the interval of the gain excludes 0 at
size small, which speaks for or against the claim there and does not reproduce its number. *cannot be told apart*: it
includes 0.
"""


UNTUNED_NOTE = "\\* at its default settings: nothing of it was tuned for this experiment."
LEARNING_NOTE = """
Raw returns in the half that all methods share, mean over the last tenth of its steps, against random actions under the same
protocol. Means over seeds with 95 % t intervals; the gain is paired by seed. Its interval excludes 0 where learning shows.
"""
COST_NOTE = """
Seconds by the clock, means over seeds. Training leaves out evaluations, but for DQN and SAC, whose figure holds them.
"""
CONTROL_NOTE = """Rescale keeps the old directions and takes FIRE's norm; random orthogonal is an isometry with nothing of
the old weights; FIRE exact is the isometry that FIRE's iterations stop short of. FIRE minus each, paired by seed; for
losses less is better.
"""


def controls(results: Results) -> str:
    """FIRE against its controls in every setting that ran them, and what that says of where the gain comes from."""
    rows, gains, norm_alone, chance_alone = [], 0, 0, 0
    for part in curves.settings(results):
        if not measures.measures_of(part, experiment_of(part)):
            continue
        table = contrast_table(plain(part)).set_index("FIRE minus")
        names = {key: style.look(key).name for key in ("none", "rescale", "random_orthogonal", "fire_exact")}
        if names["rescale"] not in table.index and names["random_orthogonal"] not in table.index:
            continue
        cells = {key: table.loc[name] if name in table.index else None for key, name in names.items()}
        row = {"setting": experiment_of(part)}
        for key, cell in cells.items():
            row[f"minus {names[key]}"] = "-" if cell is None else cell["difference [95 %]"]
        rows.append(row)
        if cells["none"] is not None and cells["none"]["in words"] == "FIRE is better":
            gains += 1
            norm_alone += cells["rescale"] is not None and cells["rescale"]["in words"] != "FIRE is better"
            chance_alone += (
                cells["random_orthogonal"] is not None
                and cells["random_orthogonal"]["in words"] != "FIRE is better"
            )
    if not rows:
        return "No controls run yet."
    return (
        f"FIRE is better than none in {gains} of {len(rows)} settings with controls. In {norm_alone} of those {gains} it "
        f"is not better than rescale, so that the norm alone may account for the gain; in {chance_alone} it is not better "
        f"than a random isometry.\n\n{markdown(pd.DataFrame(rows))}"
    )


def untuned_rivals(part: Results) -> list[str]:
    """Methods with settings that experiments tune (`tuned` in conf/experiment), of which this experiment tunes none."""
    tuned = (yaml.safe_load(_text(f"experiment/{experiment_of(part)}.yaml")) or {}).get("tuned") or {}
    rivals = sorted(set(part.finished["method"]) - set(tuned))
    return [rival for rival in rivals if f"tuned.{rival}." in _text(f"method/{rival}.yaml")]


def _text(name: str) -> str:
    """A file of conf/, "" where somebody else's runs name one that is not here."""
    path = CONF / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def in_short(results: Results) -> list[str]:
    """One line a setting: what FIRE's paired differences to the other methods allow to say."""
    lines = []
    for part in curves.settings(results):
        if not measures.measures_of(part, experiment_of(part)):
            continue
        table = contrast_table(plain(part))
        untuned = {style.look(label).name for label in untuned_rivals(part)}
        table["FIRE minus"] = [f"{name}{'*' * (name in untuned)}" for name in table["FIRE minus"]]
        words = {text: list(rows["FIRE minus"]) for text, rows in table.groupby("in words", sort=False)}
        said = "; ".join(f"{SAID[text]} {', '.join(names)}" for text, names in words.items())
        first = part.finished.iloc[0]
        headline = measures.measures_of(part, experiment_of(part))[0].title
        if not said:
            continue
        place = f"{first['experiment']} (size {first['size']}, {first['data']}, {curves.seeds_text(plain(part).finished)})"
        lines.append(f"- **{place}**, {headline}: {said}.")
    return lines


def reproduced(results: Results, benchmarks: Path = RESULTS) -> str:
    """The text of REPRODUCED.md: `results`, then the benchmarks whose CSV files lie in that folder."""
    finished = results.finished
    blocks = [HEAD]
    for size, group in finished.groupby("size"):
        blocks.append(f"Runs at size {size}: {len(group)} in {group['experiment'].nunique()} experiments.\n")
    blocks += ["## In short\n", *in_short(results), f"\n{UNTUNED_NOTE}"]
    blocks += ["\n## Isometry, norm or randomness: the controls\n", CONTROL_NOTE, controls(results)]
    blocks += ["\n## Claims\n", CLAIM_NOTE]
    table = claim_table(results)
    waiting = is_waiting(table)
    blocks += [markdown(table[~waiting]), "\nClaims of the paper that no run here speaks to:\n"]
    blocks.append(markdown(table[waiting][["panel", "better > worse", "paper", "at size paper", "source"]]))
    blocks.append("\n## End values\n")
    for part in curves.settings(results):
        if not measures.measures_of(part, experiment_of(part)):
            continue
        first = part.finished.iloc[0]
        blocks.append(f"### {first['experiment']}, size {first['size']}, data {first['data']}\n")
        blocks.append(provenance_lines(part) + "\n")
        table = end_value_table(part)
        for title, rows in table.groupby("measure", sort=False):
            blocks.append(f"{title}\n\n{markdown(rows.drop(columns='measure'))}\n")
        contrasts = contrast_table(part)
        if len(contrasts):
            blocks.append(f"FIRE against each other method, first measure above\n\n{markdown(contrasts)}\n")
    figures = sorted((benchmarks / "figures").glob("*.png"))
    if figures:
        blocks.append("\n## Figures\n")
        blocks += [f"![{path.stem}](analysis/results/figures/{path.name})\n" for path in figures]
    for title, note, table in (
        ("Right after the boundary: how orthogonal, how far moved", "", boundary_table(results)),
        ("Learning before the boundary", LEARNING_NOTE, learning_table(results)),
        ("Cost", COST_NOTE, cost_table(results)),
        ("Ablations: one setting changed", "", ablation_table(results)),
        ("Not run at the paper's size", "", not_run(results)),
    ):
        blocks.append(f"\n## {title}\n{note}")
        blocks.append(markdown(table) if len(table) else "Nothing run yet.")
    blocks.append("\n## Benchmarks\n")
    for benchmark, table, origin in tables_of(benchmarks):
        blocks.append(f"### {benchmark.title}\n\n{benchmark.legend} {origin}\n\n{markdown(table)}\n")
    return "\n".join(blocks) + "\n"


def write_all(results: Results, out: Path, benchmarks: Path = RESULTS) -> list[Path]:
    """Every table as .md, .csv and .tex, those of the benchmarks too."""
    ends = [end_value_table(p).assign(experiment=experiment_of(p), size=p.finished["size"].iloc[0],
            data=p.finished["data"].iloc[0]) for p in curves.settings(results) if len(p.metrics)]  # fmt: skip
    tables = {
        "claims": claim_table(results),
        "end_values": pd.concat(ends, ignore_index=True) if ends else pd.DataFrame(),
        "boundaries": boundary_table(results),
        "learning": learning_table(results),
        "costs": cost_table(results),
        "ablations": ablation_table(results),
        "not_run": not_run(results),
    }
    tables |= {benchmark.file: table for benchmark, table, _ in tables_of(benchmarks)}
    paths = []
    for name, table in tables.items():
        if len(table):
            paths.append(write_frame(table, out / f"{name}.csv"))
            tex = latex(table, name.replace("_", " "), f"tab:{name}")
            for ending, text in (("md", markdown(table) + "\n"), ("tex", tex)):
                path = out / f"{name}.{ending}"
                path.write_text(text, encoding="utf-8")
                paths.append(path)
    return paths


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.tables", description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="analysis/results", help="an export or a folder of runs")
    parser.add_argument("--write", default=None, metavar="FILE", help="write REPRODUCED.md to this file")
    parser.add_argument("--out", default=None, help="folder for every table as .md, .csv, .tex")
    options = parser.parse_args(given)
    try:
        results = with_finished_runs(open_results(options.root), options.root)
        if options.write:
            Path(options.write).write_text(reproduced(results), encoding="utf-8")
            print(options.write)
        for path in write_all(results, Path(options.out)) if options.out else []:
            print(path)
        if not options.write and not options.out:
            print(reproduced(results))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
