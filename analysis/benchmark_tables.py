"""Tables of the measurements in `benchmarks/`, each from one CSV of `analysis/results`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis import paper
from analysis.runs import RESULTS
from analysis.text import short

# rows of `convergence_in_short`
SHORT = (
    "gaussian 192x192",
    "gaussian 768x192",
    "kaiming uniform 192x192",
    "orthogonal + 1 % noise",
    "log-spaced to 1e-4",
)


@dataclass(frozen=True)
class Benchmark:
    """One CSV of `analysis/results`: its name without the ending, a title, the meaning of its columns, and the
    function that turns its rows into a table of text."""

    file: str
    title: str
    legend: str
    table: Callable[[pd.DataFrame], pd.DataFrame]


def convergence_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return DfI (relative error) per kind of matrix and condition number, as text."""
    return _by_iterations(frame, ["kind", "condition"], "dfi", "relative_error")


def convergence_in_short(folder: Path = RESULTS) -> pd.DataFrame:
    """Return the DfI after 5, 10, 20 and 40 iterations and of the exact solver for the matrices of SHORT and for a
    ResNet-18 in three states, from both convergence files in `folder`."""
    matrices, models = (pd.read_csv(folder / f"{name}.csv") for name in ("convergence", "convergence_models"))
    kinds = matrices[matrices["kind"].isin(SHORT)].assign(matrices=matrices["kind"], value=matrices["dfi"])
    nets = models[models["model"] == "resnet18"].assign(value=models["dfi_median"])
    nets = nets.assign(matrices="ResNet-18, " + nets["weights"])
    rows = pd.concat([kinds, nets], ignore_index=True)
    newton = (rows["normalize"] == "frobenius") & rows["iterations"].isin([5, 10, 20, 40])
    rows = rows[newton | (rows["solver"] == "exact")]
    column = rows["iterations"].map(lambda n: f"{n:.0f} iterations" if n == n else "").where(newton, "exact")
    rows = rows.assign(column=column, value=rows["value"].map("{:.2g}".format))
    return rows.pivot_table(
        index="matrices", columns="column", values="value", aggfunc="last", sort=False
    ).reset_index()


def models_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return median (largest) DfI per model and state of its weights, as text."""
    return _by_iterations(frame, ["model", "weights", "matrices"], "dfi_median", "dfi_max")


def _by_iterations(frame: pd.DataFrame, keys: list[str], first: str, second: str) -> pd.DataFrame:
    """Return cells `first (second)`: rows by `keys`, columns by solver, normalisation and number of iterations."""
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
    """Return the cost of each method, the most expensive boundary first, with the paper's Table 1 beside it."""
    frame = frame.sort_values("boundary_seconds", ascending=False)
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
    """Return the paper's Table 1 as measured here, with the paper's numbers beside it."""
    return beside_table_1(
        frame.assign(boundary_mb=frame["boundary_mb"].round().astype(int)),
        ["method", "device", "hardware", "images", "batch", "boundary_seconds=seconds", "boundary_mb=MB"],
    )


def beside_table_1(frame: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Return the columns `names` of a CSV that has one line per method, with the paper's Table 1 beside them."""
    theirs = paper.boundary_costs()
    pairs = [theirs.get(method, ("-", "-")) for method in frame["method"]]
    table = columns(names)(frame)
    return table.assign(**{"paper (GPU), s": [a for a, _ in pairs], "paper, MB": [b for _, b in pairs]})


def columns(names: list[str]) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return a function that selects the columns `name=title` of a CSV, renames them and shortens their numbers;
    columns that the CSV does not have are left out."""
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
        "50,000 images, so its seconds are comparable only where `images` is 50,000. On a CPU, the table has processor "
        "seconds of one thread and resident memory; on a GPU, seconds of the wall clock and memory of tensors.",
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
        "Each setting that was tried before methods were compared, with the two numbers that decided about it. Where a "
        "chosen setting has further rows with five seeds, these were added later, once all of its seeds had run.",
        lambda frame: frame.map(short),
    ),
)  # fmt: skip


def benchmark_tables(folder: Path = RESULTS) -> dict[str, tuple[Benchmark, pd.DataFrame, str]]:
    """Return {file: (benchmark, its table, machine and commits)} for the files that are in `folder`."""
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
