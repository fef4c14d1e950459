"""Every table, drawn from the frame of estimates and from the benchmarks' CSV files, as Markdown, CSV and LaTeX."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis import estimates, paper, plot
from analysis.runs import RESULTS, SIZES, Results, settings

RIVALS = ("none", "shrink_perturb", "full_reset", "dash")
CONTROLS = ("none", "rescale", "keep_norm", "random_orthogonal", "fire_exact")


# ------------------------------------------------------------------------------------------------ text of numbers
def digits(values: Iterable[float]) -> int:
    """Decimals for a column of one kind: four for accuracies and losses, one or none for returns."""
    largest = max((abs(value) for value in values if pd.notna(value)), default=0.0)
    return 4 if largest < 10 else 1 if largest < 10_000 else 0


def number(value: float | None, decimals: int | None = None, sign: bool = False) -> str:
    if value is None or pd.isna(value):
        return "-"
    decimals = digits([value]) if decimals is None else decimals
    return f"{value:{'+' if sign else ''}.{decimals}f}"


def spread(mean: float, low: float, high: float, decimals: int | None = None, sign: bool = False) -> str:
    """`0.8443 [0.8359, 0.8528]`; without brackets for one seed."""
    if pd.isna(mean):
        return "-"
    decimals = digits([mean, low, high]) if decimals is None else decimals
    text = number(mean, decimals, sign)
    return text if pd.isna(low) else f"{text} [{number(low, decimals, sign)}, {number(high, decimals, sign)}]"


def mean_text(row: pd.Series, decimals: int | None = None) -> str:
    return spread(row["mean"], row["low"], row["high"], decimals)


def difference_text(row: pd.Series, decimals: int | None = None, negate: bool = False) -> str:
    """Label minus reference; with `negate` reference minus label."""
    mean, low, high = row["difference"], row["difference_low"], row["difference_high"]
    if negate:
        mean, low, high = -mean, -high, -low
    return spread(mean, low, high, decimals, sign=True)


def p_text(p: float) -> str:
    return "-" if pd.isna(p) else "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def short(value: object) -> str:
    """Two or three digits of a float, for measured quantities that are not results."""
    return str(value) if not isinstance(value, float) else "-" if pd.isna(value) else f"{value:.3g}"


def markdown(table: pd.DataFrame) -> str:
    return table.to_markdown(index=False, disable_numparse=True) if len(table) else "Nothing was run yet."


# ------------------------------------------------------------------------------------------------ tables of runs
def status_matrix(results: Results) -> pd.DataFrame:
    """Panels of the paper against sizes: how many methods and seeds are finished, on which data."""
    done = results.finished
    rows = []
    for figure, panel in paper.cells():
        row = {"figure": figure.removeprefix("fig"), "panel": panel.replace("_", " ")}
        for size in SIZES[:-1]:
            runs = done[(done["experiment"] == f"{figure}_{panel}") & (done["size"] == size)]
            row[size] = "not run" if runs.empty else _count(runs)
        rows.append(row)
    return pd.DataFrame(rows)


def _count(runs: pd.DataFrame) -> str:
    own = runs[runs["label"] == runs["method"]]
    seeds = (own if len(own) else runs).groupby("label")["seed"].nunique()
    most = f"{seeds.max()}" if seeds.nunique() == 1 else f"{seeds.min()}-{seeds.max()}"
    return f"{len(seeds)} methods x {most} seeds, {plot.data_name(runs['data'].iloc[0])}"


def claim_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a claim and setting that ran both methods: the comparison, oriented so that a positive gain is as claimed.
    The claims of the paper at one size are one family for Holm's correction, the others at that size another."""
    headline = frame[frame["headline"]]
    rows = []
    for claim in paper.claims().to_dict("records"):
        better, worse = claim["better"], claim["worse"]
        found = headline[headline["experiment"] == claim["experiment"]]
        as_told = found[(found["label"] == better) & (found["reference"] == worse)]
        turned = found[(found["label"] == worse) & (found["reference"] == better)]
        for row in [
            *as_told.to_dict("records"),
            *(turned if as_told.empty else turned[:0]).to_dict("records"),
        ]:
            sign = (1 if row["label"] == better else -1) * (1 if row["higher_is_better"] else -1)
            ends = sorted((sign * row["difference_low"], sign * row["difference_high"]))
            gain = {
                "difference": sign * row["difference"],
                "difference_low": ends[0],
                "difference_high": ends[1],
            }
            rows.append({**row, **claim, **gain, "higher_is_better": True})
    table = pd.DataFrame(rows, columns=[*estimates.COLUMNS, "better", "worse", "source"])
    of_paper = table["source"].str.startswith("the paper's")
    families = [estimates.decide(family) for _, family in table.groupby(["size", of_paper], sort=False)]
    return pd.concat(families, ignore_index=True) if families else table.assign(p_holm=None, word=None)


