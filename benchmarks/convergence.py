"""The DfI that the solvers of `fire` leave, a median over the matrices of a network: make bench-convergence"""

import torch
from torch import Tensor, nn

from benchmarks.measuring import record
from fire_core.solvers.polar import polar
from fire_core.targets import TargetTable, find_targets
from vision.models import build

KINDS = ("fresh", "ill", "collapsed")
PUBLISHED = {"solver": "newton_schulz", "normalize": "frobenius"}
SOLVERS = {f"{n} iterations": PUBLISHED | {"iterations": n} for n in (5, 10, 20, 40)}
SOLVERS |= {"exact": {"solver": "exact"}}


def network(kind: str) -> tuple[nn.Module, TargetTable]:
    """Return a new ResNet-18 and its targets, whose weights are changed as `kind` says (see `spoil`)."""
    torch.manual_seed(1)
    model = build("resnet18", classes=10, channels=3, image_size=32)
    table = find_targets(model)
    for target in table.included:
        target.write(model, spoil(target.matrix(model).detach(), kind))
    return model, table


def spoil(matrix: Tensor, kind: str) -> Tensor:
    """Return a matrix (out, in), "fresh": unchanged, "ill": columns multiplied by 1 to 1e-4, evenly spaced in the logarithm,
    or "collapsed": all singular values but the largest tenth multiplied by 1e-3."""
    if kind == "fresh":
        return matrix
    if kind == "ill":
        return matrix * torch.logspace(0, -4, matrix.shape[1])
    left, singular, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    singular[max(1, len(singular) // 10) :] *= 1e-3
    return ((left * singular) @ right).float()


def matrices() -> dict[str, list[Tensor]]:
    """Return the float32 matrices of each line of convergence.csv."""
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
        net, table = network(kind)
        found[f"ResNet-18, {kind}"] = [target.matrix(net).detach().float() for target in table.included]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, kind in matrices().items():
        line = {"matrices": name}
        for title, setting in SOLVERS.items():
            line[title] = float(torch.stack([polar(matrix, **setting).residual for matrix in kind]).median())
        record("convergence", line, ["matrices"])
