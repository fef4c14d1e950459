"""Command line of the analysis: python -m analysis COMMAND; each command has --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backend_bases import FigureCanvasBase

from analysis import explore, plot, report, sweep, tables
from analysis.export import export
from analysis.figures import CAPTIONS, FIGURES, Drawing
from analysis.rendering import markdown, plain
from analysis.runs import RESULTS, RUNS_FILE, SIZES, Results, at_most, load, open_results, settings
from fire_core.errors import UserError, print_error, reader_may_leave
from fire_core.files import write_atomic
from harness import status


def draw_figures(given: Sequence[str]) -> int:
    """Draw the figures of finished runs: Figures 2 to 5 of the paper, the verdicts, and the studies beside the paper."""
    parser = _parser("figures", out="folder for the pictures; default <root>/figures")
    parser.add_argument("name", nargs="*", metavar="FIGURE", help=f"{' '.join(FIGURES)}; default: all")
    parser.add_argument("--formats", default="png,svg,pdf", help="default png,svg,pdf")
    parser.add_argument("--metric", help="what Figure 4 shows, as in eval_return; default: as in the paper")
    options = parser.parse_args(given)
    for name in options.name:
        if name not in FIGURES:
            raise UserError(f"there is no figure {name!r}; choose from {', '.join(FIGURES)}")
    formats = options.formats.split(",")
    if wrong := [name for name in formats if name not in FigureCanvasBase.get_supported_filetypes()]:
        raise UserError(f"--formats {options.formats!r}: {wrong[0]!r} cannot be drawn; give png, pdf or svg")
    drawings = {name: FIGURES[name] for name in options.name or FIGURES}
    starts = [start for drawing in drawings.values() for start in drawing.experiments]
    found = open_results(options.root, None, starts)
    exported = (Path(options.root) / RUNS_FILE).exists() and not options.size  # the documents show one size
    for name, drawing in drawings.items():
        shown = _by_size(found, drawing, options.size, drawing.once or exported)
        if not shown:
            print(f"{name}: no finished run of {', '.join(drawing.experiments)} in '{options.root}'")
        for size, parts in shown.items():
            more = {}
            if name == "fig4" and options.metric:
                logged = sorted({metric for part in parts for metric in part.metrics["metric"].unique()})
                if options.metric not in logged:
                    raise UserError(f"no run logged {options.metric!r}; logged: {', '.join(logged)}")
                more = {"metric": options.metric}
            stem = _out(options, "figures") / f"{name}-{size}"
            for path in plot.save(drawing.draw(parts, **more), stem, formats, CAPTIONS[name], parts):
                print(f"{name}, size {size}: {path}")
    return _done([], found.problems)


def _by_size(found: Results, drawing: Drawing, only: str | None, once: bool) -> dict[str, list[Results]]:
    """Return {size: settings with values} that a figure shows; `once`: only the largest size, up to medium if it is there,
    for which comparisons are planned."""
    names = drawing.experiments
    results = found.select(experiment=names) if drawing.exact else found.starting(names)
    known = set(results.finished["size"])
    sizes = [size for size in SIZES if size in known and only in (None, size)]
    if once:
        sizes = ([size for size in sizes if size != "paper"] or sizes)[:1]
    return {size: [part for part in settings(at_most(results, size)) if len(part.metrics)] for size in sizes}


def write_tables(given: Sequence[str]) -> int:
    """Write every table as Markdown, CSV and LaTeX. With --experiment, show the table and the figure of one sweep
    instead. With --write, fill the tables of README.md, REPRODUCED.md and docs/findings.md from the committed results."""
    parser = _parser("tables", out="folder for the tables; default <root>/tables")
    help_text = "fill the tables of the documents; nothing else is read or written"
    parser.add_argument("--write", action="store_true", help=help_text)
    parser.add_argument("--experiment", nargs="+", help="the experiments of a sweep")
    for name in ("methods", "seeds"):
        help_text = f"with --experiment: {name} that must be present, separated by commas"
        parser.add_argument(f"--{name}", default="", help=help_text)
    options = parser.parse_args(given)
    if options.experiment:
        return sweep.show(options)
    if options.methods or options.seeds:
        raise UserError("--methods and --seeds belong to --experiment: name the experiments of the sweep")
    if options.write:
        return _done(report.write())
    results = open_results(options.root, options.size)
    if results.finished.empty:
        raise UserError(f"no finished run in {options.root!r}: run something first, as in make vision-sweep")
    return _done(report.write_all(results, _out(options, "tables")), results.problems)


def count_claims(given: Sequence[str]) -> int:
    """Print the verdicts on the paper's comparisons as counts, and the pooled estimates, with the exploring and with the
    confirming seeds (docs/concepts/statistics.md)."""
    options = _parser("claims", root=str(RESULTS)).parse_args(given)
    results = open_results(options.root)
    material = tables.Material(results)
    print(f"{markdown(tables.counts(material))}\n\n{markdown(tables.pooled(material))}")
    return _done([], results.problems)


def write_export(given: Sequence[str]) -> int:
    """Write the finished runs into analysis/results as compressed CSV files that are small enough to commit."""
    parser = _parser("export")
    sizes = [size for size in SIZES if size != "smoke"]
    help_text = f"default {' '.join(sizes)}; smoke is for tests"
    parser.add_argument("--size", nargs="*", default=sizes, choices=SIZES, help=help_text)
    parser.add_argument("--experiment", nargs="*", default=None)
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args(given)
    results = load(options.root, options.experiment).select(size=options.size)
    if results.finished.empty:
        wanted = " ".join(options.experiment or ["any experiment"])
        raise UserError(f"no finished run of {wanted} in {options.root!r}")
    return _done(export(results, Path(options.out)), results.problems)


def write_explorer(given: Sequence[str]) -> int:
    """Write one HTML page on which you choose panels, switch methods on and off and see single seeds. It needs no server
    and no network."""
    options = _parser("explore", out="the page; default <root>/explore.html").parse_args(given)
    results = open_results(options.root, options.size)
    path = _out(options, "explore.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, explore.page(results))
    return _done([path], results.problems)


def compare_with_official(given: Sequence[str]) -> int:
    """Compare the suite with numbers that were recorded from the official code."""
    from analysis import fidelity  # which builds the networks

    return fidelity.main(given)


def _parser(name: str, root: str = "runs", out: str = "") -> argparse.ArgumentParser:
    """Return the parser of a command that reads runs; with `out`, of one size, and writes something."""
    about = COMMANDS[name].__doc__
    parser = argparse.ArgumentParser(prog=f"python -m analysis {name}", description=about)
    parser.add_argument("--root", default=root, help=f"folder of runs, or an export; default {root}")
    if out:
        parser.add_argument("--size", choices=SIZES, help="default: every size that was run")
        parser.add_argument("--out", help=out)
    return parser


def _out(options: argparse.Namespace, name: str) -> Path:
    """Return what to write to: --out, or else `name` in the folder of runs."""
    if options.out:
        return Path(options.out)
    return Path(options.root) / name


def _done(paths: Sequence[Path], problems: Sequence[str] = ()) -> int:
    """Print what was written and what was left out, and return the exit code."""
    for path in paths:
        print(path)
    for problem in problems:
        print(f"left out: {plain(problem)}", file=sys.stderr)
    return 0


COMMANDS = {
    "figures": draw_figures,
    "tables": write_tables,
    "claims": count_claims,
    "status": status.main,
    "explore": write_explorer,
    "export": write_export,
    "fidelity": compare_with_official,
}


def main(given: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 for bad input, which is reported in one line."""
    given = list(sys.argv[1:] if given is None else given)
    if not given or given[0] not in COMMANDS:
        unknown = bool(given) and given[0] not in ("-h", "--help")
        wrong = f"error: there is no command {given[0]!r}\n" if unknown else ""
        print(f"{wrong}usage: python -m analysis {' | '.join(COMMANDS)}  (each has --help)", file=sys.stderr)
        return 2 if wrong or not given else 0
    try:
        return COMMANDS[given[0]](given[1:])
    except UserError as error:
        said = str(error)
    except OSError as error:
        if error.filename is None:
            raise
        said = f"{str(error.filename)[:200]!r} cannot be used ({error.strerror}): name another folder"
    print_error(said)
    return 2


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main())