def claims_table(claims: pd.DataFrame) -> pd.DataFrame:
    """Rows of `claim_rows` as text: the paper's difference and ours, with the corrected p-value."""
    rows = []
    for row in claims.to_dict("records"):
        theirs = paper.end_values(row["figure"], row["panel"])
        known = row["better"] in theirs and row["worse"] in theirs
        gap = (
            (theirs[row["better"]] - theirs[row["worse"]]) * (-1 if row["figure"] == "fig3" else 1)
            if known
            else None
        )
        rows.append(
            {
                "experiment": row["experiment"],
                "size": row["size"],
                "data": plot.data_name(row["data"]),
                "claim": f"{plot.look(row['better']).name} > {plot.look(row['worse']).name}",
                "paper's gain": number(gap, sign=True),
                "our gain [95 %]": difference_text(row),
                "seeds": row["pairs"],
                "p, corrected": p_text(row["p_holm"]),
                "verdict": {"better": "holds", "worse": "the opposite holds"}.get(row["word"], ""),
                "source": row["source"],
            }
        )
    return pd.DataFrame(rows)


def against(part: pd.DataFrame, labels: Iterable[str] | None = None) -> pd.DataFrame:
    """FIRE minus each other method of one setting in the headline measure; all of them are one family."""
    rows = part[part["headline"] & (part["reference"] == "fire")]
    rows = rows[rows["label"].isin(labels)] if labels is not None else rows
    return estimates.decide(rows)


def against_table(part: pd.DataFrame) -> pd.DataFrame:
    """`against` as text."""
    rows = against(part).set_index("label")
    table = []
    for label in plot.ordered(rows.index):
        row = rows.loc[label]
        words = {"better": "FIRE is worse", "worse": "FIRE is better"}
        table.append(
            {
                "FIRE minus": plot.look(label).name,
                "difference [95 %]": difference_text(row, digits(rows["mean"]), negate=True),
                "seeds": row["pairs"],
                "p, corrected": p_text(row["p_holm"]),
                "verdict": words.get(row["word"], ""),
            }
        )
    return pd.DataFrame(table)


def controls_table(frame: pd.DataFrame) -> pd.DataFrame:
    """FIRE minus `none` and minus each control, settings that ran a control; a star: Holm-corrected over the whole table."""
    rows = against_controls(frame)
    table = []
    for (experiment, size), group in rows.groupby(["experiment", "size"]):
        cells = {row["label"]: row for row in group.to_dict("records")}
        row = {"experiment": experiment, "size": size}
        for label in CONTROLS:
            found = cells.get(label)
            star = " *" if found and found["word"] else ""
            row[plot.look(label).name] = "-" if found is None else difference_text(found, negate=True) + star
        table.append(row)
    return pd.DataFrame(table)


