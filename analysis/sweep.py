"""Table and figure of one sweep, with a list of the runs that are missing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import estimates, plot, probes, tables
from analysis.rendering import difference_text, markdown
from analysis.runs import Results, load, settings
from harness.status import comma_list, whole_numbers, with_missing

NOTE = (
    "Intervals are 95 %, Student's t over seeds; differences are paired by seed (same data order, same first weights). The "
    "p-values are corrected over each table after Holm; a difference with p below 0.05 is unlikely to be chance."
)


def show(options: argparse.Namespace) -> int:
    """Print and write the tables and the figure of `options.experiment`. Return 1 if runs failed, are missing or log
    no known measure, else 0."""
    names = list(dict.fromkeys(comma_list(",".join(options.experiment))))
    size = options.size or "small"
    results = load(options.root, names, size)
    frame = estimates.frame(results)
    ends = frame[frame["kind"] == "result"]
    shown = [(part, rows) for part in settings(results) if len(rows := estimates.of(ends, part))]
    wrong = absent(results, comma_list(options.methods), whole_numbers(options.seeds))
    for name in names:
        if name not in {part.first["experiment"] for part, _ in shown}:
            logged = name in set(results.finished["experiment"])
            wrong.append(
                f"{name}: {'its runs log no known measure' if logged else f'no finished run of size {size}'}"
            )
    if shown:
        home = (
            Path(options.root) / (names[0] if len(names) == 1 else f"summary/{'+'.join(names)[:120]}") / size
        )
        out = Path(options.out or home)
        out.mkdir(parents=True, exist_ok=True)
        text = "\n".join(text_of(*each) for each in shown) + "\n" + NOTE + "\n"
        (out / "table.md").write_text(text, encoding="utf-8")
        frame.to_csv(out / "estimates.csv", index=False, float_format="%.6g", lineterminator="\n")
        parts = [part for part, _ in shown]
        [picture, _] = plot.save(probes.draw(parts), out / "figure", ["png"], probes.CAPTION, parts)
        print(f"{text}\ntable: {out / 'table.md'}\nestimates: {out / 'estimates.csv'}\nfigure: {picture}")
        print("\n".join(filter(None, (sentence(rows) for _, rows in shown))))
    for problem in results.problems:
        print(f"left out: {problem}", file=sys.stderr)
    for line in wrong:
        print(f"not done: {line}", file=sys.stderr)
    return 1 if wrong else 0


def text_of(part: Results, rows: pd.DataFrame) -> str:
    """Return one setting as Markdown: a heading, and a table per measure."""
    blocks = [f"## {part.first['experiment']}: {plot.title(part).replace(chr(10), ', ')}\n"]
    for metric, group in rows.groupby("metric", sort=False):
        title = group["measure"].iloc[0]
        blocks.append(f"{title[0].upper()}{title[1:]}\n\n{markdown(tables.end_table(rows, metric))}\n")
    return "\n".join(blocks)


def sentence(rows: pd.DataFrame) -> str:
    """Return a sentence that compares FIRE, or the best method if FIRE was not run, with the run without intervention
    in the headline measure."""
    rows = rows[rows["headline"] & (rows["reference"] == "none")]
    if rows.empty:
        return ""
    compared = estimates.decide(rows).set_index("label")
    best = "idxmax" if rows["higher_is_better"].iloc[0] else "idxmin"
    label = "fire" if "fire" in compared.index else compared["mean"].agg(best)
    row = compared.loc[label]
    told = f"is {row['word']} than no intervention, by" if row["word"] else "differs from no intervention by"
    chance = "" if row["word"] else f", which may be chance (corrected for {len(compared)} comparisons)"
    seeds = "1 seed" if row["pairs"] == 1 else f"{row['pairs']} seeds"
    difference = f"{told} {difference_text(row)} ({row['measure']}; {seeds}){chance}"
    return f"{row['experiment']}: {plot.look(label).name} {difference}"


def absent(results: Results, methods: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return the expected runs that are not done, one line each. `harness.status.with_missing` says which runs are
    expected."""
    rows = with_missing(results.runs.to_dict("records"), methods, seeds)
    return [
        f"{row['experiment']} {row['label']} seed {row['seed']}: {row['status']}"
        for row in rows
        if row["status"] != "done"
    ]
