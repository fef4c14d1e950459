"""DfI and error of the solvers after different numbers of iterations, as CSV for `analysis/benchmark_tables.py`.

    python -m benchmarks.convergence [--models resnet18 ...]

analysis/results/convergence.csv         DfI and relative error by kind of matrix, solver, normalisation and iterations
analysis/results/convergence_models.csv  median and largest DfI over the target matrices of each model, by state of the
                                         weights, solver and iterations; Frobenius normalisation only
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from analysis.results_file import RESULTS, merge, print_row
from benchmarks.bench_fire import iterations_to
from benchmarks.weight_sets import ROWS, groups_of
from fire_core.solvers.polar import ITERATIONS as PUBLISHED_ITERATIONS
from fire_core.solvers.polar import polar

ITERATIONS = (5, 10, 15, 20, 30, 40)
COLUMNS = 192  # of the matrices of known spectrum


def matrix_kinds(columns: int) -> dict[str, Tensor]:
    """Return {name: float32 matrix}: random matrices of several shapes, and square ones with a known spectrum."""
    generator = torch.Generator().manual_seed(1)

    def gaussian(rows: int, wide: int) -> Tensor:
        return torch.randn(rows, wide, generator=generator)

    left, right = (torch.linalg.qr(gaussian(columns, columns).double())[0] for _ in range(2))
    index = torch.arange(columns, dtype=torch.float64)
    spectra = {
        "power law 1/i": 1 / (index + 1),
        "log-spaced to 1e-2": torch.logspace(0, -2, columns, dtype=torch.float64),
        "log-spaced to 1e-4": torch.logspace(0, -4, columns, dtype=torch.float64),
        "a tenth at 1, rest 1e-3": torch.where(index < columns // 10, 1.0, 1e-3),
        "a tenth at 1, rest 1e-6": torch.where(index < columns // 10, 1.0, 1e-6),
        "a tenth at 1, rest 0": torch.where(index < columns // 10, 1.0, 0.0),
    }
    kinds = {
        f"gaussian {columns}x{columns}": gaussian(columns, columns),
        f"gaussian {2 * columns}x{columns}": gaussian(2 * columns, columns),
        f"gaussian {4 * columns}x{columns}": gaussian(4 * columns, columns),
        f"kaiming uniform {columns}x{columns}": torch.rand(columns, columns, generator=generator) * 2 - 1,
        "orthogonal + 1 % noise": left.float() + 0.01 * gaussian(columns, columns),
    }
    return kinds | {name: ((left * s) @ right.T).float() for name, s in spectra.items()}


def of_kinds(columns: int) -> list[dict[str, Any]]:
    """Return the rows of convergence.csv."""
    rows = []
    for kind, matrix in matrix_kinds(columns).items():
        left, singular, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        exact = left @ right
        shared = {
            "kind": kind,
            "rows": matrix.shape[0],
            "columns": matrix.shape[1],
            "condition": float(singular[0] / singular[-1]),
            "iterations_to_1e-8": iterations_to(1e-8, singular),
        }
        runs = [("newton_schulz", norm, n) for norm in ("frobenius", "spectral") for n in ITERATIONS]
        for solver, norm, n in [*runs, ("exact", "", 0)]:
            result = polar(
                matrix, solver, iterations=n or PUBLISHED_ITERATIONS, normalize=norm or "frobenius"
            )
            error = float((result.factor.double() - exact).norm()) / min(matrix.shape) ** 0.5
            rows.append(
                shared
                | {"solver": solver, "normalize": norm, "iterations": n or int(result.iterations)}
                | {
                    "dfi": float(result.residual),
                    "relative_error": error,
                    "completed": bool(result.completed),
                }
            )
    return rows


def of_models(names: list[str]) -> list[dict[str, Any]]:
    """Return the rows of convergence_models.csv: median and largest DfI over all targets."""
    rows = []
    for name in names:
        for kind in ("fresh", "ill", "collapsed"):
            groups = groups_of(name, kind)
            runs = [*(("newton_schulz", "frobenius", n) for n in ITERATIONS), ("exact", "", 0)]
            for solver, norm, n in runs:
                results = [
                    polar(stack, solver, iterations=n or PUBLISHED_ITERATIONS) for stack in groups.values()
                ]
                residual = torch.cat([result.residual for result in results])
                rows.append(
                    {"model": name, "weights": kind, "matrices": len(residual), "solver": solver}
                    | {"normalize": norm, "iterations": n or int(max(r.iterations.max() for r in results))}
                    | {"dfi_median": float(residual.median()), "dfi_max": float(residual.max())}
                    | {"completed": sum(int(result.completed.sum()) for result in results)}
                )
    return rows


def merge_by_solver(name: str, rows: list[dict[str, Any]], key: tuple[str, ...]) -> None:
    """Write `rows` into `name`.csv. The number of iterations is part of the key for Newton-Schulz alone; for the other
    solvers it is a result."""
    for solver in dict.fromkeys(row["solver"] for row in rows):
        chosen = ("iterations",) if solver == "newton_schulz" else ()
        merge(name, [row for row in rows if row["solver"] == solver], (*key, "solver", "normalize", *chosen))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # VGG-16 and GPT-0.1B take minutes and tens of minutes, so they run only if they are named
    usual = ["vit_tiny_qk", "vit_tiny", "resnet18"]
    parser.add_argument("--models", nargs="*", default=usual, choices=list(ROWS), metavar="MODEL")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = of_kinds(COLUMNS)
    merge_by_solver("convergence", kinds, ("kind", "columns"))
    for row in kinds:
        if row["solver"] != "newton_schulz" or row["iterations"] in (5, 10, 20, 40):
            print_row(row)
    rows = of_models(options.models)
    merge_by_solver("convergence_models", rows, ("model", "weights"))
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