def against_controls(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame[frame["headline"] & (frame["reference"] == "fire") & frame["label"].isin(CONTROLS)]
    keys = ["experiment", "size", "data"]
    ran = rows[rows["label"].isin(CONTROLS[1:])].drop_duplicates(keys)[keys]
    return estimates.decide(rows.merge(ran, on=keys))


def end_table(part: pd.DataFrame, measure: str) -> pd.DataFrame:
    """One row a method of one setting and measure: ours with interval, minus `none` with the p-value corrected over the
    table, and the paper's end value."""
    rows = part[part["metric"] == measure]
    first = estimates.means(rows).set_index("label")
    gaps = estimates.decide(rows[rows["reference"] == "none"]).set_index("label")
    theirs = (
        paper.end_values(first["figure"].iloc[0], first["panel"].iloc[0]) if first["headline"].iloc[0] else {}
    )
    decimals = digits(first["mean"])
    table = []
    for label in plot.ordered(first.index):
        gap = gaps.loc[label] if label in gaps.index else None
        row = {"method": plot.look(label).name, "mean [95 %]": mean_text(first.loc[label], decimals)}
        row |= {"seeds": first.loc[label, "n"], "minus none [95 %]": "-", "p, corrected": "-"}
        if gap is not None:
            row |= {
                "minus none [95 %]": difference_text(gap, decimals),
                "p, corrected": p_text(gap["p_holm"]),
            }
        table.append(row | ({"paper": number(theirs.get(label), decimals)} if theirs else {}))
    return pd.DataFrame(table)


def wide_table(part: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Means of all measures of a kind ("boundary" or "cost"), one row a method."""
    rows = estimates.means(part[part["kind"] == kind])
    if rows.empty:
        return pd.DataFrame()
    titles = rows.drop_duplicates("metric")["measure"]
    wide = rows.pivot_table(index="label", columns="measure", values="mean", sort=False)[titles]
    wide = wide.loc[[label for label in plot.ordered(wide.index) if label in wide.index]]
    return (
        wide.map(short)
        .set_axis([plot.look(label).name for label in wide.index])
        .rename_axis("method")
        .reset_index()
    )


def learning_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Reinforcement learning before the boundary, against random actions under the same protocol; one family."""
    rows = estimates.decide(frame[(frame["kind"] == "learning") & (frame["reference"] == "random_actions")])
    return pd.DataFrame(
        {
            "experiment": row["experiment"],
            "size": row["size"],
            "return of": row["measure"].split(" ")[0],
            "before the boundary [95 %]": mean_text(row),
            "minus random actions [95 %]": difference_text(row),
            "seeds": row["pairs"],
            "p, corrected": p_text(row["p_holm"]),
        }
        for row in rows.to_dict("records")
    )


def ablation_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Runs with overrides in the headline measure, against the run without them where there is one."""
    rows = frame[frame["headline"] & (frame["label"] != frame["method"])]
    table = []
    for row in estimates.means(rows).to_dict("records"):
        key = (
            (rows["experiment"] == row["experiment"])
            & (rows["label"] == row["label"])
            & (rows["size"] == row["size"])
        )
        gap = rows[key & (rows["reference"] == "unchanged")].to_dict("records")
        table.append(
            {
                "experiment": row["experiment"],
                "size": row["size"],
                "method": plot.look(row["method"]).name,
                "changed": row["label"].removeprefix(f"{row['method']}-"),
                "mean [95 %]": mean_text(row),
                "minus unchanged [95 %]": difference_text(gap[0]) if gap else "-",
                "seeds": row["n"],
            }
        )
    return pd.DataFrame(table)


# the settings of README.md's table: one a kind of training, and the two probes that show a loss of plasticity
OVERVIEW = ("random_label", "label_noise", "pictures_resnet18", "fig3_60k", "fig4b_balance_simple")


def overview_table(results: Results, frame: pd.DataFrame) -> pd.DataFrame:
    """A few settings by the four best-known methods, for README.md."""
    table = []
    for part in sorted(settings(results), key=lambda part: part.first["experiment"]):
        first = part.first
        keys = [frame[key] == first[key] for key in ("experiment", "size", "data")]
        rows = frame[keys[0] & keys[1] & keys[2] & frame["headline"]]
        if rows.empty or first["experiment"] not in OVERVIEW:
            continue
        ends = estimates.means(rows).set_index("label")["mean"]
        decimals = min(3, digits(ends))
        page = f"[{plot.title(part).splitlines()[0]}](analysis/results/pages/{first['experiment']}.md)"
        row = {"experiment": page, "measure": rows["measure"].iloc[0].split(",")[0]}
        for label in ("none", "shrink_perturb", "full_reset", "fire"):
            row[plot.look(label).name] = number(ends.get(label), decimals)
        table.append(row)
    return pd.DataFrame(table)


# ------------------------------------------------------------------------------------------------ tables of benchmarks
@dataclass(frozen=True)
class Benchmark:
    """One CSV of `analysis/results`: its title, what its columns mean, how it becomes a table of text."""

    file: str
    title: str
    legend: str
    table: Callable[[pd.DataFrame], pd.DataFrame]


def convergence_table(frame: pd.DataFrame) -> pd.DataFrame:
    return _by_iterations(frame, ["kind", "condition"], "dfi", "relative_error")


def models_table(frame: pd.DataFrame) -> pd.DataFrame:
    return _by_iterations(frame, ["model", "weights", "matrices"], "dfi_median", "dfi_max")


def _by_iterations(frame: pd.DataFrame, keys: list[str], first: str, second: str) -> pd.DataFrame:
    """`first` (`second`) in one column for each solver, normalisation and number of iterations."""
    newton = frame["solver"] == "newton_schulz"
    frame = frame[~newton | frame["iterations"].isin([5, 10, 20, 40])]
    named = frame["normalize"] + " " + frame["iterations"].astype("Int64").astype(str)
    column = named.where(frame["solver"] == "newton_schulz", frame["solver"])
    value = frame[first].map("{:.2g}".format) + " (" + frame[second].map("{:.2g}".format) + ")"
    table = frame.assign(column=column, value=value).pivot_table(
        index=keys, columns="column", values="value", aggfunc="last", sort=False
    )
    return (
        table.fillna("-")
        .reset_index()
        .map(lambda cell: f"{cell:.2g}" if isinstance(cell, float) else str(cell))
    )


def method_costs_table(frame: pd.DataFrame) -> pd.DataFrame:
    return beside_table_1(
        frame,
        [
            "method",
            "boundary_seconds=boundary, s",
            "boundary_mb=boundary, MB",
            "step_seconds=step, s",
            "step_mb=step, MB",
        ],
    )


def table_1(frame: pd.DataFrame) -> pd.DataFrame:
    return beside_table_1(
        frame.assign(boundary_mb=frame["boundary_mb"].round().astype(int)),
        ["method", "device", "hardware", "images", "batch", "boundary_seconds=seconds", "boundary_mb=MB"],
    )


def beside_table_1(frame: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Columns of a CSV with a line for each method, and those of the paper's Table 1 beside them."""
    theirs = paper.boundary_costs()
    pairs = [theirs.get(method, ("-", "-")) for method in frame["method"]]
    table = columns(names)(frame)
    return table.assign(**{"paper (GPU), s": [a for a, _ in pairs], "paper, MB": [b for _, b in pairs]})


def columns(names: list[str]) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """The columns `name=title` of a CSV (those that it has), numbers shortened."""
    pairs = [name.partition("=")[::2] for name in names]

    def table(frame: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame({title or name: frame[name].map(short) for name, title in pairs if name in frame})

    return table


BENCHMARKS = (
    Benchmark(
        "convergence",
        "Convergence by kind of matrix",
        "DfI of the factor, in brackets its relative error against the SVD in float64, after 5, 10, 20 and 40 published "
        "iterations with either normalisation, and of the exact solver.",
        convergence_table,
    ),
    Benchmark(
        "convergence_models",
        "Convergence by model",
        "Median DfI over the target matrices, in brackets the largest.",
        models_table,
    ),
    Benchmark(
        "method_costs",
        "Cost of each method",
        "ResNet-18 at full width on one CPU thread: a boundary with its report, and a training step of 32 images (memory "
        "with optimizer and activations). The boundary of DASH is a pass over 512 images here, and over CIFAR-10 in the "
        "paper's Table 1, which was measured on a GPU.",
        method_costs_table,
    ),
    Benchmark(
        "table1",
        "Table 1 on this hardware",
        "One boundary of ResNet-18 with batches of 256 images of 32 x 32 pixels. In the paper DASH looks at CIFAR-10's "
        "50,000 images, so its seconds are comparable only where `images` is 50,000. On a CPU: processor seconds of one "
        "thread and resident memory; on a GPU: seconds of the wall clock and memory of tensors.",
        table_1,
    ),
    Benchmark(
        "bench_fire",
        "Speed of the solvers",
        "Time of a plain loop of the published algorithm divided by ours, interleaved: above 1 ours is faster. "
        "`exact, equal DfI`: against the loop iterated until it is as exact. `fire(model)` is the whole call, targets "
        "found and results checked, against a loop over the same matrices that scales them and writes them back; "
        "`read` also reads the figures of the report.",
        columns(
            ["row=matrices of", "kind=weights", "device", "iterations=iterations of the loop", "loop_seconds=loop, s",
             "ratio_exact=exact", "ratio_equal=exact, equal DfI", "ratio_each=each to its own", "ratio_fast=fast",
             "ratio_newton_schulz=newton_schulz", "ratio_call_exact=fire(model), exact",
             "ratio_call_newton_schulz=newton_schulz ", "ratio_call_read_exact=read, exact",
             "ratio_call_read_newton_schulz=newton_schulz  ", "dfi_exact=largest DfI, exact", "dfi_newton_schulz=published",
             "error_exact=largest error, exact", "error_fast=fast ", "error_newton_schulz=published ",
             "extra_memory=extra memory / unit"]
        ),
    ),
    Benchmark(
        "bench_fire_products",
        "What limits the solvers",
        "GFLOP of the matrix products of the plain loop and of `exact` by shape, and the share of the rate of a 2048 x 2048 "
        "product that each reaches in its whole time. The ratio of the times is the ratio of the GFLOP times that of the "
        "shares: small products run below the machine's rate; a Cholesky factor, QR or SVD counts as time without flops.",
        columns(
            ["row=matrices of", "kind=weights", "device", "iterations=iterations of the loop", "shape", "matrices",
             "gflop_loop=GFLOP, loop", "gflop_exact=exact", "share_loop=share of the rate, loop", "share_exact=exact ",
             "ratio"]
        ),
    ),
    Benchmark(
        "bench_vision",
        "Speed of the vision loop",
        "Images per second, interleaved with the usual loop (PIL pictures, ToTensor and Normalize in a DataLoader). "
        "Compare the ratios: other work on the machine lowered some of the rates, both of a pair alike.",
        columns(
            ["model", "size", "image_size=pixels", "device", "variant=loop", "images_per_second=images/s",
             "ratio_to_usual=ratio"]
        ),
    ),
    Benchmark(
        "bench_loops",
        "Speed of the other loops",
        "Rates of our loop and of a plain one of the usual kind, interleaved; the ratio is the median over the rounds, with "
        "those of single rounds beside it. Replay memory: our bytes divided by those of a buffer of whole stacks. Sampling: "
        "share of an update's time.",
        columns(
            ["domain", "setting", "device", "unit", "ours", "usual", "ratio", "lowest", "highest",
             "replay_bytes_ratio=replay memory", "sampling_share=sampling", "rounds"]
        ),
    ),
    Benchmark(
        "calibration",
        "Settings that were tried",
        "Each setting that was tried before methods were compared, with the two numbers that decided about it.",
        lambda frame: frame.map(short),
    ),
)  # fmt: skip


def benchmark_tables(folder: Path = RESULTS) -> dict[str, tuple[Benchmark, pd.DataFrame, str]]:
    """{file: (benchmark, its table, where it was measured)} for the files that are in `folder`."""
    found = {}
    for benchmark in BENCHMARKS:
        path = folder / f"{benchmark.file}.csv"
        if path.exists():
            frame = pd.read_csv(path)
            found[benchmark.file] = benchmark, benchmark.table(frame), _origin(frame)
    return found


def _origin(frame: pd.DataFrame) -> str:
    if not {"commit", "hardware"} <= set(frame):
        return ""
    commits = sorted({str(commit)[:10] for commit in frame["commit"]})
    shown = ", ".join(commits) if len(commits) <= 4 else f"{len(commits)} different ones"
    return f"Machine: {', '.join(sorted(set(frame['hardware'])))}; commit: {shown}."


def write_all(results: Results, out: Path) -> list[Path]:
    """Every table as .md, .csv and .tex, and the frame of estimates that they come from as estimates.csv."""
    frame = estimates.frame(results)
    tables = {
        "status": status_matrix(results),
        "claims": claims_table(claim_rows(frame)),
        "controls": controls_table(frame),
        "overview": overview_table(results, frame),
        "learning": learning_table(frame),
        "ablations": ablation_table(frame),
    }
    tables |= {name: table for name, (_, table, _) in benchmark_tables().items()}
    out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(out / "estimates.csv", index=False, float_format="%.6g", lineterminator="\n")
    paths = [out / "estimates.csv"]
    for name, table in tables.items():
        if len(table):
            latex = table.to_latex(
                index=False, escape=True, caption=name.replace("_", " "), label=f"tab:{name}"
            )
            csv = table.to_csv(index=False, lineterminator="\n")
            for ending, text in (("md", markdown(table) + "\n"), ("csv", csv), ("tex", latex)):
                paths.append(out / f"{name}.{ending}")
                paths[-1].write_text(text, encoding="utf-8")
    return paths
