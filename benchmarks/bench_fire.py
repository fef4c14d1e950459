"""Time of the solvers against a plain Python loop of the published algorithm; `convergence` has their accuracy.

    python -m benchmarks.bench_fire [--rows resnet18 ...] [--kinds fresh ill collapsed] [--repeats 5] [--device cuda]

Everything runs on one thread and is timed in processor time, on a GPU in wall-clock time. Every variant runs once per
round, so that other work on the machine slows all of them. A ratio is the median over the rounds of (time of the loop
/ time of ours), so above 1 ours is faster. Columns:

ratio_*         against the loop with its published number of iterations (10; 5 for GPT)
ratio_call_*    the whole call fire(model), which finds the targets and checks the results, against a plain loop over
                the targets that scales and writes back; fresh weights
ratio_equal     `exact` against the loop iterated to DfI <= 1e-8 on every matrix. The published function takes one
                number of iterations per network, so this is the largest number that any of its matrices needs (at
                most 200), found from the singular values. The time of this loop is *computed* in proportion
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring import median_ratio, parser, record, seconds, take_turns
from fire_core.projection import fire
from fire_core.solvers.polar import polar
from fire_core.targets import TargetTable, find_targets
from language.model import Decoder, Shape
from vision.models import build

Groups = dict[tuple[int, int], Tensor]
"""Matrices of one shape stacked, (count, out, in) float32, by shape."""

SOLVERS = ("exact", "newton_schulz")
KINDS = ("fresh", "ill", "collapsed")
EQUAL = 1e-8


def _vision(name: str, classes: int, size: int) -> Callable[[], nn.Module]:
    return lambda: build(name, classes=classes, channels=3, image_size=size)


ROWS: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "resnet18": (_vision("resnet18", 10, 32), "all", 10),
    "vit_tiny": (_vision("vit_tiny", 100, 32), "all", 10),
    "vit_tiny_qk": (_vision("vit_tiny", 100, 32), "qk", 10),
    "vgg16": (_vision("vgg16", 200, 64), "all", 10),
    "gpt_0.1b": (lambda: Decoder(Shape()), "all", 5),
}
"""{name: (model, rule for its targets, published number of iterations)}. GPT's tied 50304 x 768 head is a target."""


def groups_of(row: str, kind: str) -> Groups:
    """Return the target matrices of a new model of ROWS, changed as `kind` says (see `spoil`), stacked by shape."""
    torch.manual_seed(1)
    model, rule, _ = ROWS[row]
    net = model()
    matrices = [target.matrix(net).detach().float() for target in find_targets(net, rule).included]
    shapes = dict.fromkeys(tuple(matrix.shape) for matrix in matrices)
    return {s: spoil(torch.stack([m for m in matrices if tuple(m.shape) == s]), kind) for s in shapes}


