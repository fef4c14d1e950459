"""The paper's Table 1: cost of one boundary of a ResNet-18 with CIFAR-10's 50,000 images in batches of 256.

    python -m benchmarks.table1 [--methods fire dash ...] [--images 50000] [--device auto]

On a GPU: wall-clock seconds and memory of tensors, after a first boundary as warm-up. On a CPU: processor seconds of
one thread and resident memory; DASH's pass over 50,000 images takes about an hour there, so give it fewer. Each method
runs in a process of its own. The pictures are random, which does not change the cost. Writes
analysis/results/table1.csv.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import torch

from analysis.results_file import merge, print_row
from benchmarks.method_costs import boundary, prepared
from harness.launch import pick_device

METHODS = ("fire", "shrink_perturb", "full_reset", "dash")
IMAGES, BATCH = 50_000, 256


def measure(method: str, images: int, device: str) -> dict[str, float]:
    """Return seconds and peak MB of one boundary."""
    if device != "cpu":  # no warm-up on a CPU: memory that it freed would hide what the boundary takes
        boundary(*prepared(method, BATCH, BATCH, device))
    return boundary(*prepared(method, images, BATCH, device))


def main() -> None:
    """Print a line per method and write the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD")
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = str(pick_device(options.device))
    if options.measure:
        print(json.dumps(measure(options.methods[0], options.images, device)))
        return
    for name in options.methods:
        command = [sys.executable, "-m", "benchmarks.table1", "--measure", "--methods", name]
        command += ["--images", str(options.images), "--device", device]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        row = {"method": name, "images": options.images, "batch": BATCH, "device": device, **found}
        path = merge("table1", [row], ("method", "images", "device", "hardware"))
        print_row(row)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
