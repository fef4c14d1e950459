"""Figure 5: accuracy against the number of Newton-Schulz iterations (a); curvature, DfI and SFE after the
reset (b).

    python -m analysis.fig5 --root runs

Panel a needs runs with `method=fire method.iterations=5,20,40` beside the plain ones. Panel b reads boundary
reports.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pandas as pd

from analysis import curves, measures, paper, style
from analysis.figure import experiment_of, figure_command, finish, names_of
from analysis.load import Results
from analysis.stats import estimate

PREFIXES = ("fig2a", "random_label", "label_noise", "ablation_iterations")
PLAIN_ITERATIONS = 10  # of `fire` without an override, in the paper's vision settings
NOTE = (
    "Bars and points: mean; error bars and bands: 95 % interval over seeds (Student's t), none for one seed."
)
CURVATURE = "Hessian norm on the coming data"
HESSIAN = ("after_hessian_norm", "after_hessian_lambda_max", "hessian_norm")


def headline(part: Results) -> pd.DataFrame:
    """End values of the setting's first measure."""
    return measures.end_values(part.metrics, measures.measures_of(part, experiment_of(part))[0])


def iterations_data(part: Results) -> pd.DataFrame:
    """iterations, value, low, high, seeds of the end accuracy of `fire` under each number of iterations."""
    ends = headline(part)
    rows = []
    for label in ends["label"].unique():
        method, overrides = style.split_label(label)
        if method != "fire" or (overrides and not overrides.startswith("iterations=")):
            continue
        number = overrides.removeprefix("iterations=") or str(PLAIN_ITERATIONS)
        if number.isdigit():
            value = estimate(list(measures.by_seed(ends, label).values()))
            rows.append((int(number), value.value, value.low, value.high, value.n))
    table = pd.DataFrame(rows, columns=["iterations", "value", "low", "high", "seeds"])
    return table.drop_duplicates("iterations").sort_values("iterations", ignore_index=True)


def after_reset_data(part: Results) -> pd.DataFrame:
    """metric, label, value, low, high, seeds, matrices right after the last boundary: sum of DfI over the matrices that
    were changed (as stored, and of the unscaled factor), SFE divided by that of the full reset of the same seed,
    Hessian norm (of the whole net, so without `matrices`). Where methods treat different matrices, so differ the sums."""
    last = part.boundaries.groupby(["label", "seed"])["phase"].transform("max")
    reports = part.boundaries[(part.boundaries["phase"] == last) & (part.boundaries["matrices"] > 0)]
    reports = reports[~reports["label"].str.contains("-")]
    columns = {"DfI of the stored weights": "dfi_after", "DfI of the factors": "dfi_factor"}
    columns["SFE / SFE of full reset"] = "sfe_share"
    rows = []
    most = reports.sort_values("matrices", kind="stable").drop_duplicates(["seed", "phase"], keep="last")
    # one boundary: all methods met the same weights
    if len(most) and most["phase"].max() == 1 and "none" not in set(reports["label"]):
        rows.append(
            ("DfI of the stored weights", "none", *_interval(most["dfi_before"]), most["matrices"].max())
        )
    for title, column in columns.items():
        for label, group in reports.dropna(subset=[column]).groupby("label"):
            rows.append((title, label, *_interval(group[column]), group["matrices"].max()))
    curvature = next((name for name in HESSIAN if name in set(part.metrics["metric"])), None)
    if curvature is not None:
        ends = measures.end_values(part.metrics, measures.Measure(curvature, curvature))
        ends = ends[~ends["label"].astype(str).str.contains("-")]
        for label, group in ends.groupby("label", observed=True):
            rows.append((CURVATURE, label, *_interval(group["value"]), None))
    return pd.DataFrame(rows, columns=["metric", "label", "value", "low", "high", "seeds", "matrices"])


def _interval(values: pd.Series) -> tuple[float, float | None, float | None, int]:
    found = estimate(values.astype(float).to_numpy())
    return found.value, found.low, found.high, found.n


def draw_iterations(axis: style.Axes, part: Results, paper_curves: bool) -> None:
    table = iterations_data(part)
    look = style.look("fire")
    axis.plot(table["iterations"], table["value"], color=look.colour, marker=look.marker, label=look.name)
    known = table.dropna(subset=["low"])
    axis.fill_between(known["iterations"], known["low"].astype(float), known["high"].astype(float),
                      color=look.colour, alpha=0.15, linewidth=0)  # fmt: skip
    ends = headline(part)
    for label in ("none", "full_reset", "fire_exact"):
        values = measures.by_seed(ends, label)
        if values:
            curves.draw_level(axis, sum(values.values()) / len(values), label)
    if paper_curves:
        theirs = paper.iterations()
        theirs = theirs[theirs["panel"] == names_of(part)[1]]
        if len(theirs):
            curves.draw_paper(axis, theirs)
    axis.set_title(curves.panel_title(part, experiment_of(part)))
    axis.set_xlabel("Newton-Schulz iterations")
    axis.set_ylabel(measures.measures_of(part, experiment_of(part))[0].title.split(",")[0])


def draw_bars(axis: style.Axes, table: pd.DataFrame, title: str, metric: str) -> None:
    part = table[table["metric"] == metric]
    labels = style.ordered(part["label"])
    part = part.set_index("label").loc[labels]
    axis.bar(range(len(labels)), part["value"], color=[style.look(x).colour for x in labels], width=0.65)
    for place, row in enumerate(part.itertuples()):
        if row.low is not None and not pd.isna(row.low):
            axis.plot([place, place], [row.low, row.high], color="#222222", linewidth=1.2)
    axis.set_xlim(-0.6, max(len(labels), 4) - 0.4)
    names = [style.look(x).name for x in labels]
    if part["matrices"].nunique() > 1:
        names = [f"{name} ({count:.0f} matrices)" for name, count in zip(names, part["matrices"])]
    axis.set_xticks(range(len(labels)), names, rotation=30, ha="right")
    axis.set_title(f"{metric}\n{title}")
    if metric == CURVATURE:  # orders of magnitude apart
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)


def draw(parts: list[Results], paper_curves: bool) -> style.Figure:
    """First the panels of a (settings with two or more numbers of iterations), then the bars of b."""
    scans = [part for part in parts if len(iterations_data(part)) > 1]
    bars = []
    for part in parts:
        table = after_reset_data(part)
        bars += [(part, table, metric) for metric in table["metric"].unique()]
    figure, axes = style.grid(max(1, len(scans) + len(bars)), width=4.2, height=3.3)
    for axis, part in zip(axes[: len(scans)], scans):
        draw_iterations(axis, part, paper_curves)
    for axis, (part, table, metric) in zip(axes[len(scans) :], bars):
        draw_bars(axis, table, curves.panel_title(part, experiment_of(part)), metric)
    return finish(figure, axes, parts, NOTE)


def main(given: Sequence[str] | None = None) -> int:
    return figure_command("fig5", __doc__, PREFIXES, draw, given)


if __name__ == "__main__":
    sys.exit(main())
