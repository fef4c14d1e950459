"""Time of fire(model) against a plain Python loop of the published algorithm, and the accuracy of the solvers.

    python -m benchmarks.bench_fire [--rows resnet18 ...] [--repeats 5] [--device cuda]
    python -m benchmarks.bench_fire --convergence    # DfI that the solvers leave; a median over the matrices of a network

On one thread, in processor time, on a GPU in wall-clock time. A ratio is the median over the rounds of (time of the loop /
time of ours): above 1 ours is faster. The loop knows its matrices; `fire` finds them, checks the results and reports.
"""

import copy
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring import parser, record, seconds
from fire_core.projection import fire
from fire_core.solvers.polar import polar
from fire_core.targets import TargetTable, find_targets
from language.model import Decoder, Shape
from vision.models import build

KINDS = ("fresh", "ill", "collapsed")
PUBLISHED = {"solver": "newton_schulz", "normalize": "frobenius"}
SOLVERS = {f"{n} iterations": PUBLISHED | {"iterations": n} for n in (5, 10, 20, 40)}
SOLVERS |= {"exact": {"solver": "exact"}}
# model, rule for its targets and published number of iterations. GPT's tied 50304 x 768 head is a target
ROWS: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "resnet18": (partial(build, "resnet18", classes=10, channels=3, image_size=32), "all", 10),
    "vit_tiny": (partial(build, "vit_tiny", classes=100, channels=3, image_size=32), "all", 10),
    "vit_tiny_qk": (partial(build, "vit_tiny", classes=100, channels=3, image_size=32), "qk", 10),
    "vgg16": (partial(build, "vgg16", classes=200, channels=3, image_size=64), "all", 10),
    "gpt_0.1b": (lambda: Decoder(Shape()), "all", 5),
}


def model_of(row: str, kind: str) -> tuple[nn.Module, TargetTable]:
    """Return a new model of ROWS and its targets, whose weights are changed as `kind` says (see `spoil`)."""
    torch.manual_seed(1)
    make, rule, _ = ROWS[row]
    model = make()
    table = find_targets(model, rule)
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


def published(matrix: Tensor, iterations: int) -> Tensor:
    """Return the factor of one matrix by the published algorithm."""
    tall = matrix if len(matrix) >= matrix.shape[1] else matrix.T
    x = tall / tall.norm()
    for _ in range(iterations):
        x = 1.5 * x - 0.5 * x @ (x.T @ x)
    return x if len(matrix) >= matrix.shape[1] else x.T


@torch.no_grad()
def published_call(model: nn.Module, table: TargetTable, iterations: int) -> None:
    """Apply the published algorithm in place as a user would write it: each matrix is solved, scaled and written back."""
    parameters = dict(model.named_parameters())
    for target in table.included:
        matrix = target.matrix(parameters)
        matrix.copy_(published(matrix, iterations) * target.scale)


def measure(row: str, kind: str, repeats: int, device: str) -> dict[str, Any]:
    """Return one line of bench_fire.csv. The variants take turns, every second round in the opposite order, so that other
    work on the machine slows all of them. The first round, which compiles and fills buffers, is not counted."""
    model, table = model_of(row, kind)
    start, (_, rule, iterations) = copy.deepcopy(model.to(device).state_dict()), ROWS[row]
    work: dict[str, Callable[[], object]] = {
        "loop": lambda: published_call(model, table, iterations),
        "exact": lambda: fire(model, targets=rule, solver="exact"),
        "newton_schulz": lambda: fire(model, targets=rule, iterations=iterations),
    }

    def timed(name: str) -> float:
        model.load_state_dict(start)
        return seconds(work[name], device)

    rounds = [{name: timed(name) for name in list(work)[:: (-1) ** n]} for n in range(repeats + 1)][1:]
    line = {"row": row, "kind": kind, "device": device, "iterations": iterations}
    line["call_seconds"] = statistics.median(each["loop"] for each in rounds)
    for name in ("exact", "newton_schulz"):
        line[f"ratio_call_{name}"] = statistics.median(each["loop"] / each[name] for each in rounds)
    return line | {"repeats": repeats}


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
        net, table = model_of("resnet18", kind)
        found[f"ResNet-18, {kind}"] = [target.matrix(net).detach().float() for target in table.included]
    return found


if __name__ == "__main__":
    command = parser(__doc__)
    command.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    command.add_argument("--repeats", type=int, default=5)
    command.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    command.add_argument("--convergence", action="store_true")
    options = command.parse_args()
    torch.set_num_threads(1)
    for name, kind in matrices().items() if options.convergence else ():
        line = {"matrices": name}
        for title, setting in SOLVERS.items():
            line[title] = float(torch.stack([polar(matrix, **setting).residual for matrix in kind]).median())
        record("convergence", line, ["matrices"])
    for row, kind in itertools.product(() if options.convergence else options.rows, KINDS):
        line = measure(row, kind, options.repeats, options.device)
        record("bench_fire", line, ("row", "kind", "device", "iterations"))
