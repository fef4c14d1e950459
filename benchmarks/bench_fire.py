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

A second file, bench_fire_products.csv, shows per shape what limits the ratio: the flops of the matrix products in the
loop and in `exact` (Cholesky factors, QR and SVD are not counted), and the share of the rate of a large matrix product
that each reaches. The ratio of the times is the ratio of the flops times that of the two shares.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from analysis.results_file import merge, print_row
from benchmarks.time_and_memory import peak_memory, seconds
from benchmarks.weight_sets import KINDS, ROWS, Groups, groups_of, groups_of_checkpoint
from fire_core.projection import fire
from fire_core.solvers.polar import STACK_BYTES, Polar, polar
from fire_core.targets import TargetTable, find_targets

SOLVERS = ("exact", "newton_schulz")
CALLS = ("exact", "newton_schulz")
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


def solve(groups: Groups, solver: str, iterations: int) -> list[Tensor]:
    """Return the factors of every stack by `polar`."""
    return [solved(stack, solver, iterations).factor for stack in groups.values()]


def solved(stack: Tensor, solver: str, iterations: int) -> Polar:
    """Return the result of `polar`; `iterations` counts for newton_schulz alone."""
    return polar(stack, solver, **({} if solver == "exact" else {"iterations": iterations}))


def ratios(groups: Groups, iterations: int, repeats: int, device: str) -> dict[str, Any]:
    """Return the median time of the published loop, and the median ratio of its time to that of each solver."""
    variants = {name: lambda name=name: solve(groups, name, iterations) for name in SOLVERS}
    times: dict[str, list[float]] = {name: [] for name in ("loop", *SOLVERS)}
    for name in SOLVERS:  # first calls build schedules and libraries' buffers
        solve({s: stack[:1] for s, stack in groups.items() if max(s) < 2000}, name, iterations)
    for _ in range(repeats):
        times["loop"].append(seconds(lambda: published_loop(groups, iterations), device))
        for name, run in variants.items():
            times[name].append(seconds(run, device))
    row = {"loop_seconds": statistics.median(times["loop"])}
    for name in SOLVERS:
        rounds = zip(times["loop"], times[name], strict=True)
        row[f"ratio_{name}"] = statistics.median(loop / ours for loop, ours in rounds)
    return row


def products(groups: Groups, iterations: int, repeats: int, device: str) -> list[dict[str, Any]]:
    """Return one line per shape: flops of the matrix products and share of the machine's rate, for the loop and for
    `exact`. Shapes with less than 1 % of the largest flops of the loop are left out."""
    square = torch.randn(2048, 2048, device=device)
    lines = []
    for shape, stack in groups.items():
        work = {
            "loop": lambda s=stack: published_loop({(0, 0): s}, iterations),
            "exact": lambda s=stack: polar(s),
        }
        line: dict[str, Any] = {"shape": "x".join(map(str, shape)), "matrices": len(stack)}
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            for name, run in (("product", lambda: square @ square), *work.items()):
                times[name].append(seconds(run, device))
        rate = 2 * 2048**3 / statistics.median(times["product"])
        for name, run in work.items():
            with FlopCounterMode(display=False) as counter:
                run()
            line[f"gflop_{name}"] = counter.get_total_flops() / 1e9
            line[f"share_{name}"] = counter.get_total_flops() / statistics.median(times[name]) / rate
        line["rate_gflop_per_second"] = rate / 1e9
        line["ratio"] = statistics.median(a / b for a, b in zip(times["loop"], times["exact"], strict=True))
        lines.append(line)
    most = max(line["gflop_loop"] for line in lines)
    return [line for line in lines if line["gflop_loop"] >= 0.01 * most]


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
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats + 1):  # the first round builds schedules and libraries' buffers
        model.load_state_dict(start)
        times["loop"].append(seconds(lambda: published_call(model, table, iterations), device))
        for solver in CALLS:
            settings = {"iterations": iterations} if solver == "newton_schulz" else {}
            for name in (f"call_{solver}", f"call_read_{solver}"):
                model.load_state_dict(start)

                def call(read: bool = "read" in name, solver: str = solver, settings: Any = settings) -> None:
                    report = fire(model, targets=rule, solver=solver, **settings)
                    if read:
                        _ = report.rows

                times[name].append(seconds(call, device))
    loop = times.pop("loop")
    return {
        f"ratio_{name}": statistics.median(
            usual / ours for usual, ours in zip(loop[1:], own[1:], strict=True)
        )
        for name, own in times.items()
    }


