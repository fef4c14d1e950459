"""Table and figure of one sweep, with a list of the runs that are missing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import braille, claims, estimates, measures, names, plot, report, tables
from analysis.figures import CAPTIONS, curves
from analysis.rendering import p_text, plain, spread
from analysis.runs import Results, load, settings
from fire_core.errors import UserError
from fire_core.files import write_atomic
from harness.config import sweeps
from harness.status import with_missing

NOTE = (
    "Intervals are 95 %, Student's t over seeds; differences are paired by seed (same data order, same first weights). The "
    "p-values are corrected over the comparisons of a panel after Holm (docs/concepts/statistics.md)."
)
SHOWN = 2  # panels whose curves are shown on a terminal
NO_VERDICT = "no verdict: no comparison that is judged is between two of these methods at their own settings"


def show(options: argparse.Namespace) -> int:
    """Print and write the tables and the figure of `options.experiment`. Return 1 if runs failed, are missing or log
    no known measure, else 0."""
    experiments = list(dict.fromkeys(comma_list(",".join(options.experiment))))
    if not experiments:
        raise UserError("--experiment is empty: name an experiment")
    size = options.size or "small"
    results = load(options.root, experiments, size)
    frame = estimates.frame(results)
    ends = frame[frame["kind"] == "result"]
    shown = [(part, rows) for part in settings(results) if len(rows := estimates.of(ends, part))]
    expected, wrong = (comma_list(options.methods), whole_numbers(options.seeds)), list[str]()
    for (
        name
    ) in experiments:  # where an experiment sweeps its own settings, labels are not the names of methods
        wrong += absent(results.select(experiment=name), *(([], []) if sweeps(name) else expected))
        if name not in {part.first["experiment"] for part, _ in shown}:
            ran = name in set(results.finished["experiment"])
            reason = "its runs log no known measure" if ran else f"no finished run of size {size}"
            wrong.append(f"{name}: {reason}")
    if shown:
        folder = experiments[0] if len(experiments) == 1 else f"summary/{'+'.join(experiments)[:120]}"
        home = Path(options.root) / folder / size
        out, parts = Path(options.out or home), [part for part, _ in shown]
        out.mkdir(parents=True, exist_ok=True)
        texts = [
            f"## {part.first['experiment']}: {names.one_line(part)}\n{report.sections(rows)}"
            for part, rows in shown
        ]
        text = "\n".join(texts)
        write_atomic(out / "table.md", f"{text}\n{NOTE}\n")
        write_atomic(out / "estimates.csv", estimates.csv(frame))
        figure = curves.draw_probes(parts)
        [picture, _] = plot.save(figure, out / "figure", ["png"], CAPTIONS["probes"], parts)
        print(text)
        if sys.stdout.isatty():
            print("\n\n".join(chart(part) for part in parts[:SHOWN]) + "\n")
        print(f"figure: {picture}, beside table.md and estimates.csv")
        print("\n".join(sentences(claims.verdicts(results, "all"))) or NO_VERDICT)
    for problem in results.problems:
        print(f"left out: {plain(problem)}", file=sys.stderr)
    for line in wrong:
        print(f"not done: {line}", file=sys.stderr)
    return 1 if wrong else 0


def chart(part: Results) -> str:
    """Return the curves of one setting, means over the seeds, as characters: of the methods of interest or, if there are
    none, of the first six."""
    measure, looks = measures.of(part)[0], names.looks(part)
    rows, unit, *_ = curves.points(part.plain, measure)
    labels = [label for label in looks if label in set(rows["label"])]
    shown = [label for label in labels if label in plot.INTEREST] or labels[:6]
    bands = {label: plot.band(rows[rows["label"] == label]).dropna(subset=["mean"]) for label in shown}
    lines = {
        looks[label].name: (band["x"].to_list(), band["mean"].to_list()) for label, band in bands.items()
    }
    return f"{names.one_line(part)}: {measure.axis} against {unit}\n{braille.chart(lines)}"


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
    """Return the expected runs (see `harness.status.with_missing`) that are not done, one line each."""
    return [
        f"{row['experiment']} {row['label']} seed {row['seed']}: {row['status']}"
        for row in with_missing(results.runs.to_dict("records"), methods, seeds)
        if row["status"] != "done"
    ]


def comma_list(text: str) -> list[str]:
    """Return the items of a text, which commas or spaces separate."""
    return text.replace(",", " ").split()


def whole_numbers(text: str) -> list[int]:
    """Return the whole numbers of a comma list. Raises UserError for anything else."""
    try:
        return [int(item) for item in comma_list(text)]
    except ValueError:
        raise UserError(f"--seeds {text!r}: give whole numbers separated by commas, as in 1,2,3") from None
