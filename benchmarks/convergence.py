"""DfI that the solvers leave after different numbers of iterations, as analysis/results/convergence.csv.

A line is one kind of matrix, or the median over the matrices of a ResNet-18 in one of the states of `bench_fire`.
"""

import torch
from torch import Tensor

from benchmarks.bench_fire import KINDS, model_of
from benchmarks.measuring import record
from fire_core.solvers.polar import polar

PUBLISHED = {"solver": "newton_schulz", "normalize": "frobenius"}
SETTINGS = {f"{n} iterations": PUBLISHED | {"iterations": n} for n in (5, 10, 20, 40)}
SETTINGS |= {"exact": {"solver": "exact"}}


def matrices() -> dict[str, list[Tensor]]:
    """Return {name: float32 matrices}."""
    generator = torch.Generator().manual_seed(1)

    def gaussian(rows: int) -> Tensor:
        return torch.randn(rows, 192, generator=generator)

    left, right = (torch.linalg.qr(gaussian(192).double())[0] for _ in range(2))
    found = {
        "gaussian 192x192": [gaussian(192)],
        "gaussian 768x192": [gaussian(768)],
        "kaiming uniform 192x192": [torch.rand(192, 192, generator=generator) * 2 - 1],
        "orthogonal + 1 % noise": [left.float() + 0.01 * gaussian(192)],
        "log-spaced to 1e-4": [(left * torch.logspace(0, -4, 192, dtype=torch.float64) @ right.T).float()],
    }
    for kind in KINDS:
        net, table = model_of("resnet18", kind)
        found[f"ResNet-18, {kind}"] = [target.matrix(net).detach().float() for target in table.included]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, kind in matrices().items():
        line = {"matrices": name}
        for title, setting in SETTINGS.items():
            line[title] = float(torch.stack([polar(matrix, **setting).residual for matrix in kind]).median())
        record("convergence", line, ["matrices"])
