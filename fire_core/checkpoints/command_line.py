"""Inspect the weights of a checkpoint, apply FIRE to them, and list target matrices and methods."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fire_core.checkpoints.apply import apply
from fire_core.checkpoints.atomic import write_atomic, written_aside
from fire_core.checkpoints.files import open_checkpoint
from fire_core.checkpoints.inspect import Spectrum, spectra
from fire_core.checkpoints.plan import build, plan
from fire_core.errors import UserError
from fire_core.methods import available, broken, list_methods, variants
from fire_core.settings import FireSettings
from fire_core.targets import TargetTable, find_targets

PICTURES = (".png", ".pdf", ".svg")
SETTINGS = {
    "solver": "newton_schulz (published), exact, fast or quintic",
    "iterations": "steps of newton_schulz and quintic",
    "normalize": "start of newton_schulz and quintic: frobenius or spectral",
    "scale": "official: sqrt(out/in) / taps; none: 1",
    "strength": "0 keeps the weights, 1 is FIRE",
    "degenerate": "zero matrices: raise or skip",
    "min_norm": "Frobenius norm below which a matrix counts as zero",
    "tolerance": "deviation from isometry that exact allows",
    "precision": "fp32 or tf32",
}
"""The settings of `fire` that make sense for a file, as options of `apply`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of `fire-core` and return the exit code: 0, 2 after a UserError, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as in fire-core inspect FILE | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UserError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; no output was left half-written", file=sys.stderr)
        return 130
    return 0


def inspect_command(options: argparse.Namespace) -> None:
    """Print the spectrum of every chosen matrix as a table, and write it as CSV or picture if asked."""
    csv_file, picture = _new(options.csv), _new(options.plot, PICTURES)
    table, source = plan(open_checkpoint(options.checkpoint, options.key), options.targets, options.model)
    found: list[tuple[Spectrum, Tensor]] = []
    with _bar(len(table.included), "inspect") as progress:
        for entry in spectra(
            options.checkpoint, targets=options.targets, model=options.model, key=options.key
        ):
            found.append(entry)
            progress(1)
    rows = [summary.to_dict() for summary, _ in found]
    print(format_rows(rows))
    print(f"{len(rows)} matrices; {source}; dfi and norm are of the weights as stored")
    if csv_file:
        write_csv(csv_file, rows)
    if picture:
        plot(picture, found)


def apply_command(options: argparse.Namespace) -> None:
    """Apply FIRE to a checkpoint, write a new file or folder, and print the report."""
    told = _new(options.report)
    settings = {name: getattr(options, name) for name in SETTINGS}
    chosen = {"targets": options.targets, "model": options.model}
    checkpoint = open_checkpoint(options.checkpoint, options.key)
    table, source = plan(checkpoint, **chosen)
    with _bar(len(table.included), "apply") as progress:
        report = apply(
            options.checkpoint, options.out, key=options.key, progress=progress, **chosen, **settings
        )
    if told:
        write_atomic(told, json.dumps(report.to_dict(), indent=1))
    print(report)
    print(f"{len(report.treated())} matrices changed, {source}; written to {options.out}")
    if checkpoint.is_folder and (left := checkpoint.other_files()[1]):
        behind = ", ".join(printable(file.relative_to(checkpoint.path)) for file in left)
        print(f"not copied, because these may contain old weights or link outside the folder: {behind}")
    print("optimizer state saved with the old weights does not fit the new ones: start a new optimizer")


def targets_command(options: argparse.Namespace) -> None:
    """Print which matrices are in or out, and why, for checkpoints and for models that can be built."""
    for source in options.source:
        if Path(source).exists():
            table, origin = plan(open_checkpoint(source, options.key), options.targets, options.model)
            print(origin, file=sys.stderr)
        else:
            table = find_targets(build(source), options.targets)
        print(markdown(source.rpartition(":")[2], table) if options.markdown else table)


def methods_command(options: argparse.Namespace) -> None:
    """Print the name, summary, variants and source of each method."""
    names = list_methods(options.pattern or "*")
    width = max(map(len, names), default=0)
    for name in names:
        method, others = available()[name], variants(name)
        listed = f" [variants: {', '.join(others)}]" if len(others) > 1 else ""
        print(f"{name:<{width}}  {method.summary}{listed}\n{'':<{width}}  [{method.source}]")
    for name, why in broken().items():
        print(f"not imported: fire_core/methods/{name}.py ({why})", file=sys.stderr)


