"""DfI that the solvers leave after different numbers of iterations, as analysis/results/convergence.csv.

A line is one kind of matrix, or the median over the matrices of a ResNet-18 in one of the states of `bench_fire`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.bench_fire import KINDS, groups_of
from benchmarks.measuring import record
from fire_core.solvers.polar import polar

PUBLISHED = {"solver": "newton_schulz", "normalize": "frobenius"}
SETTINGS = {f"{n} iterations": PUBLISHED | {"iterations": n} for n in (5, 10, 20, 40)}
SETTINGS |= {"exact": {"solver": "exact"}}


def stacks() -> dict[str, list[Tensor]]:
    """Return {name: float32 matrices, stacked by shape}."""
    generator = torch.Generator().manual_seed(1)

    def gaussian(rows: int) -> Tensor:
        return torch.randn(rows, 192, generator=generator)

    left, right = (torch.linalg.qr(gaussian(192).double())[0] for _ in range(2))
    matrices = {
        "gaussian 192x192": gaussian(192),
        "gaussian 768x192": gaussian(768),
        "kaiming uniform 192x192": torch.rand(192, 192, generator=generator) * 2 - 1,
        "orthogonal + 1 % noise": left.float() + 0.01 * gaussian(192),
        "log-spaced to 1e-4": (left * torch.logspace(0, -4, 192, dtype=torch.float64) @ right.T).float(),
    }
    nets = {f"ResNet-18, {kind}": list(groups_of("resnet18", kind).values()) for kind in KINDS}
    return {name: [matrix.unsqueeze(0)] for name, matrix in matrices.items()} | nets


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, shapes in stacks().items():
        left_over = {
            title: float(torch.cat([polar(stack, **setting).residual for stack in shapes]).median())
            for title, setting in SETTINGS.items()
        }
        record("convergence", [{"matrices": name} | left_over], ["matrices"])
