"""DfI and error of the solvers after different numbers of iterations, as CSV for `analysis/benchmark_tables.py`.

    python -m benchmarks.convergence [--models resnet18 ...]

analysis/results/convergence.csv         DfI and relative error by kind of matrix, solver and iterations
analysis/results/convergence_models.csv  median and largest DfI over the target matrices of each model, by state of the
                                         weights, solver and iterations
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_fire import KINDS, ROWS, groups_of, iterations_to
from benchmarks.measuring import parser, record
from fire_core.solvers.polar import Polar, polar

ITERATIONS = (5, 10, 20, 40)
COLUMNS = 192  # of the matrices


def matrix_kinds(columns: int) -> dict[str, Tensor]:
    """Return {name: float32 matrix}: random matrices of several shapes, and one with a known spectrum."""
    generator = torch.Generator().manual_seed(1)

    def gaussian(rows: int, wide: int) -> Tensor:
        return torch.randn(rows, wide, generator=generator)

    left, right = (torch.linalg.qr(gaussian(columns, columns).double())[0] for _ in range(2))
    return {
        f"gaussian {columns}x{columns}": gaussian(columns, columns),
        f"gaussian {2 * columns}x{columns}": gaussian(2 * columns, columns),
        f"gaussian {4 * columns}x{columns}": gaussian(4 * columns, columns),
        f"kaiming uniform {columns}x{columns}": torch.rand(columns, columns, generator=generator) * 2 - 1,
        "orthogonal + 1 % noise": left.float() + 0.01 * gaussian(columns, columns),
        "log-spaced to 1e-4": (
            (left * torch.logspace(0, -4, columns, dtype=torch.float64)) @ right.T
        ).float(),
    }


def of_kinds(columns: int) -> list[dict[str, Any]]:
    """Return the rows of convergence.csv."""
    rows = []
    for kind, matrix in matrix_kinds(columns).items():
        left, singular, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        shared = {"kind": kind, "rows": matrix.shape[0], "columns": matrix.shape[1]}
        shared |= {"condition": float(singular[0] / singular[-1])}
        shared |= {"iterations_to_1e-8": iterations_to(1e-8, matrix)}
        for setting, (result,) in solutions([matrix]):
            error = float((result.factor.double() - left @ right).norm()) / min(matrix.shape) ** 0.5
            found = {"dfi": float(result.residual), "relative_error": error}
            rows.append(shared | setting | found | {"completed": bool(result.completed)})
    return rows


def of_models(names: list[str]) -> list[dict[str, Any]]:
    """Return the rows of convergence_models.csv: median and largest DfI over all targets."""
    rows = []
    for name in names:
        for kind in KINDS:
            for setting, results in solutions(list(groups_of(name, kind).values())):
                residual = torch.cat([result.residual for result in results])
                found = {"dfi_median": float(residual.median()), "dfi_max": float(residual.max())}
                found |= {"completed": sum(int(result.completed.sum()) for result in results)}
                rows.append({"model": name, "weights": kind, "matrices": len(residual)} | setting | found)
    return rows


def solutions(stacks: list[Tensor]) -> Iterator[tuple[dict[str, Any], list[Polar]]]:
    """Yield the columns solver, normalize and iterations, and the results of the stacks: the published iteration after
    each number of ITERATIONS, then the exact solver."""
    for n in ITERATIONS:
        setting = {"iterations": n, "normalize": "frobenius"}
        yield {"solver": "newton_schulz"} | setting, [polar(x, "newton_schulz", **setting) for x in stacks]
    results = [polar(stack, "exact") for stack in stacks]
    taken = max(int(result.iterations.max()) for result in results)
    yield {"solver": "exact", "iterations": taken, "normalize": ""}, results


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--models", nargs="*", default=["resnet18"], choices=list(ROWS), metavar="MODEL")
    options = command.parse_args()
    torch.set_num_threads(1)
    record("convergence", of_kinds(COLUMNS), ("kind", "columns"))
    record("convergence_models", of_models(options.models), ("model", "weights"))


if __name__ == "__main__":
    main()
