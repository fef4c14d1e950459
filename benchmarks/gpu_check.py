"""Ten minutes on a new GPU: do the scripts run and resume, is FIRE the same, how fast is it, and what does the paper cost?

    python -m benchmarks.gpu_check --write       # size paper, about ten minutes; rates go to conf/campaign/paper.yaml
    python -m benchmarks.gpu_check vgg16 dqn     # these two speeds alone
    python -m benchmarks.gpu_check --device cpu  # the same with smoke runs, in about a minute

Needs no network, no data, and no .git if FIRE_COMMIT is set. Networks, batches and steps are the paper's, images and texts
ship with the code. Rates (`benchmarks.speed`) are of each run, beside those of updates alone (`benchmarks.plain_loop`).
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import plain_loop, speed
from benchmarks.measuring import parser, record, seconds
from benchmarks.proof import prove
from harness.campaign import plan
from harness.config import CONF

IMAGES = "data=fashion_mnist data.channels=3 data.image_size"  # shipped, in the form of the paper's
# of a kind of run: script, settings, runs at a time, operations in a unit of its rate, product that limits it
KINDS = {
    "resnet18": ("vision", f"experiment=fig2a_cifar10_resnet18 {IMAGES}=32", 1, 855e9, "tf32"),
    "vgg16": ("vision", f"experiment=fig2a_tiny_imagenet_vgg16 {IMAGES}=64", 1, 1.9e12, "tf32"),
    "vit_tiny": ("vision", f"experiment=fig2a_cifar100_vit_tiny {IMAGES}=32", 1, 0.52e12, "fp32"),
    "gpt": ("language", "corpus=shipped accumulation=1 phase_1.iterations=40", 1, 0.86e9, "bf16"),
    "dqn": ("dqn", "", 8, 2.4e9, "tf32"),
    "sac": ("sac", "experiment=fig4b_walk_primitive", 16, 52e9, "tf32"),
}
SMOKE = {  # settings of the same on a CPU, one run at a time
    "resnet18": "protocol.epochs=[1,4]",
    "gpt": "phase_1.iterations=12 phase_1.eval_every=3",
    "dqn": "experiment=fig4a_catch total_steps=1200 midpoint=800 learning_starts=80 log_every=200 eval_every=1200 "
    "replay_capacity=400",
    "sac": "steps=120 midpoint=60 learning_starts=10 eval_every=20",
}


def ceilings(device: str) -> dict[str, float]:
    """Return the bytes that the device reads and writes in a second, and its operations in products of matrices by type."""
    side, numbers = (512, 2**22) if device == "cpu" else (8192, 2**28)

    def best(work: Callable[[], object]) -> float:
        return min(seconds(work, device, wall=True) for _ in range(6))

    found = {"copy": 8 * numbers / best(torch.zeros(numbers, device=device).clone)}
    for name in ("fp32", "tf32", "bf16"):
        torch.set_float32_matmul_precision("highest" if name == "fp32" else "high")
        matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16 if name == "bf16" else None)
        found[name] = 2 * side**3 / best(partial(torch.matmul, matrix, matrix))
    torch.set_float32_matmul_precision("highest")
    return found


def measured(kind: str, device: str, limit: dict[str, float]) -> dict[str, Any]:
    """Print speed and memory of runs of a kind. Return the line of `benchmarks.speed` of the one in the middle."""
    gpu = device != "cpu"
    domain, changes, at_a_time, operations, product = KINDS[kind]
    size, changes, at_a_time = ("paper", changes, at_a_time) if gpu else ("smoke", SMOKE[kind], 1)
    line = [f"size={size}", f"device={device}", *changes.split()]
    alone = plain_loop.rate(domain, speed.shortened(domain, line), device, updates=100 if gpu else 3)
    free = [torch.cuda.mem_get_info()[0] if gpu else 0]
    jobs = min(at_a_time, os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        runs = [pool.submit(speed.measure, domain, line) for _ in range(jobs)]
        while gpu and not all(run.done() for run in runs):
            free.append(torch.cuda.mem_get_info()[0])
            time.sleep(0.2)
    row = sorted((run.result() for run in runs), key=lambda row: row["rate"])[jobs // 2]
    row["setting"], together = f"{kind}, {jobs} at a time", row["rate"] * jobs
    text = f"{kind:9} {row['rate']:,.1f} {row['unit']}, {jobs} at a time, together {together / alone:.0%} of a plain loop"
    if gpu:
        text += f", {together * operations / limit[product]:.0%} of the products"
        text += f", {(free[0] - min(free)) / 1e9:.1f} GB"
    print(text, flush=True)
    return row


def with_rate(text: str, kind: str, rate: float, name: str) -> str:
    """Return the text of conf/campaign/paper.yaml with the rate of a kind of run, measured on the device of this name."""
    text = re.sub(rf"(?m)(^rates: .*\b{kind}: )[\d.]+", rf"\g<1>{rate:.1f}", text)
    older = re.search(rf"(?m)^assumed: {re.escape(name)}, rates of (.*) measured$", text)
    kinds = dict.fromkeys([*(older[1].split(", ") if older else []), kind])
    return re.sub(r"(?m)^assumed: .*$", f"assumed: {name}, rates of {', '.join(kinds)} measured", text)


def main() -> None:
    """Run the command line. The exit code is 1 if something does not work."""
    command = parser(__doc__)
    command.add_argument("kinds", nargs="*", help=f"speeds to measure, without checks: {', '.join(KINDS)}")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    command.add_argument("--write", action="store_true", help="write a GPU's rates to conf/campaign")
    options = command.parse_args()
    device, kinds, gpu = options.device, options.kinds, options.device != "cpu"
    known = [*(KINDS if gpu else SMOKE)]
    if gpu and not torch.cuda.is_available():
        command.error("there is no GPU that CUDA can use: --device cpu runs the same steps with smoke runs")
    if options.write and not gpu:
        command.error("--write is for the rates of a GPU: leave it out")
    if unknown := {*kinds} - {*known}:
        command.error(f"unknown kinds {sorted(unknown)}: on this device there are {', '.join(known)}")
    wrong = [] if kinds else prove(device)
    name, limit = torch.cuda.get_device_name() if gpu else "CPU", ceilings(device)
    products = ", ".join(f"{kind} {limit[kind] / 1e12:,.2f}" for kind in ("fp32", "tf32", "bf16"))
    print(f"{name}: memory {limit['copy'] / 1e9:,.0f} GB/s; products in TFLOP/s: {products}", flush=True)
    campaign = CONF / "campaign" / "paper.yaml"
    text = campaign.read_text()
    for kind in kinds or known:
        try:
            row = measured(kind, device, limit)
        except (subprocess.CalledProcessError, ValueError, RuntimeError) as error:
            wrong.append(kind)
            print(f"{kind:9} failed: {error}", flush=True)
            continue
        if gpu:
            busy = min(1, (os.cpu_count() or 1) / KINDS[kind][2])  # fewer cores than runs at a time: all wait
            text = with_rate(text, kind, busy * row["rate"], name)
        if options.write:
            campaign.write_text(text)
            record("speed", row, ("domain", "size", "setting", "device"))
    with tempfile.TemporaryDirectory() as folder:
        filled = Path(folder, "paper.yaml")
        filled.write_text(text)
        print(f"the paper {plan(str(filled)).splitlines()[-1].partition(', ')[2]}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
