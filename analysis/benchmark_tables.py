"""Tables of what `benchmarks/` measured: convergence and DfI, cost of a boundary, speed of solvers and loops.

Each reads one CSV file of an export; a file that is not there makes no table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis import paper

RESULTS = Path(__file__).resolve().parent / "results"  # where benchmarks write


@dataclass(frozen=True)
class Benchmark:
    """One CSV of an export: what it is called, what its columns mean, how it becomes a table."""

    file: str
    title: str
    legend: str
    table: Callable[[pd.DataFrame], pd.DataFrame]


def tables_of(folder: Path = RESULTS) -> list[tuple[Benchmark, pd.DataFrame, str]]:
    """(benchmark, its table of text cells, where it was measured) for the files that are in `folder`."""
    found = []
    for benchmark in BENCHMARKS:
        path = folder / f"{benchmark.file}.csv"
        if path.exists():
            frame = pd.read_csv(path)
            found.append((benchmark, benchmark.table(frame), _origin(frame)))
    return found


def _origin(frame: pd.DataFrame) -> str:
    commits = sorted({str(c)[:10] for c in frame["commit"]})
    shown = ", ".join(commits) if len(commits) <= 4 else f"{len(commits)} different ones"
    return f"Machine {', '.join(sorted(set(frame['hardware'])))}; commit {shown}."


def convergence_table(frame: pd.DataFrame) -> pd.DataFrame:
    """DfI (and relative error to the exact factor) per kind of matrix after 5, 10, 20, 40 published iterations, with
    either normalisation, and of the exact solver."""
    return _spread(frame, ["kind", "condition"], "dfi", "relative_error")


def models_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Median and largest DfI over the target matrices of each model."""
    return _spread(frame, ["model", "weights", "matrices"], "dfi_median", "dfi_max")


def _spread(frame: pd.DataFrame, keys: list[str], first: str, second: str) -> pd.DataFrame:
    rows = []
    for names, group in frame.groupby(keys, sort=False):
        cells = dict(zip(keys, (_short(name) for name in names), strict=True))
        for row in group.itertuples():
            newton = row.solver == "newton_schulz"
            if newton and row.iterations not in (5, 10, 20, 40):
                continue
            title = f"{row.normalize} {row.iterations}" if newton else row.solver
            cells[title] = f"{_short(getattr(row, first))} ({_short(getattr(row, second))})"
        rows.append(cells)
    return pd.DataFrame(rows).fillna("-")


def method_costs_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds and peak memory of one boundary and one training step of each method, the paper's Table 1 beside it."""
    theirs = paper.boundary_costs()
    rows = []
    for row in frame.itertuples():
        known = theirs.get(row.method)
        rows.append(
            {
                "method": row.method,
                "boundary, s": f"{row.boundary_seconds:.3g}",
                "boundary, MB": f"{row.boundary_mb:.0f}",
                "paper (one GPU), s": f"{known[0]:g}" if known else "-",
                "paper, MB": f"{known[1]:g}" if known else "-",
                "step, s": f"{row.step_seconds:.3g}",
                "step, MB": f"{row.step_mb:.0f}",
            }
        )
    return pd.DataFrame(rows)


def solver_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Time of a plain loop of the published algorithm over ours (above 1: ours is faster), and how exact."""
    return pd.DataFrame(
        {
            "matrices of": frame["row"],
            "weights": frame["kind"],
            "device": frame["device"],
            "loop's steps": frame["iterations"],
            "loop, s": frame["loop_seconds"].map(_short),
            "exact": frame["ratio_exact"].map(_ratio),
            "exact, loop to DfI 1e-8": frame["ratio_equal"].map(_ratio),
            "each matrix to its own": frame["ratio_each"].map(_ratio),
            "fast": frame["ratio_fast"].map(_ratio),
            "newton_schulz": frame["ratio_newton_schulz"].map(_ratio),
            "largest DfI: exact": frame["dfi_exact"].map(_short),
            "largest DfI: published": frame["dfi_newton_schulz"].map(_short),
            "largest error: exact": frame["error_exact"].map(_short),
            "largest error: fast": frame["error_fast"].map(_short),
            "largest error: published": frame["error_newton_schulz"].map(_short),
            "extra memory / unit": frame["extra_memory"].map(_short),
        }
    )


def vision_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Images per second of each variant and its ratio to the usual loop."""
    steps = frame[frame["images_per_second"].notna()]
    return pd.DataFrame(
        {
            "model": steps["model"],
            "size": steps["size"],
            "image": steps["image_size"],
            "device": steps["device"],
            "loop": steps["variant"],
            "images/s": steps["images_per_second"].map(lambda value: f"{value:.0f}"),
            "ratio": steps["ratio_to_usual"].map(_ratio),
        }
    )


def loops_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Rates of the language, DQN and SAC loops beside a plain one of the usual kind."""
    nothing = pd.Series(float("nan"), frame.index)
    return pd.DataFrame(
        {
            "domain": frame["domain"],
            "setting": frame["setting"],
            "device": frame["device"],
            "unit": frame["unit"],
            "ours": frame["ours"].map(_rate),
            "usual": frame["usual"].map(_rate),
            "ratio": frame["ratio"].map(_ratio),
            "lowest, highest": [
                "-" if pd.isna(low) else f"{low:.2f}x, {high:.2f}x"
                for low, high in zip(frame.get("lowest", nothing), frame.get("highest", nothing))
            ],
            "replay memory": frame.get("replay_bytes_ratio", nothing).map(_ratio),
            "sampling": frame.get("sampling_share", nothing).map(_share),
            "rounds": frame["rounds"],
        }
    )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.1%}"


def _ratio(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.2f}x"


def _short(value: object) -> str:
    if isinstance(value, float):
        return "-" if pd.isna(value) else f"{value:.2g}"
    return str(value)


BENCHMARKS = (
    Benchmark(
        "convergence",
        "Convergence by kind of matrix",
        "DfI of the factor (in brackets its relative error against float64 SVD) after 5, 10, 20, 40 published iterations "
        "with either normalisation, and of the exact solver.",
        convergence_table,
    ),
    Benchmark(
        "convergence_models",
        "Convergence by model",
        "Median DfI over the target matrices (in brackets the largest).",
        models_table,
    ),
    Benchmark(
        "method_costs",
        "What each method costs",
        "ResNet-18 at full width, one CPU thread; a boundary with its report, and a training step of 32 images (memory with "
        "optimizer and activations: `none` is the net's own). DASH's boundary is a pass over 512 images here; the "
        "paper's Table 1 is a pass over CIFAR-10 on a GPU.",
        method_costs_table,
    ),
    Benchmark(
        "bench_fire",
        "Speed of the solvers",
        "Time of a plain loop of the published algorithm over ours, interleaved: above 1x ours is faster. "
        "`exact, loop to the same DfI`: against the loop iterated until it is as exact.",
        solver_table,
    ),
    Benchmark(
        "bench_vision",
        "Speed of the vision loop",
        "Images per second, interleaved with the usual loop (PIL pictures, ToTensor and Normalize in a DataLoader).",
        vision_table,
    ),
    Benchmark(
        "bench_loops",
        "Speed of the other loops",
        "Rates of our loop and of a plain one of the usual kind, interleaved; the ratio is the median over the rounds, "
        "beside it those of single rounds. "
        "Replay memory: bytes of ours over bytes of one that stores whole stacks. Sampling: share of an update's time.",
        loops_table,
    ),
)
