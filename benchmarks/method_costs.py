"""Time and peak memory of each method on a ResNet-18 at full width, for one boundary and one training step.

    python -m benchmarks.method_costs [--methods fire dash ...] [--images 512]

Everything runs on one thread and is timed in processor seconds. Each method has a process of its own, because memory
that another one had freed would hide its peak. The boundary is that of the paper's Table 1, with the report, on
weights a little away from their first values. DASH computes gradients over `--images` images of the next phase, so its
cost grows with the data; in the paper it had all of CIFAR-10. The step is one batch of 32 images; its memory includes
the optimizer, and that of `none` is what the net itself needs. Writes analysis/results/method_costs.csv.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from analysis.results_file import merge, print_row
from benchmarks.time_and_memory import peak_memory, seconds
from fire_core import Phase, State, snapshot
from fire_core.methods import Method, create
from harness.domains import find, methods_of
from vision.models import build

BATCH = 32


def prepared(method: str, images: int, batch: int = BATCH, device: str = "cpu") -> tuple[Method, State]:
    """Return the method in its first phase, and the state of a ResNet-18 whose weights are a little away from their
    first values, with random images as data of the next phase."""
    torch.manual_seed(1)
    net = build("resnet18", classes=10, channels=3, image_size=32).to(device)
    state = State({"net": net}, initial=snapshot({"net": net}), loss=cross_entropy, phase=1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    pictures, labels = (
        torch.randint(256, (images, 3, 32, 32), dtype=torch.uint8),
        torch.randint(10, (images,)),
    )
    parts = list(zip(pictures.to(device).split(batch), labels.to(device).split(batch), strict=True))
    state.batches = lambda: ((part.float() / 128 - 1, wanted) for part, wanted in parts)
    state.generator = torch.Generator().manual_seed(1)
    return create(method, first_phase=1), state


def boundary(method: Method, state: State) -> dict[str, float]:
    """Return seconds and peak MB of the method's own work at a boundary."""
    device = next(state.nets["net"].parameters()).device
    with peak_memory(gpu=device.type == "cuda") as peak:
        taken = seconds(lambda: method.at_boundary(state, Phase(1)), device)
    return {"boundary_seconds": taken, "boundary_mb": peak.extra / 2**20}


def step(method: Method, state: State) -> dict[str, float]:
    """Return the seconds of the second of two training steps, and the peak MB of both with the optimizer."""
    net = state.nets["net"]
    inputs, labels = next(iter(state.batches()))  # type: ignore[misc]
    with peak_memory() as peak:
        adam = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
        state.optimizers["net"] = method.optimizer(net, adam, Phase(1))

        def train() -> None:
            loss = cross_entropy(net(inputs), labels) + method.penalty(state)
            state.optimizers["net"].zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            state.optimizers["net"].step()
            method.after_step(state)

        _, second = seconds(train), seconds(train)
    return {"step_seconds": second, "step_mb": peak.extra / 2**20}


def alone(method: str, images: int) -> dict[str, Any]:
    """Return both measurements, each made in a new process."""
    found: dict[str, Any] = {"model": "resnet18", "method": method, "images": images, "batch": BATCH}
    for part in ("boundary", "step"):
        command = [sys.executable, "-m", "benchmarks.method_costs", "--measure", part]
        command += ["--methods", method, "--images", str(images)]
        found |= json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    """Print a line per method and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = methods_of(find("vision"))
    parser.add_argument("--methods", nargs="+", default=known, choices=known, metavar="METHOD")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--measure", choices=("boundary", "step"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        measured = {"boundary": boundary, "step": step}[options.measure]
        print(json.dumps(measured(*prepared(options.methods[0], options.images))))
        return
    for name in options.methods:
        row = alone(name, options.images)
        path = merge("method_costs", [row], ("model", "method", "images", "batch"))
        print_row(row)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