def printable(text: object) -> str:
    """Return `text` with unprintable characters escaped: a file may contain names that control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def format_rows(rows: list[dict[str, object]]) -> str:
    """Return rows with the same keys as aligned columns, numbers to three digits."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    first, *others = widths
    return "\n".join(
        line[0].ljust(first) + "".join(cell.rjust(width + 2) for cell, width in zip(line[1:], others))
        for line in cells
    )


def markdown(title: str, table: TargetTable) -> str:
    """Return a table in Markdown, with repeated layers in one line and the number of biases and norm parameters."""
    lines = [
        f"**{title}**",
        "",
        "| | parameter | parts | matrices | shape | why |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    vectors = sum(target.kind in ("bias", "norm") for target in table)
    for row in table.lines(by_layer=False):
        if row["kind"] not in ("bias", "norm"):
            count, state = (row["matrices"] if row["shape"] else ""), "in" if row["in"] else "**out**"
            cells = (state, f"`{row['parameter']}`", row["part"], count, row["shape"], row["why"])
            lines.append(f"| {' | '.join(map(str, cells))} |")
    if vectors:
        lines.append(f"| **out** | {vectors} biases and norm parameters | | | | vectors |")
    return "\n".join([*lines, ""])


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as CSV, with the keys of the first row as columns."""
    with written_aside(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def plot(path: Path, found: list[tuple[Spectrum, Tensor]]) -> None:
    """Draw the singular values of every matrix, divided by its largest, over their rank; needs matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UserError("--plot needs matplotlib: pip install matplotlib, or use --csv") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for summary, values in found:
        count = max(len(values) - 1, 1)
        axes.plot(
            [i / count for i in range(len(values))], (values / values[0]).tolist(), lw=0.8, label=summary.name
        )
    axes.set(xlabel="rank / number of singular values", ylabel="singular value / largest", yscale="log")
    if len(found) <= 12:
        axes.legend(fontsize=7)
    with written_aside(path) as aside:
        figure.savefig(aside, format=path.suffix[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fire-core", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    inspect = commands.add_parser(
        "inspect", help="spectrum, norm, deviation from isometry of each matrix of a checkpoint"
    )
    inspect.add_argument("checkpoint", help="safetensors or torch file, or a Hugging Face folder")
    inspect.add_argument("--csv", help="also write the rows to this new file")
    inspect.add_argument("--plot", help="also draw the spectra into this new file (png, pdf, svg)")
    inspect.set_defaults(run=inspect_command)

    change = commands.add_parser("apply", help="apply FIRE to a checkpoint and write a new file or folder")
    change.add_argument("checkpoint", help="safetensors or torch file, or a Hugging Face folder")
    change.add_argument("out", help="output of the same form; must not exist")
    for name, about in SETTINGS.items():
        default = getattr(FireSettings, name)
        change.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"{about} (%(default)s)"
        )
    change.add_argument("--report", help="also write one row per matrix to this new JSON file")
    change.set_defaults(run=apply_command)

    targets = commands.add_parser("targets", help="which matrices are in or out, and why")
    targets.add_argument(
        "source", nargs="+", help="checkpoint, or package.module:callable that makes a model"
    )
    targets.add_argument(
        "--markdown", action="store_true", help="a table for documents, repeated layers in one line"
    )
    targets.set_defaults(run=targets_command)

    methods = commands.add_parser("methods", help="list FIRE and the rival methods with their papers")
    methods.add_argument("pattern", nargs="*", help="only methods whose name matches one of these")
    methods.set_defaults(run=methods_command)

    for command in (inspect, change, targets):
        command.add_argument(
            "--targets", default="all", help="preset, pattern or comma list, '-' excludes (%(default)s)"
        )
        command.add_argument(
            "--model", default="auto", help="auto, none, or package.module:callable for exact targets"
        )
        command.add_argument("--key", help="dotted path to the weights inside a torch file")
    return parser


@contextmanager
def _bar(total: int, name: str) -> Any:
    """Yield a function that advances a progress bar, or does nothing without a terminal or tqdm."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda count: None
        return
    with tqdm(total=total, desc=name, unit="matrix", disable=not sys.stderr.isatty(), leave=False) as bar:
        yield bar.update


def _new(path: str | None, endings: tuple[str, ...] = ()) -> Path | None:
    """Return the output file that an option names, or None; raise UserError before any work if it cannot be made."""
    if path is None:
        return None
    if os.path.lexists(path):
        raise UserError(f"{path!r} exists and is not overwritten: name another file, or remove it")
    if not Path(path).parent.is_dir():
        raise UserError(f"{path!r}: there is no folder {str(Path(path).parent)!r}; make it first")
    if endings and Path(path).suffix not in endings:
        raise UserError(f"{path!r} should end in one of {', '.join(endings)}")
    return Path(path)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
