"""Table and figure of one sweep, with a list of the runs that are missing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import braille, claims, estimates, names, plot, tables
from analysis.figures import fig2, probes
from analysis.plot import plt
from analysis.rendering import markdown, p_text, plain, spread
from analysis.runs import Results, load, settings
from fire_core.errors import UserError
from fire_core.files import write_atomic
from harness.config import sweeps
from harness.runs.folders import refuse_link
from harness.status import with_missing

NOTE = (
    "Intervals are 95 %, Student's t over seeds; differences are paired by seed (same data order, same first weights). The "
    "p-values are corrected over the comparisons of a panel after Holm (docs/concepts/statistics.md)."
)

SHOWN = 2  # panels whose curves are shown on a terminal


def show(options: argparse.Namespace) -> int:
    """Print and write the tables and the figure of `options.experiment`. Return 1 if runs failed, are missing or log
    no known measure, else 0."""
    names = list(dict.fromkeys(comma_list(",".join(options.experiment))))
    if not names:
        raise UserError("--experiment is empty: name an experiment")
    size = options.size or "small"
    results = load(options.root, names, size)
    frame = estimates.frame(results)
    ends = frame[frame["kind"] == "result"]
    shown = [(part, rows) for part in settings(results) if len(rows := estimates.of(ends, part))]
    expected, wrong = (comma_list(options.methods), whole_numbers(options.seeds)), list[str]()
    for name in names:  # where an experiment sweeps its own settings, labels are not the names of methods
        wrong += absent(results.select(experiment=name), *(([], []) if sweeps(name) else expected))
        if name not in {part.first["experiment"] for part, _ in shown}:
            ran = name in set(results.finished["experiment"])
            reason = "its runs log no known measure" if ran else f"no finished run of size {size}"
            wrong.append(f"{name}: {reason}")
    if shown:
        folder = names[0] if len(names) == 1 else f"summary/{'+'.join(names)[:120]}"
        home = Path(options.root) / folder / size
        if not options.out:
            refuse_link(home)
        out, parts = Path(options.out or home), [part for part, _ in shown]
        out.mkdir(parents=True, exist_ok=True)
        text = "\n".join(text_of(*each) for each in shown) + "\n" + NOTE + "\n"
        write_atomic(out / "table.md", text)
        csv = frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")
        write_atomic(out / "estimates.csv", csv)
        [picture, _] = plot.save(probes.draw(parts), out / "figure", ["png"], probes.CAPTION, parts)
        print(text)
        if sys.stdout.isatty():
            print("\n\n".join(curves(part) for part in parts[:SHOWN]) + "\n")
        print(f"table: {out / 'table.md'}\nestimates: {out / 'estimates.csv'}\nfigure: {picture}")
        none = (
            "no verdict: no comparison that is judged is between two of these methods at their own settings"
        )
        print("\n".join(sentences(claims.verdicts(results, "all"))) or none)
    for problem in results.problems:
        print(f"left out: {plain(problem)}", file=sys.stderr)
    for line in wrong:
        print(f"not done: {line}", file=sys.stderr)
    return 1 if wrong else 0


def curves(part: Results) -> str:
    """Return the curves of one panel of the figure, means over the seeds, as characters: of the methods of interest or, if
    there are none, of the first six."""
    _, axis = plt.subplots()
    drawn, looks = probes.draw_panel(axis, part), names.looks(part)
    if part.first["figure"] == "fig2a":  # whose panel shows two methods as levels
        drawn = plot.draw_curves(axis, fig2.panel_data(part), looks)
    title = (
        f"{axis.get_title(loc='left') or axis.get_title()}: {axis.get_ylabel()} against {axis.get_xlabel()}"
    )
    plt.close(axis.figure)
    labels = list(dict.fromkeys(drawn["label"]))
    shown = [label for label in labels if label in plot.INTEREST] or labels[:6]
    points = {label: drawn[drawn["label"] == label].dropna(subset=["mean"]) for label in shown}
    lines = {
        looks[label].name: (rows["x"].to_list(), rows["mean"].to_list())
        for label, rows in points.items()
        if len(rows)
    }
    return f"{' '.join(title.split())}\n{braille.chart(lines)}"


def text_of(part: Results, rows: pd.DataFrame) -> str:
    """Return one setting as Markdown: a heading, and a table per measure."""
    blocks = [f"## {part.first['experiment']}: {names.one_line(part)}\n"]
    for metric, group in rows.groupby("metric", sort=False):
        title = group["measure"].iloc[0]
        blocks.append(f"{title[0].upper()}{title[1:]}\n\n{markdown(tables.end_table(rows, metric))}\n")
    return "\n".join(blocks)


def sentences(compared: pd.DataFrame) -> list[str]:
    """Return a sentence for each comparison of FIRE with `none` and for each other claim about the sweep's panels, by the
    rule of the repository applied to the seeds of the sweep."""
    against_none = (compared["better"] == "fire") & (compared["worse"] == "none")
    told = []
    for row in compared[(compared["kind"] == "claims") | against_none].to_dict("records"):
        gain = spread(row["gain"], row["low"], row["high"], row["decimals"], sign=True)
        unknown = "plasticity lost? run full_reset with at least two of the seeds"
        if row["figure"].startswith("fig4"):
            unknown = "not judged, because too few seeds have a return of random actions above 0"
        if row["seeds"] < 2:
            unknown = f"{['no seed', 'one seed'][row['seeds']]} decides nothing"
        said = unknown if row["verdict"] == "open" else row["verdict"]
        p = "" if pd.isna(row["p_holm"]) else f", p {p_text(row['p_holm'])} corrected"
        seeds = f"{row['seeds']} seed{'s' if row['seeds'] != 1 else ''}"
        told.append(f"{row['experiment']}: {tables.claim_text(row)}: {said} (gain {gain}{p}, {seeds})")
    return told


def absent(results: Results, methods: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return the expected runs that are not done, one line each. `harness.status.with_missing` says which runs are
    expected."""
    rows = with_missing(results.runs.to_dict("records"), methods, seeds)
    return [
        f"{row['experiment']} {row['label']} seed {row['seed']}: {row['status']}"
        for row in rows
        if row["status"] != "done"
    ]


def comma_list(text: str) -> list[str]:
    """Return the items of a text, which commas or spaces separate."""
    return [item.strip() for item in text.replace(" ", ",").split(",") if item.strip()]


def whole_numbers(text: str) -> list[int]:
    """Return the whole numbers of a comma list. Raises UserError for anything else."""
    try:
        return [int(item) for item in comma_list(text)]
    except ValueError:
        raise UserError(f"--seeds {text!r}: give whole numbers separated by commas, as in 1,2,3") from None
