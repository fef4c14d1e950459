"""What the figure scripts share: their command line, where results come from, one picture per size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from analysis import curves, style
from analysis.export import RESULTS
from analysis.load import Results, load, load_exported
from fire_core.errors import UserError

Draw = Callable[[list[Results], bool], style.Figure]


def open_results(root: str | Path, size: str | None = None, prefixes: Sequence[str] = ("",)) -> Results:
    """Runs below `root`; where `root` holds an export (runs.csv), that. Before the first run, when there is no folder
    `runs` yet, the committed results stand in and it is said."""
    root = Path(root)
    if not root.is_dir():
        if root != Path("runs"):
            raise UserError(
                f"there is no folder {str(root)!r}: give the folder that holds the runs, or an export"
            )
        print(f"no folder '{root}' here: showing the committed results in {RESULTS}", file=sys.stderr)
        root = RESULTS
    if (root / "runs.csv").exists():
        results = load_exported(root)
    else:
        names = [p.name for p in root.iterdir() if p.name.startswith(tuple(prefixes))]
        results = load(root, names or ["-"], size)
    names = [name for name in results.runs["experiment"].unique() if name.startswith(tuple(prefixes))]
    results = results.select(experiment=names)
    return results.select(size=size) if size else results


def with_finished_runs(results: Results, root: str | Path) -> Results:
    """The same results; UserError if no run of them is finished, for what would be written would say nothing."""
    if results.finished.empty:
        raise UserError(f"no finished run in {str(root)!r}: run something first, as in make vision-sweep")
    return results


def arguments(name: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m analysis.{name}", description=text.splitlines()[0])
    parser.add_argument("--root", default="runs", help="run folders, or an export (analysis/results)")
    parser.add_argument(
        "--size", default=None, help="smoke | small | paper; default: one picture per size found"
    )
    parser.add_argument("--out", default=None, help="folder for the pictures; default <root>/figures")
    parser.add_argument("--formats", default="png,svg,pdf")
    parser.add_argument("--paper-curves", action="store_true", help="the paper's own curves, thin and dotted")
    return parser


def figure_command(
    name: str,
    text: str,
    prefixes: Sequence[str],
    draw: Callable[..., style.Figure],
    given: Sequence[str] | None,
    metric: bool = False,
) -> int:
    """Draw `name` once per size that has finished runs; prints the paths. Nothing to draw is not an error.

    With `metric` there is an option of that name, and `draw` takes it so; None is each experiment's headline.
    """
    parser = arguments(name, text)
    if metric:
        parser.add_argument("--metric", help="what to draw; default: the headline of each experiment")
    options = parser.parse_args(given)
    chosen = {"metric": options.metric} if metric else {}
    try:
        results = open_results(options.root, options.size, prefixes)
        sizes = [size for size in ("paper", "small", "smoke") if size in set(results.finished["size"])]
        if not sizes:
            print(f"{name}: no finished run of {', '.join(prefixes)}* in '{options.root}'")
        for size in sizes:
            parts = curves.settings(results.select(size=size))
            parts = [part for part in parts if len(part.metrics)]
            figure = draw(parts, options.paper_curves, **chosen)
            out = Path(options.out or Path(options.root) / "figures")
            for path in style.save(figure, out / f"{name}-{size}", options.formats.split(",")):
                print(f"{name}, size {size}: {path}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for problem in results.problems:
        print(f"left out: {problem}", file=sys.stderr)
    return 0


def that_logged(parts: Sequence[Results], metric: str) -> list[Results]:
    """The settings with values of `metric`; UserError that names what was logged if there is none."""
    found = [part for part in parts if metric in set(part.metrics["metric"])]
    if not found:
        names = sorted({name for part in parts for name in part.metrics["metric"].unique()})
        raise UserError(f"no run logged {metric!r}; logged: {', '.join(names) or 'nothing'}")
    return found


def plain(part: Results) -> Results:
    """Without the runs that have overrides in their label (they are in the ablation table), if plain ones
    exist."""
    labels = [label for label in part.runs["label"].unique() if "-" not in label]
    return part.select(label=labels) if labels else part


def experiment_of(part: Results) -> str:
    return str(part.finished["experiment"].iloc[0])


def names_of(part: Results) -> tuple[str, str]:
    """(figure, panel) of a setting."""
    first = part.finished.iloc[0]
    return str(first["figure"]), str(first["panel"])


def finish(
    figure: style.Figure, axes: Sequence[style.Axes], parts: Sequence[Results], note: str
) -> style.Figure:
    """Legend and footnote: what the band is, size, data, commits, machines, mixed or not."""
    figure.tight_layout()
    taken = style.shared_legend(figure, axes, columns=6)
    runs = pd.concat([part.runs for part in parts])
    style.footnote(figure, f"{note}\n{curves.provenance(runs)}", taken)
    return figure