def spoil(stack: Tensor, kind: str) -> Tensor:
    """Return matrices (count, out, in) changed as `kind`, one of KINDS, says.

    "fresh": unchanged. "ill": columns multiplied by 1 to 1e-4, evenly spaced in the logarithm. "collapsed": all
    singular values but the largest tenth multiplied by 1e-3.
    """
    if kind == "fresh":
        return stack
    if kind == "ill":
        return stack * torch.logspace(0, -4, stack.shape[2])
    left, singular, right = torch.linalg.svd(stack.double(), full_matrices=False)
    singular[:, max(1, singular.shape[1] // 10) :] *= 1e-3
    return ((left * singular.unsqueeze(1)) @ right).float()


def published(matrix: Tensor, iterations: int) -> Tensor:
    """Return the factor of one matrix by the published algorithm."""
    tall = matrix if len(matrix) >= matrix.shape[1] else matrix.T
    x = tall / tall.norm()
    for _ in range(iterations):
        x = 1.5 * x - 0.5 * x @ (x.T @ x)
    return x if len(matrix) >= matrix.shape[1] else x.T


def published_call(model: nn.Module, table: TargetTable, iterations: int) -> None:
    """Apply the published algorithm to a model in place as a user would write it: each matrix is solved, scaled and
    written back. There is no report."""
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for target in table.included:
            matrix = target.matrix(parameters)
            matrix.copy_(published(matrix, iterations) * target.scale)


def settings_of(solver: str, iterations: int) -> dict[str, Any]:
    """Return the settings of a solver; `iterations` counts for newton_schulz alone."""
    return {"solver": solver} | ({} if solver == "exact" else {"iterations": iterations})


def ratios(groups: Groups, iterations: int, repeats: int, device: str) -> dict[str, Any]:
    """Return the median time of the published loop, and the median ratio of its time to that of each solver."""
    work: dict[str, Any] = {
        "loop": lambda: [published(matrix, iterations) for stack in groups.values() for matrix in stack]
    }
    for name in SOLVERS:
        settings = settings_of(name, iterations)
        work[name] = lambda settings=settings: [polar(stack, **settings) for stack in groups.values()]
    times = take_turns(work, repeats, lambda run: seconds(run, device))
    row = {"loop_seconds": statistics.median(times["loop"])}
    return row | {f"ratio_{name}": median_ratio(times["loop"], times[name]) for name in SOLVERS}


def whole_call(row: str, iterations: int, repeats: int, device: str) -> dict[str, Any]:
    """Return the median ratios of the time of `published_call`, which gets its table of targets beforehand, to that of
    `fire(model)`, which also finds its targets, checks its results and reports."""
    build, rule, _ = ROWS[row]
    torch.manual_seed(1)
    model = build().to(device)
    start = copy.deepcopy(model.state_dict())
    table = find_targets(model, rule)

    def timed(work: Any) -> float:
        model.load_state_dict(start)
        return seconds(work, device)

    work: dict[str, Any] = {"loop": lambda: published_call(model, table, iterations)}
    for solver in SOLVERS:
        settings = settings_of(solver, iterations)
        work[f"call_{solver}"] = lambda settings=settings: fire(model, targets=rule, **settings)
    times = take_turns(work, repeats, timed)
    loop = times.pop("loop")
    return {f"ratio_{name}": median_ratio(loop, own) for name, own in times.items()}


def iterations_to(tolerance: float, matrix: Tensor) -> int:
    """Return the steps of the published recursion until the DfI, sum (1 - s^2)^2, is at most `tolerance`, or 200 if it
    takes more."""
    singular = torch.linalg.svdvals(matrix.double())
    s = singular / singular.norm()
    for step in range(200):
        if float(((1 - s * s) ** 2).sum()) <= tolerance:
            return step
        s = 1.5 * s - 0.5 * s**3
    return 200


def measure(row: str, kind: str, repeats: int, device: str) -> dict[str, Any]:
    """Return one line of bench_fire.csv."""
    groups, iterations = groups_of(row, kind), ROWS[row][2]
    values: dict[str, Any] = {"row": row, "kind": kind, "device": device, "iterations": iterations}
    values |= ratios({s: stack.to(device) for s, stack in groups.items()}, iterations, repeats, device)
    needed = max(iterations_to(EQUAL, matrix) for stack in groups.values() for matrix in stack)
    values |= {"loop_iterations_equal": needed, "ratio_equal": values["ratio_exact"] * needed / iterations}
    if kind == "fresh":
        values |= whole_call(row, iterations, repeats, device)
    return values | {"repeats": repeats}


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    command.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, metavar="KIND")
    command.add_argument("--repeats", type=int, default=5)
    command.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = command.parse_args()
    torch.set_num_threads(1)
    for row in options.rows:
        for kind in options.kinds:
            line = measure(row, kind, options.repeats, options.device)
            record("bench_fire", [line], ("row", "kind", "device", "iterations"))


if __name__ == "__main__":
    main()
