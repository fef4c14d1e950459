"""Ten minutes on a new GPU: do the scripts run and resume, is FIRE the same, how fast is it, and what does the paper cost?

    python -m benchmarks.gpu_check                   # size paper on the GPU, in about ten minutes
    python -m benchmarks.gpu_check --write           # and put the rates into conf/campaign/paper.yaml
    python -m benchmarks.gpu_check --device cpu      # the same with smoke runs, in about a minute

Needs no network, no repository and no data: networks, batches and steps are those of the paper, images and texts those
that ship with the code. Set FIRE_COMMIT where there is no .git. Rates are those of `benchmarks.speed`, of each of the runs
that share the machine as in the campaign; a share is that of the arithmetic which the device reaches in large products.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import speed
from benchmarks.measuring import parser, record, seconds
from benchmarks.proof import PROOF, fire_difference, stop_and_resume
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
CATCH = (
    "experiment=fig4a_catch total_steps=1200 midpoint=800 learning_starts=80 log_every=200 eval_every=1200"
)
SMOKE = {
    "resnet18": ("vision", "protocol.epochs=[1,4]", 1, 0.0, "fp32"),
    "gpt": ("language", "phase_1.iterations=12 phase_1.eval_every=3", 1, 0.0, "fp32"),
    "dqn": ("dqn", f"{CATCH} replay_capacity=400", 1, 0.0, "fp32"),
    "sac": ("sac", "steps=120 midpoint=60 learning_starts=10 eval_every=20", 1, 0.0, "fp32"),
}


def ceilings(device: str) -> dict[str, float]:
    """Return the bytes that the device copies in a second, and its operations in products of square matrices by type."""
    side, numbers = (512, 2**22) if device == "cpu" else (8192, 2**28)

    def best(work: Callable[[], object]) -> float:
        return min(seconds(work, device, wall=True) for _ in range(6))

    found = {"copy": 8 * numbers / best(torch.zeros(numbers, device=device).clone)}
    for name, precision, kind in (
        ("fp32", "highest", "float"),
        ("tf32", "high", "float"),
        ("bf16", "high", "bfloat16"),
    ):
        torch.set_float32_matmul_precision(precision)
        matrix = torch.randn(side, side, device=device).to(getattr(torch, kind))
        found[name] = 2 * side**3 / best(lambda matrix=matrix: matrix @ matrix)
    torch.set_float32_matmul_precision("highest")
    return found


def rows_of(kind: str, settings: Any, device: str) -> list[dict[str, Any]]:
    """Return the lines of `benchmarks.speed` of the runs of a kind that share the device, in the order of their rates."""
    domain, changes, at_a_time, *_ = settings
    line = [f"size={'smoke' if device == 'cpu' else 'paper'}", f"device={device}", *changes.split()]
    jobs = max(1, min(at_a_time, os.cpu_count() or 1))
    with ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(lambda _: speed.measure(domain, line), range(jobs)))
    rows = [row | {"setting": f"{kind}, {jobs} at a time"} for row in rows]
    return sorted(rows, key=lambda row: row["rate"])


def main() -> None:
    """Run the command line. The exit code is 1 if something does not work."""
    command = parser(__doc__)
    command.add_argument("--device", default="cuda")
    command.add_argument("--write", action="store_true", help="replace the rates of conf/campaign/paper.yaml")
    device, write = (asked := command.parse_args()).device, asked.write
    gpu, wrong, free, rates, lines = device != "cpu", [], [0], {}, []
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(4 if gpu else 2) as pool:
        told = pool.map(lambda domain: stop_and_resume(domain, device, Path(root, domain)), PROOF)
        for domain, error in zip(PROOF, told):
            wrong += [domain] if error else []
            print(f"{domain:9} {error or 'runs, stops and resumes'}", flush=True)
    for ambient in ("highest", "high"):
        far = fire_difference(device, ambient)
        wrong += [] if far < 1e-3 else ["fire"]
        print(f"fire      differs by {far:.1e} from the CPU, float32 products set to {ambient}", flush=True)
    name, limit = torch.cuda.get_device_name() if gpu else "CPU", ceilings(device)
    products = ", ".join(f"{kind} {limit[kind] / 1e12:,.2f}" for kind in ("fp32", "tf32", "bf16"))
    print(f"{name}: copies {limit['copy'] / 1e9:,.0f} GB/s; products in TFLOP/s: {products}", flush=True)

    def watch() -> None:
        while True:
            free.append(torch.cuda.mem_get_info()[0])
            time.sleep(0.2)

    if gpu:
        threading.Thread(target=watch, daemon=True).start()
    for kind, settings in (KINDS if gpu else SMOKE).items():
        free[:] = free[-1:]
        try:
            rows = rows_of(kind, settings, device)
        except (subprocess.CalledProcessError, ValueError) as error:
            wrong.append(kind)
            print(f"{kind:9} failed: {error}", flush=True)
            continue
        row = rows[len(rows) // 2]
        rates[kind] = row["rate"]
        lines.append(row)
        share = (
            f", {rates[kind] * len(rows) * settings[3] / limit[settings[4]]:.0%} of the products"
            if gpu
            else ""
        )
        used = f", {(free[0] - min(free)) / 1e9:.1f} GB" if gpu else ""
        print(f"{kind:9} {rates[kind]:,.1f} {row['unit']}, {len(rows)} at a time{used}{share}", flush=True)
    campaign = CONF / "campaign" / "paper.yaml"
    text = campaign.read_text()
    known = dict(re.findall(r"(\w+): ([\d.]+)", re.search(r"(?m)^rates: (.*)$", text)[1]))
    known |= {kind: f"{rate:.1f}" for kind, rate in rates.items() if gpu}
    text = re.sub(r"(?m)^rates: .*$", f"rates: {{{', '.join(f'{k}: {v}' for k, v in known.items())}}}", text)
    if gpu:
        text = re.sub(r"(?m)^assumed: .*$", f"assumed: {name}, rates of {', '.join(rates)} measured", text)
    with tempfile.TemporaryDirectory() as folder:
        filled = Path(folder, "paper.yaml")
        filled.write_text(text)
        print(f"the paper {plan(str(filled)).splitlines()[-1].partition(', ')[2]}", flush=True)
    if write:
        campaign.write_text(text)
        record("speed", lines, ("domain", "size", "setting", "device"))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
