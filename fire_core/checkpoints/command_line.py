"""Inspect the weights of a checkpoint, apply FIRE to them, and list the methods."""

import argparse
import sys
from collections.abc import Sequence

from fire_core.checkpoints.files import open_checkpoint
from fire_core.checkpoints.targets import targets_of
from fire_core.checkpoints.treat import spectra, treat_file
from fire_core.columns import columns
from fire_core.copies import Likeness
from fire_core.errors import UserError, clean_exit, printable
from fire_core.methods import available, moments, table
from fire_core.projection import FireSettings
from fire_core.targets import shorten

# of `fire`, as options of `apply`: those that make sense for a file
SETTINGS = ("solver", "iterations", "normalize", "scale", "strength", "degenerate", "min_norm", "tolerance")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of `fire-core`; return 0, or 130 after Ctrl-C. Bad input exits with 2."""
    parser = argparse.ArgumentParser(prog="fire-core", description=__doc__)
    _add_commands(parser)
    options, rest = parser.parse_known_args(arguments)
    if len(rest) == 1 and not rest[0].startswith("-") and getattr(options, "out", "") is None:
        options.out = rest.pop()  # argparse gives up an optional output where an option follows the input
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        with clean_exit():
            options.run(options)
    except KeyboardInterrupt:
        print("error: interrupted; no output was left half-written", file=sys.stderr)
        return 130
    return 0


def inspect(options: argparse.Namespace) -> None:
    """Print the spectrum of every chosen matrix, and which weights are in or out, and why."""
    checkpoint = open_checkpoint(options.checkpoint, options.key)
    targets, source = targets_of(checkpoint, options.targets, options.model)
    rows: list[dict[str, object]] = []
    for spectrum in spectra(checkpoint, targets):
        rows.append(spectrum)
        _show(len(rows), len(targets.included))
    print(columns(rows), targets, sep="\n\n")
    print(printable(f"{len(rows)} matrices; {source}; dfi and norm are of the weights as stored"))


def apply(options: argparse.Namespace) -> None:
    """Apply FIRE to a checkpoint, write a new file, and print the report."""
    if options.out is None and not options.dry_run:
        raise UserError("no output is given: name a file to write, or ask for a --dry-run")
    checkpoint = open_checkpoint(options.checkpoint, options.key)
    targets, source = targets_of(checkpoint, options.targets, options.model)
    out, total = None if options.dry_run else options.out, len(targets.included)
    settings = {name: getattr(options, name) for name in SETTINGS}
    print(treat_file(checkpoint, targets, out, progress=lambda done: _show(done, total), **settings))
    print(printable(source))
    if copies := shorten(Likeness(checkpoint.tensors).places(checkpoint.content)):
        print(printable(f"left as they are, although they look like copies of these weights: {copies}"))
    if out is not None:
        advice = "optimizer state and averages of the old weights do not fit the new ones: start both anew"
        print(f"written to {printable(out)}", advice, sep="\n")


def methods(options: argparse.Namespace) -> None:
    """Print the name, summary, moments, source and proof of each method."""
    for name, m in available().items() if not options.markdown else ():
        print(f"{name}: {m.summary}\n    acts: {moments(m)}; proven by: {m.proven_by} [{m.source}]")
    if options.markdown:
        print(table())


def _add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="command")
    look = commands.add_parser("inspect", help="which matrices are in or out, and the spectrum of each")
    change = commands.add_parser("apply", help="apply FIRE to a checkpoint and write a new file")
    for command, run in ((look, inspect), (change, apply)):
        command.set_defaults(run=run)
        command.add_argument("checkpoint", help="safetensors or torch file, or a Hugging Face folder")
        command.add_argument("--targets", default="all", help="preset, pattern or comma list, '-' excludes")
        command.add_argument("--model", help="package.module:callable that makes the model of the file")
        command.add_argument("--key", help="dotted path to the weights inside a torch file")
    change.add_argument("out", nargs="?", help="new file of the same format, safetensors for a folder")
    change.add_argument("--dry-run", action="store_true", help="print the report and write no weights")
    for name in SETTINGS:
        default, option = getattr(FireSettings, name), f"--{name.replace('_', '-')}"
        change.add_argument(option, type=type(default), default=default, help="as in fire() (%(default)s)")
    listed = commands.add_parser("methods", help="list FIRE and the rival methods with their papers")
    listed.set_defaults(run=methods)
    listed.add_argument("--markdown", action="store_true", help="the table of docs/concepts/methods.md")


def _show(done: int, total: int) -> None:
    """Show the number of matrices that are done on the terminal, if there is one."""
    if sys.stderr.isatty():
        print(f"\r{done} of {total} matrices", end="\n" * (done == total), file=sys.stderr, flush=True)
