"""The table and the figure at the end of a sweep.

    python -m analysis.summary --experiment random_label label_noise --size small --root runs

Exit code 1 if runs failed or are missing: they are named, the rest is shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from analysis import curves, measures, style
from analysis.folders import read_json, read_timing
from analysis.load import Results, load, write_frame
from analysis.stats import Estimate, estimate, paired_difference
from analysis.tabulate import markdown
from fire_core.errors import UserError

COLUMNS = [
    "experiment", "size", "data", "measure", "metric", "method", "label",
    "value", "low", "high", "seeds", "interval",
    "difference", "difference_low", "difference_high", "difference_seeds", "commit", "machine",
]  # fmt: skip


def summarise(part: Results, kind: str = "auto") -> pd.DataFrame:
    """One row a measure and label of one setting (experiment, size, data): mean, 95 % interval over seeds,
    paired difference to `none`."""
    experiment = part.finished["experiment"].iloc[0]
    curves.one_setting(part, experiment)
    rows = []
    for measure in measures.measures_of(part, experiment):
        ends = measures.end_values(part.metrics, measure)
        labels = style.ordered(ends["label"].unique())
        for label in labels:
            values = measures.by_seed(ends, label)
            runs = part.finished[part.finished["label"] == label]
            base = measures.baseline_of(label, labels)
            gap = None
            if base is not None and base != label:
                gap = paired_difference(values, measures.by_seed(ends, base), kind)
            rows.append(_row(measure, runs, label, estimate(list(values.values()), kind=kind), gap))
    return pd.DataFrame(rows, columns=COLUMNS)


def _row(
    measure: measures.Measure, runs: pd.DataFrame, label: str, value: Estimate, gap: Estimate | None
) -> dict[str, object]:
    first = runs.iloc[0]
    return {
        **{name: first[name] for name in ("experiment", "size", "data", "method")},
        "measure": measure.title,
        "metric": measure.key,
        "label": label,
        "value": value.value,
        "low": value.low,
        "high": value.high,
        "seeds": value.n,
        "interval": value.kind,
        "difference": gap.value if gap else None,
        "difference_low": gap.low if gap else None,
        "difference_high": gap.high if gap else None,
        "difference_seeds": gap.n if gap else None,
        "commit": " ".join(sorted(runs["commit"].unique())),
        "machine": " / ".join(sorted(runs["machine"].unique())),
    }


def digits_of(values: Iterable[float]) -> int:
    """Decimals for a column of one kind: four for accuracies and losses, one or none for returns."""
    largest = max((abs(value) for value in values), default=0.0)
    return 4 if largest < 10 else 1 if largest < 10_000 else 0


def number(value: float | None, digits: int | None = None, sign: bool = False) -> str:
    """`digits` decimals (from the value's own size if not given); empty for nothing."""
    if value is None or pd.isna(value):
        return ""
    if digits is None:
        digits = digits_of([value])
    return f"{value:{'+' if sign else ''}.{digits}f}"


def interval_text(
    low: float | None, high: float | None, digits: int | None = None, sign: bool = False
) -> str:
    if low is None or pd.isna(low):
        return "-"
    return f"[{number(low, digits, sign)}, {number(high, digits, sign)}]"


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table as people read it: text cells, one row a method."""
    rows = []
    digits = digits_of(table["value"])
    for row in table.to_dict("records"):
        mark = ""
        if not pd.isna(row["difference_low"]):
            mark = "" if row["difference_low"] <= 0 <= row["difference_high"] else " *"
        rows.append(
            {
                "method": style.look(row["label"]).name,
                "mean": number(row["value"], digits),
                "95 % interval": interval_text(row["low"], row["high"], digits),
                "seeds": row["seeds"],
                "minus none": number(row["difference"], digits, sign=True) or "-",
                "95 % interval of it": interval_text(
                    row["difference_low"], row["difference_high"], digits, True
                )
                + mark,
            }
        )
    return pd.DataFrame(rows)


def legend(table: pd.DataFrame) -> str:
    """How to read the table: which interval, how many seeds, whether commits or machines are mixed."""
    kinds = {
        "t": "Student's t over seeds (assumes that seeds scatter normally)",
        "bootstrap": "percentile bootstrap over seeds",
        "none": "one seed has no interval",
    }
    notes = [f"95 % interval: {'; '.join(kinds[k] for k in sorted(table['interval'].unique()))}."]
    few = sorted({int(n) for n in table["seeds"] if n < 5})
    if few:
        notes.append(
            f"Only {' or '.join(map(str, few))} seed(s): small differences cannot be told from chance."
        )
    notes.append("Difference: paired by seed (same data order, same first weights); * = interval excludes 0.")
    for column in ("commit", "machine"):
        values = sorted(
            {
                part
                for cell in table[column]
                for part in str(cell).split(" / " if column == "machine" else " ")
            }
        )
        notes.append(f"{column}{'s MIXED' if len(values) > 1 else ''}: {', '.join(values)}.")
    return " ".join(notes)


def text_of(table: pd.DataFrame) -> str:
    """Markdown of one experiment: a heading, one table a measure, the legend."""
    first = table.iloc[0]
    blocks = [f"## {first['experiment']}: data {first['data']}, size {first['size']}"]
    for title, part in table.groupby("measure", sort=False):
        blocks.append(f"**{title}**\n\n{markdown(shown(part))}")
    blocks.append(legend(table))
    return "\n\n".join(blocks) + "\n"


def draw_summary(parts: Sequence[Results]) -> style.Figure:
    """One panel a setting: end of each phase for long sequences of tasks, else the curve over the
    training."""
    figure, axes = style.grid(len(parts), width=4.4, height=3.1)
    for axis, part in zip(axes, parts):
        draw_setting(axis, part)
    figure.tight_layout()
    taken = style.shared_legend(figure, axes)
    runs = pd.concat([part.runs for part in parts])
    note = (
        "Band: range over seeds. Dotted lines: boundaries. A long first phase is cut off.\n"
        + curves.provenance(runs)
    )
    style.footnote(figure, note, taken)
    return figure


def draw_setting(axis: style.Axes, part: Results) -> pd.DataFrame:
    """The headline metric of one setting on `axis`; returns the drawn numbers."""
    experiment = part.finished["experiment"].iloc[0]
    headline = measures.measures_of(part, experiment)[0]
    axis.set_title(curves.panel_title(part, experiment))
    if headline.reduce == "late_phases":
        rows = measures.phase_ends(part.metrics, headline.metric).assign(x=lambda r: r["phase"] + 1.0)
        drawn = curves.draw_labels(axis, rows)
        curves.mark_boundaries(axis, [k + 0.5 for k in range(1, int(rows["x"].max()))])
        axis.set_xlabel("task")
        axis.set_ylabel(f"{words(headline.metric)}, end of task")
        return drawn
    rows, unit = curves.with_progress(measures.curve(part.metrics, headline.metric))
    marks = curves.boundaries(rows)
    late = around_the_boundary(rows, marks)
    drawn = curves.draw_labels(axis, late)
    if len(late) < len(rows):
        after = drawn[drawn["x"] >= marks[0] + 0.1 * (drawn["x"].max() - marks[0])]
        low, high = after["low"].min(), after["high"].max()
        axis.set_ylim(low - 0.08 * (high - low) - 1e-3, high + 0.08 * (high - low) + 1e-3)
    curves.mark_boundaries(axis, marks)
    axis.set_xlabel(unit)
    axis.set_ylabel(words(headline.metric))
    return drawn


def around_the_boundary(rows: pd.DataFrame, marks: Sequence[float]) -> pd.DataFrame:
    """With one boundary after a long first phase, the rows from shortly before it on: earlier all methods are one."""
    if len(marks) != 1:
        return rows
    length = float(rows["x"].max()) - marks[0]
    return rows[rows["x"] >= marks[0] - 0.25 * length] if marks[0] > 1.5 * length else rows


def words(metric: str) -> str:
    return metric.replace("_", " ").replace("val loss", "validation loss").replace("eval ", "evaluation ")


def absent(
    results: Results, experiments: Sequence[str], methods: Sequence[str], seeds: Sequence[int]
) -> list[str]:
    """Runs that were asked for but are not done, by name. Without `methods` or `seeds`: every plain label and every
    seed that the experiment has is expected in all combinations."""
    lines = []
    for experiment in experiments:
        runs = results.runs[results.runs["experiment"] == experiment]
        labels = list(methods) or style.ordered(label for label in runs["label"].unique() if "-" not in label)
        for label in labels:
            for seed in seeds or sorted(runs["seed"].unique()):
                row = runs[(runs["label"] == label) & (runs["seed"] == seed)]
                state = row["status"].iloc[0] if len(row) else "missing"
                if state != "done":
                    lines.append(f"{experiment} {label} seed {seed}: {state}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.summary", description=__doc__.splitlines()[0])
    parser.add_argument("--experiment", nargs="+", required=True, help="experiment names")
    parser.add_argument("--size", default="small")
    parser.add_argument("--root", default="runs", help="the folder that holds the runs")
    parser.add_argument("--methods", default="", help="comma list of labels that must be there")
    parser.add_argument("--seeds", default="", help="comma list of seeds that must be there")
    parser.add_argument("--interval", default="auto", choices=["auto", "t", "bootstrap"])
    parser.add_argument("--out", default=None, help="folder for table and figure")
    options = parser.parse_args(arguments)
    try:
        return report(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def comma_list(text: str) -> list[str]:
    return [item.strip() for item in text.replace(" ", ",").split(",") if item.strip()]


def whole_numbers(text: str) -> list[int]:
    """Seeds of a comma list."""
    try:
        return [int(item) for item in comma_list(text)]
    except ValueError:
        raise UserError(f"--seeds {text!r}: give whole numbers separated by commas, as in 1,2,3") from None


def report(options: argparse.Namespace) -> int:
    """Print and write everything for the parsed options; the exit code."""
    names = list(dict.fromkeys(comma_list(",".join(options.experiment))))
    seeds = whole_numbers(options.seeds)
    results = load(options.root, names, options.size)
    logged = set(results.metrics["experiment"])
    finished = [name for name in names if name in logged and measures.measures_of(results, name)]
    wrong = absent(results, names, comma_list(options.methods), seeds)
    for name in names:
        if name in logged and name not in finished:
            wrong.append(f"{name}: its runs log none of the measures that analysis/measures.py knows")
        elif name not in finished:
            wrong.append(f"{name}: no finished run of size {options.size}")
    out = Path(options.out or _folder(options.root, finished, options.size))
    if finished:
        parts = curves.settings(results, finished)
        tables = [summarise(part, options.interval) for part in parts]
        text = "\n".join(text_of(table) for table in tables)
        print(text)
        write_frame(pd.concat(tables, ignore_index=True), out / "summary.csv")
        (out / "summary.md").write_text(text, encoding="utf-8")
        paths = style.save(draw_summary(parts), out / "summary", ("png", "svg"))
        for title, path in (
            ("table", out / "summary.md"),
            ("table", out / "summary.csv"),
            ("figure", paths[0]),
        ):
            print(f"{title}: {path}")
        together, apart = sharing(results.finished, options.root)
        if apart:
            print(f"images trained on: {together:,}; separate runs: {apart:,} ({together / apart:.2f} of it)")
    for problem in results.problems:
        print(f"left out: {problem}", file=sys.stderr)
    for line in wrong:
        print(f"not done: {line}", file=sys.stderr)
    return 1 if wrong else 0


def sharing(runs: pd.DataFrame, root: str | Path) -> tuple[int, int]:
    """(training images shown in these runs and their shared first phases, what separate runs would have shown)."""
    trunks: dict[str, int] = {}
    together = apart = 0
    for path in map(Path, runs["path"]):
        own = images_of(path)
        trunk = (read_json(path / "meta.json") or {}).get("trunk")
        if trunk:
            trunks.setdefault(trunk, images_of(Path(root) / "trunks" / trunk))
        together += own
        apart += own + trunks.get(trunk, 0)
    return together + sum(trunks.values()), apart


def images_of(folder: Path) -> int:
    """Training images shown in one folder of a run or trunk."""
    return sum(line.get("images", 0) for line in read_timing(folder))


def _folder(root: str, experiments: Sequence[str], size: str) -> Path:
    if len(experiments) == 1:
        return Path(root) / experiments[0] / size
    return Path(root) / "summary" / f"{'+'.join(experiments)[:120]}-{size}"


if __name__ == "__main__":
    sys.exit(main())