def accuracy(groups: Groups, iterations: int, sample: int) -> dict[str, Any]:
    """Return the largest DfI, the largest relative error on a sample of matrices, condition numbers, and the number of
    iterations at which the loop reaches the same DfI."""
    worst: dict[str, float] = {}
    conditions: list[float] = []
    flops = needed = 0.0
    most = unfinished = completed = count = 0
    for shape, stack in groups.items():
        cost = len(stack) * shape[0] * shape[1] * min(shape)
        results = {name: solved(stack, name, iterations) for name in SOLVERS}
        completed, count = completed + int(results["exact"].completed.sum()), count + len(stack)
        for name, result in results.items():
            worst[f"dfi_{name}"] = max(worst.get(f"dfi_{name}", 0.0), *map(_deviation, result.factor))
        steps = []
        for index, matrix in enumerate(stack):
            exact, singular = _oracle(matrix, vectors=index < sample)
            conditions.append(float(singular[0] / singular[-1]))
            steps.append(iterations_to(EQUAL, singular))
            for name, result in results.items() if exact is not None else ():
                error = float((result.factor[index].double() - exact).norm()) / min(shape) ** 0.5
                worst[f"error_{name}"] = max(worst.get(f"error_{name}", 0.0), error)
        most = max(most, *steps)
        unfinished += sum(step >= 200 for step in steps)
        flops += cost
        needed += cost * statistics.mean(steps)
    return worst | {
        "matrices": count,
        "condition_median": statistics.median(conditions),
        "condition_max": max(conditions),
        "completed": completed,
        "loop_iterations_equal": most,
        "loop_iterations_each": needed / flops,
        "loop_unfinished_at_200": unfinished,
    }


def iterations_to(tolerance: float, singular: Tensor) -> int:
    """Return the steps of the published recursion until sum (1 - s^2)^2 <= tolerance, or 200 if it takes more."""
    s = singular / singular.norm()
    for step in range(200):
        if float(((1 - s * s) ** 2).sum()) <= tolerance:
            return step
        s = 1.5 * s - 0.5 * s**3
    return 200


def _deviation(factor: Tensor) -> float:
    """Return ||Q^T Q - I||_F^2 on the smaller side, in float64."""
    tall = factor.double() if len(factor) >= factor.shape[1] else factor.double().T
    gram = tall.T @ tall
    gram.diagonal().sub_(1.0)
    return float(gram.square().sum())


def _oracle(matrix: Tensor, *, vectors: bool) -> tuple[Tensor | None, Tensor]:
    """Return U V^T (None without `vectors`) and the singular values, by a float64 SVD of the QR triangle."""
    tall = matrix.double() if len(matrix) >= matrix.shape[1] else matrix.double().T
    if not vectors:
        return None, torch.linalg.svdvals(torch.linalg.qr(tall, mode="r").R)
    basis, triangle = torch.linalg.qr(tall)
    left, singular, right = torch.linalg.svd(triangle)
    exact = basis @ (left @ right)
    return (exact if len(matrix) >= matrix.shape[1] else exact.T), singular


def extra_memory(row: str) -> tuple[float, float]:
    """Return the peak memory that `exact` takes beyond input and result, in MB and divided by the larger of the stack
    limit and the largest matrix. Measured in a separate process."""
    command = [sys.executable, "-m", "benchmarks.bench_fire", "--memory-of", row]
    peak, unit = map(
        float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    )
    return peak / 2**20, peak / unit


def _print_memory(row: str) -> None:
    groups = groups_of(row, "fresh")
    largest = max(s[0] * s[1] * 4 for s in groups)
    polar(torch.randn(4, 64, 64))  # allocates the libraries' own buffers
    worst = 0.0
    for stack in groups.values():
        with peak_memory() as peak:
            result = polar(stack)
        worst = max(worst, peak.extra - stack.numel() * 4)
        del result
    print(worst, max(largest, STACK_BYTES["cpu"]))


def measure(row: str, kind: str, groups: Groups, options: argparse.Namespace) -> dict[str, Any]:
    """Return one line of bench_fire.csv, and write the lines of bench_fire_products.csv."""
    iterations = options.iterations or (ROWS[row][2] if row in ROWS else 10)
    on_device = {s: stack.to(options.device) for s, stack in groups.items()}
    values: dict[str, Any] = {"row": row, "kind": kind, "device": options.device, "iterations": iterations}
    values |= ratios(on_device, iterations, options.repeats, options.device)
    key = {name: values[name] for name in ("row", "kind", "device", "iterations")}
    lines = products(on_device, iterations, options.repeats, options.device)
    merge("bench_fire_products", [key | line for line in lines], (*key, "shape"))
    del on_device
    values |= accuracy(groups, iterations, options.sample)
    for loop in ("equal", "each"):
        values[f"ratio_{loop}"] = values["ratio_exact"] * values[f"loop_iterations_{loop}"] / iterations
    if kind == "fresh":
        values |= whole_call(row, iterations, options.repeats, options.device)
    if kind == "fresh" and options.device == "cpu":
        values["extra_memory_mb"], values["extra_memory"] = extra_memory(row)
    return values | {"repeats": options.repeats}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, metavar="KIND")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--iterations", type=int, help="iterations of the loop; default: the published number"
    )
    parser.add_argument("--sample", type=int, default=4, help="matrices per shape compared with float64 SVD")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--checkpoints", nargs="*", default=[], metavar="NAME=PATH")
    parser.add_argument("--memory-of", choices=list(ROWS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        _print_memory(options.memory_of)
        return
    work = [
        (row, kind, lambda row=row, kind=kind: groups_of(row, kind))
        for row in options.rows
        for kind in options.kinds
    ]
    for name, _, checkpoint in (pair.partition("=") for pair in options.checkpoints):
        work.append((name, "trained", lambda checkpoint=checkpoint: groups_of_checkpoint(Path(checkpoint))))
    for row, kind, groups in work:
        values = measure(row, kind, groups(), options)
        path = merge("bench_fire", [values], ("row", "kind", "device", "iterations"))
        print_row(values)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
