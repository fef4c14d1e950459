"""Inspect the weights of a checkpoint, apply FIRE to them, and list target matrices and methods."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from fire_core.checkpoints.files import Checkpoint, open_checkpoint
from fire_core.checkpoints.inspect import spectra
from fire_core.checkpoints.targets import build, targets_of
from fire_core.checkpoints.treat import treat_file
from fire_core.columns import columns
from fire_core.engine import FireSettings
from fire_core.errors import UserError, printable, reader_may_leave
from fire_core.methods import available, list_methods, moments, table
from fire_core.targets import TargetTable, find_targets
from fire_core.targets.table import shorten

SETTINGS = {
    "solver": "newton_schulz (published), exact or quintic",
    "iterations": "steps of newton_schulz and quintic",
    "normalize": "start of newton_schulz and quintic: frobenius or spectral",
    "scale": "official: sqrt(out/in) / taps; none: 1",
    "strength": "0 keeps the weights, 1 is FIRE",
    "degenerate": "zero matrices: raise or skip",
    "min_norm": "Frobenius norm below which a matrix counts as zero",
    "tolerance": "deviation from isometry that exact allows",
}
"""The settings of `fire` that make sense for a file, as options of `apply`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of `fire-core` and return the exit code: 0, 2 after an error, 130 after Ctrl-C."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if len(rest) == 1 and not rest[0].startswith("-") and getattr(options, "out", "") is None:
        options.out = rest.pop()  # argparse gives up an optional output where an option follows the input
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        with reader_may_leave():
            options.run(options)
    except (UserError, OSError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; no output was left half-written", file=sys.stderr)
        return 130
    return 0


def inspect_command(options: argparse.Namespace) -> None:
    """Print the spectrum of every chosen matrix as a table."""
    checkpoint, table, source = _opened(options.checkpoint, options)
    progress = _progress(len(table.included))
    rows = []
    for spectrum in spectra(checkpoint, table):
        rows.append(spectrum)
        progress(1)
    print(columns(rows))
    print(printable(f"{len(rows)} matrices; {source}; dfi and norm are of the weights as stored"))


def apply_command(options: argparse.Namespace) -> None:
    """Apply FIRE to a checkpoint, write a new file or folder, and print the report."""
    settings = {name: getattr(options, name) for name in SETTINGS}
    checkpoint, table, source = _opened(options.checkpoint, options)
    progress = _progress(len(table.included))
    report = treat_file(
        checkpoint, table, options.out, dry_run=options.dry_run, progress=progress, **settings
    )
    print(report)
    print(printable(f"{len(report.treated())} matrices; {source}"))
    if options.dry_run:
        return
    print(f"written to {printable(options.out)}")
    if left := checkpoint.other_files()[1]:
        names = printable(shorten([str(file.relative_to(checkpoint.path)) for file in left]))
        print(f"not copied, because these may contain old weights or link outside the folder: {names}")
    print("optimizer state saved with the old weights does not fit the new ones: start a new optimizer")


def targets_command(options: argparse.Namespace) -> None:
    """Print which matrices are in or out, and why, for checkpoints and for models that can be built."""
    for name in options.source:
        if os.path.lexists(name):
            _, table, source = _opened(name, options)
        else:
            if options.model or options.key or options.guess:
                raise UserError(f"{name!r} is no checkpoint: --model, --key and --guess are for checkpoints")
            table, source = find_targets(build(name), options.targets), f"targets from {name}"
        print(printable(source), table, "", sep="\n")


def methods_command(options: argparse.Namespace) -> None:
    """Print the name, summary, moments, source and proof of each method."""
    if options.markdown:
        print(table())
        return
    if not (names := list_methods(options.pattern or "*")):
        raise UserError(
            f"no method is named {' or '.join(map(repr, options.pattern))}; fire-core methods lists all"
        )
    width = max(map(len, names), default=0)
    for name in names:
        method = available()[name]
        print(f"{name:<{width}}  {method.summary}")
        print(f"{'':<{width}}  acts: {moments(method)}; proven by: {method.proven_by} [{method.source}]")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fire-core", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    inspect = commands.add_parser(
        "inspect", help="spectrum, norm, deviation from isometry of each matrix of a checkpoint"
    )
    inspect.add_argument("checkpoint", help="safetensors or torch file, or a Hugging Face folder")
    inspect.set_defaults(run=inspect_command)

    change = commands.add_parser("apply", help="apply FIRE to a checkpoint and write a new file or folder")
    change.add_argument("checkpoint", help="safetensors or torch file, or a Hugging Face folder")
    change.add_argument("out", nargs="?", help="output of the same form; must not exist")
    change.add_argument("--dry-run", action="store_true", help="print the report and write no weights")
    for name, about in SETTINGS.items():
        default = getattr(FireSettings, name)
        change.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"{about} (%(default)s)"
        )
    change.set_defaults(run=apply_command)

    targets = commands.add_parser("targets", help="which matrices are in or out, and why")
    targets.add_argument(
        "source", nargs="+", help="checkpoint, or package.module:callable that makes a model"
    )
    targets.set_defaults(run=targets_command)

    methods = commands.add_parser("methods", help="list FIRE and the rival methods with their papers")
    methods.add_argument("pattern", nargs="*", help="only methods whose name matches one of these")
    methods.add_argument("--markdown", action="store_true", help="the table of docs/concepts/methods.md")
    methods.set_defaults(run=methods_command)

    for command in (inspect, change, targets):
        command.add_argument(
            "--targets", default="all", help="preset, pattern or comma list, '-' excludes (%(default)s)"
        )
        command.add_argument("--model", help="package.module:callable that makes the model of the file")
        command.add_argument(
            "--guess", action="store_true", help="read from names and shapes what config.json does not tell"
        )
        command.add_argument("--key", help="dotted path to the weights inside a torch file")
    return parser


def _opened(source: str, options: argparse.Namespace) -> tuple[Checkpoint, TargetTable, str]:
    """Return the checkpoint, its targets, and where these were read from."""
    checkpoint = open_checkpoint(source, options.key)
    return checkpoint, *targets_of(checkpoint, options.targets, options.model, guess=options.guess)


def _progress(total: int) -> Callable[[int], None]:
    """Return a function that adds to a count of matrices on the terminal, if there is one."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r{done} of {total} matrices", end=end, file=sys.stderr, flush=True)

    return advance
