"""Command line for checkpoint files and models: `python -m fire_core inspect | apply | targets`."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fire_core.checkpoint_files import open_checkpoint, other_weights
from fire_core.errors import UserError
from fire_core.targets import TargetTable, find_targets
from fire_core.weights_on_disk import Spectrum, apply, build, plan, spectra

PICTURES = (".png", ".pdf", ".svg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is 2 for a mistake that the message says how to mend."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def inspect_command(options: argparse.Namespace) -> None:
    """Spectrum of every chosen matrix, as a table, CSV or picture."""
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
    """FIRE on a checkpoint, into a new file or folder."""
    told = _new(options.report)
    names = ("solver", "iterations", "normalize", "scale", "strength", "degenerate", "precision")
    settings = {name: getattr(options, name) for name in names}
    chosen = {"targets": options.targets, "model": options.model}
    checkpoint = open_checkpoint(options.checkpoint, options.key)
    table, source = plan(checkpoint, **chosen)
    with _bar(len(table.included), "apply") as progress:
        report = apply(
            options.checkpoint, options.out, key=options.key, progress=progress, **chosen, **settings
        )
    if told:
        told.write_text(json.dumps(report.to_dict(), indent=1))
    print(report)
    print(f"{len(report.treated())} matrices changed, {source}; written to {options.out}")
    if checkpoint.is_folder and (others := other_weights(checkpoint)):
        print(f"not copied, for they may hold the old weights: {', '.join(file.name for file in others)}")
    print("optimizer state saved with the old weights does not fit the new ones: start the optimizer afresh")


def targets_command(options: argparse.Namespace) -> None:
    """What is in, what is out, and why, for a checkpoint or for models that can be built."""
    for source in options.source:
        if Path(source).exists():
            table, origin = plan(open_checkpoint(source, options.key), options.targets, options.model)
            print(origin, file=sys.stderr)
        else:
            table = find_targets(build(source), options.targets)
        print(markdown(source.rpartition(":")[2], table) if options.markdown else table)


def format_rows(rows: list[dict[str, object]]) -> str:
    """Rows with the same keys as aligned columns, numbers to three digits."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    first, *others = widths
    return "\n".join(
        line[0].ljust(first) + "".join(cell.rjust(width + 2) for cell, width in zip(line[1:], others))
        for line in cells
    )


def markdown(title: str, table: TargetTable) -> str:
    """A table for documents: repeated layers in one line, biases and norm layers counted in one."""
    lines = [
        f"**{title}**",
        "",
        "| | parameter | parts | matrices | shape | why |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    vectors = sum(target.kind in ("bias", "norm") for target in table)
    for row in table.rows(by_layer=False):
        if row["kind"] not in ("bias", "norm"):
            count, state = (row["matrices"] if row["shape"] else ""), "in" if row["in"] else "**out**"
            cells = (state, f"`{row['parameter']}`", row["part"], count, row["shape"], row["why"])
            lines.append(f"| {' | '.join(map(str, cells))} |")
    if vectors:
        lines.append(f"| **out** | {vectors} biases and norm parameters | | | | vectors |")
    return "\n".join([*lines, ""])


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def plot(path: Path, found: list[tuple[Spectrum, Tensor]]) -> None:
    """Singular values of every matrix, each divided by its largest, over their rank; needs matplotlib."""
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
    figure.savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fire_core", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    inspect = commands.add_parser(
        "inspect", help="spectrum, norm, deviation from isometry of each matrix of a checkpoint"
    )
    inspect.add_argument("checkpoint", help="safetensors or torch file, or a Hugging Face folder")
    inspect.add_argument("--csv", help="also write the rows to this new file")
    inspect.add_argument("--plot", help="also draw the spectra into this new file (png, pdf, svg)")
    inspect.set_defaults(run=inspect_command)

    change = commands.add_parser("apply", help="FIRE on a checkpoint, into a new file or folder")
    change.add_argument("checkpoint", help="safetensors or torch file, or a Hugging Face folder")
    change.add_argument("out", help="output of the same form; must not exist")
    change.add_argument("--solver", default="newton_schulz", help="newton_schulz (published), exact or fast")
    change.add_argument("--iterations", type=int, default=10, help="steps of newton_schulz (%(default)s)")
    change.add_argument(
        "--normalize", default="frobenius", help="start of newton_schulz: frobenius or spectral"
    )
    change.add_argument("--scale", default="official", help="official: sqrt(out/in) / taps; none: 1")
    change.add_argument(
        "--strength", type=float, default=1.0, help="0 keeps the weights, 1 is FIRE (%(default)s)"
    )
    change.add_argument("--degenerate", default="raise", help="zero matrices: raise or skip")
    change.add_argument("--precision", default="fp32", help="fp32 or tf32")
    change.add_argument("--report", help="also write one row a matrix to this new JSON file")
    change.set_defaults(run=apply_command)

    targets = commands.add_parser("targets", help="which matrices are in or out, and why")
    targets.add_argument(
        "source", nargs="+", help="checkpoint, or package.module:callable that makes a model"
    )
    targets.add_argument(
        "--markdown", action="store_true", help="a table for documents, repeated layers in one line"
    )
    targets.set_defaults(run=targets_command)

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
    """A progress bar on a terminal where tqdm is installed; else nothing."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda count: None
        return
    with tqdm(total=total, desc=name, unit="matrix", disable=not sys.stderr.isatty(), leave=False) as bar:
        yield bar.update


def _new(path: str | None, endings: tuple[str, ...] = ()) -> Path | None:
    """The path of a file that an option names and that can be made; checked before any work. None: not asked for."""
    if path is None:
        return None
    if Path(path).exists():
        raise UserError(f"{path!r} exists and is not overwritten: name another file, or remove it")
    if not Path(path).parent.is_dir():
        raise UserError(f"{path!r}: there is no folder {str(Path(path).parent)!r}; make it first")
    if endings and Path(path).suffix not in endings:
        raise UserError(f"{path!r} should end in one of {', '.join(endings)}")
    return Path(path)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
