"""Time, accuracy and memory of the solvers against a plain Python loop of the published algorithm.

    python -m benchmarks.bench_fire [--rows resnet18 ...] [--kinds fresh ill collapsed] [--repeats 5] [--device cuda]
        [--iterations 10]                  of the loop; default: the published number
        [--checkpoints NAME=PATH ...]      trained weights

Everything runs on one thread and is timed in processor time, on a GPU in wall-clock time. Every variant runs once per
round, so that other work on the machine slows all of them. A ratio is the median over the rounds of (time of the loop
/ time of ours), so above 1 ours is faster. Columns:

ratio_*         against the loop with its published number of iterations (10; 5 for GPT)
ratio_call_*    the whole call fire(model), which finds the targets and checks the results, against a plain loop over
                the targets that scales and writes back; fresh weights. ratio_call_read_* also reads the report's rows
ratio_equal     `exact` against the loop iterated to DfI <= 1e-8 on every matrix. The published function takes one
                number of iterations per network, so this is the largest number that any of its matrices needs (at
                most 200), found from the singular values. The time of this loop is *computed* in proportion
ratio_each      the same, against a loop that stops each matrix at its own iteration and finds it at no cost: the mean
                number of iterations, weighted by flops
dfi_*           largest DfI over all matrices, in float64
error_*         largest ||Q - U V^T||_F / sqrt(min(m, n)) over a sample of matrices per shape, against float64 SVD;
                at a condition number k float32 itself is uncertain by 1e-8 k to 1e-7 k
extra_memory    peak resident memory of `exact` beyond its input and its result, divided by the larger of the stack
                limit and the largest matrix; measured on fresh weights in a separate process (CPU only)
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring import (
    in_new_process,
    median_ratio,
    parser,
    peak_memory,
    record,
    seconds,
    take_turns,
)
from benchmarks.weight_sets import KINDS, ROWS, Groups, groups_of, groups_of_checkpoint
from fire_core.measure.metrics import deviation_from_isometry
from fire_core.projection import fire
from fire_core.solvers.polar import STACK_BYTES, Polar, polar
from fire_core.targets import TargetTable, find_targets

SOLVERS = ("exact", "newton_schulz")
EQUAL = 1e-8


def published_loop(groups: Groups, iterations: int) -> list[Tensor]:
    """Return the factors by the published algorithm, one matrix after another."""
    factors = []
    for stack in groups.values():
        for matrix in stack:
            tall = matrix if len(matrix) >= matrix.shape[1] else matrix.T
            x = tall / tall.norm()
            for _ in range(iterations):
                x = 1.5 * x - 0.5 * x @ (x.T @ x)
            factors.append(x if len(matrix) >= matrix.shape[1] else x.T)
    return factors


def solved(stack: Tensor, solver: str, iterations: int) -> Polar:
    """Return the result of `polar`; `iterations` counts for newton_schulz alone."""
    return polar(stack, solver, **({} if solver == "exact" else {"iterations": iterations}))


def ratios(groups: Groups, iterations: int, repeats: int, device: str) -> dict[str, Any]:
    """Return the median time of the published loop, and the median ratio of its time to that of each solver."""
    work: dict[str, Any] = {"loop": lambda: published_loop(groups, iterations)}
    for name in SOLVERS:
        work[name] = lambda name=name: [solved(stack, name, iterations) for stack in groups.values()]
    times = take_turns(work, repeats, lambda run: seconds(run, device))
    row = {"loop_seconds": statistics.median(times["loop"])}
    return row | {f"ratio_{name}": median_ratio(times["loop"], times[name]) for name in SOLVERS}


def published_call(model: nn.Module, table: TargetTable, iterations: int) -> None:
    """Apply the published algorithm to a model in place as a user would write it: each matrix is solved, scaled and
    written back. There is no report."""
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for target in table.included:
            matrix = target.matrix(parameters)
            (factor,) = published_loop({(0, 0): matrix.unsqueeze(0)}, iterations)
            matrix.copy_(factor * target.scale)


def whole_call(row: str, iterations: int, repeats: int, device: str) -> dict[str, Any]:
    """Return the median ratios of the time of `published_call` to that of `fire(model)`, which also finds its targets,
    checks its results and reports.

    The plain loop gets its table of targets beforehand. `call_read_*` also reads the rows of the report.
    """
    build, rule, _ = ROWS[row]
    torch.manual_seed(1)
    model = build().to(device)
    start = copy.deepcopy(model.state_dict())
    table = find_targets(model, rule)

    def call(solver: str, read: bool) -> None:
        settings = {"iterations": iterations} if solver == "newton_schulz" else {}
        report = fire(model, targets=rule, solver=solver, **settings)
        if read:
            _ = report.rows

    def timed(work: Any) -> float:
        model.load_state_dict(start)
        return seconds(work, device)

    work: dict[str, Any] = {"loop": lambda: published_call(model, table, iterations)}
    for solver in SOLVERS:
        work[f"call_{solver}"] = lambda solver=solver: call(solver, read=False)
        work[f"call_read_{solver}"] = lambda solver=solver: call(solver, read=True)
    times = take_turns(work, repeats, timed)
    loop = times.pop("loop")
    return {f"ratio_{name}": median_ratio(loop, own) for name, own in times.items()}


def accuracy(groups: Groups, iterations: int, sample: int) -> dict[str, Any]:
    """Return the largest DfI, the largest relative error on a sample of matrices, and the number of iterations at which
    the loop reaches EQUAL: the largest that a matrix needs, and the mean weighted by flops."""
    worst: dict[str, float] = {}
    flops = needed = most = 0.0
    for shape, stack in groups.items():
        cost = len(stack) * shape[0] * shape[1] * min(shape)
        results = {name: solved(stack, name, iterations) for name in SOLVERS}
        for name, result in results.items():
            largest = float(deviation_from_isometry(result.factor.double()).max())
            worst[f"dfi_{name}"] = max(worst.get(f"dfi_{name}", 0.0), largest)
        steps = [iterations_to(EQUAL, torch.linalg.svdvals(matrix.double())) for matrix in stack]
        for index, matrix in enumerate(stack[:sample]):
            left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
            for name, result in results.items():
                error = float((result.factor[index].double() - left @ right).norm()) / min(shape) ** 0.5
                worst[f"error_{name}"] = max(worst.get(f"error_{name}", 0.0), error)
        most = max(most, *steps)
        flops += cost
        needed += cost * statistics.mean(steps)
    return worst | {"loop_iterations_equal": most, "loop_iterations_each": needed / flops}


def iterations_to(tolerance: float, singular: Tensor) -> int:
    """Return the steps of the published recursion until sum (1 - s^2)^2 <= tolerance, or 200 if it takes more."""
    s = singular / singular.norm()
    for step in range(200):
        if float(((1 - s * s) ** 2).sum()) <= tolerance:
            return step
        s = 1.5 * s - 0.5 * s**3
    return 200


def memory(row: str) -> dict[str, float]:
    """Return the peak memory that `exact` takes beyond input and result, in MB and divided by the larger of the stack
    limit and the largest matrix."""
    groups = groups_of(row, "fresh")
    unit = max(STACK_BYTES["cpu"], *(s[0] * s[1] * 4 for s in groups))
    polar(torch.randn(4, 64, 64))  # allocates the libraries' own buffers
    worst = 0.0
    for stack in groups.values():
        with peak_memory() as peak:
            result = polar(stack)
        worst = max(worst, peak.extra - stack.numel() * 4)
        del result
    return {"extra_memory_mb": worst / 2**20, "extra_memory": worst / unit}


def measure(row: str, kind: str, groups: Groups, options: argparse.Namespace) -> dict[str, Any]:
    """Return one line of bench_fire.csv."""
    iterations = options.iterations or (ROWS[row][2] if row in ROWS else 10)
    values: dict[str, Any] = {"row": row, "kind": kind, "device": options.device, "iterations": iterations}
    on_device = {s: stack.to(options.device) for s, stack in groups.items()}
    values |= ratios(on_device, iterations, options.repeats, options.device)
    del on_device
    values |= accuracy(groups, iterations, options.sample)
    for loop in ("equal", "each"):
        values[f"ratio_{loop}"] = values["ratio_exact"] * values[f"loop_iterations_{loop}"] / iterations
    if kind == "fresh":
        values |= whole_call(row, iterations, options.repeats, options.device)
    if kind == "fresh" and options.device == "cpu":
        values |= in_new_process("bench_fire", "--memory-of", row)
    return values | {"repeats": options.repeats}


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    command.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, metavar="KIND")
    command.add_argument("--repeats", type=int, default=5)
    command.add_argument("--iterations", type=int, help="of the loop; default: the published number")
    command.add_argument("--sample", type=int, default=4, help="matrices per shape compared with float64 SVD")
    command.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    command.add_argument("--checkpoints", nargs="*", default=[], metavar="NAME=PATH")
    command.add_argument("--memory-of", choices=list(ROWS), help=argparse.SUPPRESS)
    options = command.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print(json.dumps(memory(options.memory_of)))
        return
    key = ("row", "kind", "device", "iterations")
    for row in options.rows:
        for kind in options.kinds:
            record("bench_fire", [measure(row, kind, groups_of(row, kind), options)], key)
    for name, _, path in (pair.partition("=") for pair in options.checkpoints):
        record("bench_fire", [measure(name, "trained", groups_of_checkpoint(Path(path)), options)], key)


if __name__ == "__main__":
    main()
