"""Time and peak memory of each method on a ResNet-18 at full width, for one boundary and one training step.

    python -m benchmarks.method_costs [--methods fire dash ...] [--images 512]
    python -m benchmarks.method_costs --table-1 [--images 50000] [--device auto]

On a CPU on one thread, in processor seconds; on a GPU, in those of the wall clock, and with the memory of tensors. The cost
of DASH's boundary grows with `--images`, the data of the next phase. A step is one batch of 32 images, with the optimizer.
`--table-1` is the paper's: the boundary alone, with 50,000 images, which take DASH about an hour on a CPU, so give it fewer.
"""

import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.measuring import parser, record, seconds
from fire_core import Attached, attach, snapshot
from fire_core.methods import create
from harness.device import pick_device
from harness.domains import find, methods_of
from vision.models import build


def prepared(method: str, images: int, batch: int, device: str) -> Attached:
    """Return the method with a ResNet-18 whose weights are a little away from their first values, and random images."""
    torch.manual_seed(1)
    net = build("resnet18", classes=10, channels=3, image_size=32).to(device)
    initial = snapshot({"net": net})
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    pictures = torch.randint(256, (images, 3, 32, 32), dtype=torch.uint8).to(device).split(batch)
    parts = list(zip(pictures, torch.randint(10, (images,)).to(device).split(batch), strict=True))
    adam = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    coming = lambda: ((part.float() / 128 - 1, wanted) for part, wanted in parts)  # noqa: E731
    own = create(method, first_phase=0)
    return attach(own, net, adam, initial=initial, loss=cross_entropy, batches=coming, seed=1)


def peak(work: Callable[[], float], gpu: bool = False) -> tuple[float, float]:
    """Return what `work` returns, and the MB (2**20 bytes) by which memory rises: that of this process (Linux only), or with
    `gpu` that of tensors. On a CPU, memory that the process had freed before and uses again is not seen."""
    if gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return work(), (torch.cuda.max_memory_allocated() - before) / 2**20

    def resident(field: str) -> int:
        return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return work(), (resident("VmHWM") - before) / 2**10


def step(treatment: Attached) -> None:
    net = treatment.state.nets["net"]
    inputs, labels = next(iter(treatment.state.batches()))  # type: ignore[misc]
    loss = cross_entropy(net(inputs), labels) + treatment.penalty()
    treatment.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    treatment.before_step()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    treatment.optimizer.step()
    treatment.after_step()


def measure(part: str, method: str, images: int, batch: int, device: str) -> tuple[float, float]:
    """Return seconds and peak MB of a "boundary" with its report, or of the second of two "step"s, the peak of both."""
    torch.set_num_threads(1)
    if device != "cpu":  # no warm-up on a CPU: memory that it freed would hide what the boundary takes
        prepared(method, batch, batch, device).boundary(1)
    treatment = prepared(method, images, batch, device)
    if part == "step":
        return peak(lambda: [seconds(partial(step, treatment)) for _ in range(2)][1])
    return peak(lambda: seconds(lambda: treatment.boundary(1), device), device.startswith("cuda"))


def main() -> None:
    command, known = parser(__doc__), methods_of(find("vision"))
    command.add_argument("--methods", nargs="+", choices=known, metavar="METHOD", help="default: all")
    command.add_argument("--images", type=int)
    command.add_argument("--table-1", action="store_true", help="the setting of the paper's Table 1")
    command.add_argument("--device", default="auto", help="of Table 1; the rest is measured on the CPU")
    options = command.parse_args()
    if options.table_1:
        name, images, batch, parts = "table1", 50_000, 256, ("boundary",)
        methods = ["fire", "shrink_perturb", "full_reset", "dash"]
        device, key = str(pick_device(options.device)), ("method", "images", "device", "hardware")
    else:
        name, methods, images, batch, parts = "method_costs", known, 512, 32, ("boundary", "step")
        device, key = "cpu", ("model", "method", "images", "batch")
    # each in a process of its own, because memory that another one had freed would hide its peak
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:
        for method in options.methods or methods:
            row = {"model": "resnet18", "method": method, "images": options.images or images, "batch": batch}
            for part in parts:
                taken, memory = fresh.submit(measure, part, method, row["images"], batch, device).result()
                row |= {f"{part}_seconds": taken, f"{part}_mb": memory}
            record(name, row | {"device": device}, key)


if __name__ == "__main__":
    main()
