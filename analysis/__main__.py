"""Command line of the analysis: python -m analysis COMMAND; each command has --help."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis import explore, measures, plot, sweep_report, tables
from analysis.export import export
from analysis.figures import CAPTIONS, FIGURES
from analysis.rendering import markdown, say
from analysis.runs import RESULTS, SIZES, at_most, load, matching, open_results, own_data, settings
from fire_core.errors import UserError, clean_exit, did_you_mean
from fire_core.files import write_atomic


def draw_figures(options: Namespace) -> int:
    """Draw the figures of finished runs: Figures 2 to 5 of the paper, the verdicts, and the studies beside the paper. An
    experiment that was not run at the size of a figure is shown at the next smaller one."""
    for name in {*options.name} - FIGURES.keys():
        raise UserError(f"there is no figure {name!r}{did_you_mean(name, FIGURES)}")
    chosen = {name: FIGURES[name] for name in options.name or FIGURES}
    patterns = [pattern for drawing in chosen.values() for pattern in drawing.experiments]
    found = open_results(options.root, None, patterns)
    for name, drawing in chosen.items():
        results = found.matching(drawing.experiments)
        known = [size for size in SIZES if size in set(results.finished["size"])]
        size = options.size or next(iter(known), None)
        if size not in known:
            what = f"{', '.join(drawing.experiments)}{f' of size {size}' if size else ''}"
            print(f"{name}: no finished run of {what} in '{options.root}'")
            continue
        parts = [part for part in own_data(settings(at_most(results, size))) if measures.of(part)]
        figure = drawing.draw(parts) if parts else None
        if figure is None or not any(axes.has_data() for axes in figure.axes):
            print(f"{name}: no run in '{options.root}' that it shows")
            continue
        stem = Path(options.out or f"{options.root}/figures") / f"{name}-{size}"
        for path in plot.save(figure, stem, options.formats, CAPTIONS[name], parts):
            print(f"{name}, size {size}: {path}")
    return say(found.problems)


def write_tables(options: Namespace) -> int:
    """Show and write the table and the figure of one sweep, --experiment. With --write, fill the tables of README.md,
    REPRODUCED.md and the pages in docs from the committed results instead."""
    if options.write:
        if options.root != "runs":
            raise UserError("--write reads analysis/results: leave out --root")
        print(*tables.write(), sep="\n")
        return 0
    results = load(options.root, options.experiment, options.size)
    ran = results.runs["experiment"].unique()
    names = [name for pattern in options.experiment for name in matching(ran, [pattern]) or [pattern]]
    wrong = sweep_report.show(results, [*dict.fromkeys(names)], Path(options.root), options.size)
    say(results.problems)
    print(*(f"not done: {line}\n" for line in wrong), sep="", end="", file=sys.stderr)
    return int(bool(wrong or results.problems))


def count_claims(options: Namespace) -> int:
    """Print the verdicts on the paper's comparisons as counts, and the pooled estimates, with the exploring and with the
    confirming seeds (docs/concepts/statistics.md)."""
    results = open_results(options.root)
    material = tables.Material(results)
    print(markdown(tables.counts(material)), markdown(tables.pooled(material)), sep="\n\n")
    return say(results.problems)


def write_export(options: Namespace) -> int:
    """Write the finished runs into analysis/results as compressed CSV files that are small enough to commit."""
    results = load(options.root, options.experiment).select(size=options.size)
    if results.finished.empty:
        raise UserError(f"no finished run of {' '.join(options.experiment)} in {options.root!r}")
    print(*export(results, Path(options.out)), sep="\n")
    return say(results.problems)


def write_explorer(options: Namespace) -> int:
    """Write one HTML page, without a server, on which you choose panels and methods and see single seeds."""
    results = open_results(options.root, options.size)
    path = Path(options.out or f"{options.root}/explore.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, explore.page(results))
    print(path)
    return say(results.problems)


def parser() -> ArgumentParser:
    whole = ArgumentParser(prog="python -m analysis", description="Tables and figures of runs.")
    commands = whole.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[Namespace], int], root: str = "runs") -> ArgumentParser:
        about = str(run.__doc__)
        own = commands.add_parser(name, help=about.partition(". ")[0], description=about)
        own.set_defaults(run=run)
        own.add_argument("--root", default=root, help=f"folder of runs, or an export; default {root}")
        return own

    figures = command("figures", draw_figures)
    text, formats = f"{' '.join(FIGURES)}; default: all", ("png", "svg", "pdf")
    figures.add_argument("name", nargs="*", metavar="FIGURE", help=text)
    figures.add_argument("--size", choices=SIZES, help="default: the largest")
    figures.add_argument("--out", help="folder for the pictures; default <root>/figures")
    figures.add_argument("--formats", nargs="+", choices=formats, default=formats, help="default: all three")
    one = command("tables", write_tables)
    either = one.add_mutually_exclusive_group(required=True)
    either.add_argument("--write", action="store_true", help="fill the tables of the documents")
    either.add_argument("--experiment", nargs="+", help="the experiments of a sweep")
    one.add_argument("--size", choices=SIZES, default="small", help="default small")
    command("claims", count_claims, root=str(RESULTS))
    page = command("explore", write_explorer)
    page.add_argument("--size", choices=SIZES, help="default: all")
    page.add_argument("--out", help="the page; default <root>/explore.html")
    exported = command("export", write_export)
    exported.add_argument("--size", nargs="*", default=SIZES[:-1], choices=SIZES, help="all but smoke")
    exported.add_argument("--experiment", nargs="*", default=["*"], help="names or patterns; default: all")
    exported.add_argument("--out", default=str(RESULTS))
    return whole


def main(given: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Raises UserError for bad input."""
    options = parser().parse_args(given)
    return options.run(options)


if __name__ == "__main__":
    with clean_exit():
        sys.exit(main())
