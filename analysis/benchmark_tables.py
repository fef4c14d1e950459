"""Tables of the measurements in `benchmarks/`, each from one CSV of `analysis/results`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis import paper
from analysis.rendering import short
from analysis.runs import RESULTS

# rows of `convergence_in_short`
SHORT = (
    "gaussian 192x192",
    "gaussian 768x192",
    "kaiming uniform 192x192",
    "orthogonal + 1 % noise",
    "log-spaced to 1e-4",
)


def convergence_in_short() -> pd.DataFrame:
    """Return the DfI after 5, 10, 20 and 40 iterations and of the exact solver for the matrices of SHORT and for a
    ResNet-18 in three states, from both convergence files."""
    matrices, models = (
        pd.read_csv(RESULTS / f"{name}.csv") for name in ("convergence", "convergence_models")
    )
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


def by_iterations(frame: pd.DataFrame, keys: list[str], first: str, second: str) -> pd.DataFrame:
    """Return cells `first (second)`: rows by `keys`, columns by solver, normalisation and number of iterations."""
    newton = frame["solver"] == "newton_schulz"
    frame = frame[~newton | frame["iterations"].isin([5, 10, 20, 40])]
    named = frame["normalize"] + " " + frame["iterations"].astype("Int64").astype(str)
    column = named.where(newton[frame.index], frame["solver"])
    value = frame[first].map("{:.2g}".format) + " (" + frame[second].map("{:.2g}".format) + ")"
    table = frame.assign(column=column, value=value).pivot_table(
        index=keys, columns="column", values="value", aggfunc="last", sort=False
    )
    return (
        table.fillna("-")
        .reset_index()
        .map(lambda cell: f"{cell:.2g}" if isinstance(cell, float) else str(cell))
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


TABLES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "convergence": lambda frame: by_iterations(frame, ["kind", "condition"], "dfi", "relative_error"),
    "convergence_models": lambda frame: by_iterations(
        frame, ["model", "weights", "matrices"], "dfi_median", "dfi_max"
    ),
    "method_costs": lambda frame: beside_table_1(
        frame.sort_values("boundary_seconds", ascending=False),
        ["method", "boundary_seconds=boundary, s", "boundary_mb=boundary, MB", "step_seconds=step, s", "step_mb=step, MB"],
    ),
    "table1": lambda frame: beside_table_1(
        frame.assign(boundary_mb=frame["boundary_mb"].round().astype(int)),
        ["method", "device", "hardware", "images", "batch", "boundary_seconds=seconds", "boundary_mb=MB"],
    ),
    "bench_fire": columns([
        "row=matrices of", "kind=weights", "device", "iterations=iterations of the loop", "loop_seconds=loop, s",
        "ratio_exact=exact", "ratio_equal=exact, equal DfI", "ratio_each=each to its own",
        "ratio_newton_schulz=newton_schulz", "ratio_call_exact=fire(model), exact",
        "ratio_call_newton_schulz=newton_schulz ", "ratio_call_read_exact=read, exact",
        "ratio_call_read_newton_schulz=newton_schulz  ", "dfi_exact=largest DfI, exact", "dfi_newton_schulz=published",
        "error_exact=largest error, exact", "error_newton_schulz=published ",
        "extra_memory=extra memory / unit",
    ]),
    "bench_vision": lambda frame: columns([
        "model", "size", "image_size=pixels", "device", "variant=loop", "images_per_second=images/s",
        "ratio_to_usual=ratio",
    ])(frame[frame["ratio_to_usual"].notna()]),
    "bench_loops": columns([
        "domain", "setting", "device", "unit", "ours", "usual", "ratio", "lowest", "highest",
        "replay_bytes_ratio=replay memory", "sampling_share=sampling", "rounds",
    ]),
    "calibration": lambda frame: frame.map(short),
}  # fmt: skip


class Measured(NamedTuple):
    """The table of one CSV of `analysis/results`, and a sentence with machine and commits."""

    table: pd.DataFrame
    origin: str


def benchmark_tables(folder: Path = RESULTS) -> dict[str, Measured]:
    """Return {name of the CSV: its table and origin} for the files that are in `folder`."""
    paths = {name: folder / f"{name}.csv" for name in TABLES}
    frames = {name: pd.read_csv(path) for name, path in paths.items() if path.exists()}
    return {name: Measured(TABLES[name](frame), _origin(frame)) for name, frame in frames.items()}


def _origin(frame: pd.DataFrame) -> str:
    if not {"commit", "hardware"} <= set(frame):
        return ""
    commits = sorted({str(commit)[:10] for commit in frame["commit"]})
    shown = ", ".join(commits) if len(commits) <= 4 else f"{len(commits)} different ones"
    return f"Machine: {', '.join(sorted(set(frame['hardware'])))}; commit: {shown}."
