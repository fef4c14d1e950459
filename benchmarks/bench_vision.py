"""Images per second of the suite's vision loop against the usual one, in one process.

    python -m benchmarks.bench_vision [--size small|paper] [--models resnet18 ...] [--compile] [--device cuda]

The usual loop is that of most repositories: a data set that returns PIL pictures, torchvision's ToTensor and
Normalize, a DataLoader, float32, eager mode, Adam, and loss and accuracy read back at every step; a ViT computes all
tokens of its last block. Ours keeps uint8 tensors on the device, gathers and normalises them there, uses fused Adam,
and reads nothing back within an epoch. Further variants are channels-last, on a GPU channels-last with bfloat16,
and compiled (--compile).

All variants train the same net from the same weights with the same batch size. Images per second are the median over
the rounds, and ratios the median of the ratios per round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from benchmarks.measuring import median_ratio, parser, record, take_turns
from fire_core import Phase, State, snapshot
from fire_core.methods import create
from vision.data import load
from vision.images import Images
from vision.models import build
from vision.models.vit import ViT
from vision.protocols import batch_indices, make_batch, make_phases
from vision.torchvision_import import import_torchvision

SETTINGS: dict[str, dict[str, tuple[dict[str, int], int]]] = {  # net -> its arguments, image size
    "small": {
        "mlp": ({"width": 256, "depth": 3}, 14),
        "cnn": ({"width": 16}, 14),
        "resnet18": ({"width": 8}, 14),
        "vit_tiny": ({"width": 48, "depth": 4, "heads": 3}, 28),
        "vgg16": ({"width": 8, "depth": 11}, 32),
    },
    "paper": {"resnet18": ({}, 32), "vit_tiny": ({}, 32), "vgg16": ({}, 64)},
}


class Pictures(Dataset):
    """A data set in torchvision's form: one PIL picture per index, passed through a transform."""

    def __init__(self, images: Images, transform: Callable[[Image.Image], Tensor]) -> None:
        self.arrays = images.train_images.cpu().permute(0, 2, 3, 1).squeeze(-1).numpy()
        self.labels = images.train_labels.tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.arrays[index])), self.labels[index]


def usual_loop(net: nn.Module, images: Images, options: argparse.Namespace) -> Iterator[int]:
    """Train forever, and yield the number of images of each step."""
    transforms = import_torchvision().transforms
    normalise = transforms.Normalize(images.mean.tolist(), images.std.tolist())
    pictures = Pictures(images, transforms.Compose([transforms.ToTensor(), normalise]))
    cuda = options.device == "cuda"
    loader = DataLoader(
        pictures,
        options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        pin_memory=cuda,
        persistent_workers=options.workers > 0,
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    total = 0.0
    while True:
        for inputs, labels in loader:
            inputs, labels = inputs.to(options.device), labels.to(options.device)
            net.train()
            outputs = net(inputs)
            loss = cross_entropy(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            total += loss.item() + (outputs.argmax(dim=1) == labels).sum().item()
            yield len(labels)


def our_loop(
    net: nn.Module,
    images: Images,
    options: argparse.Namespace,
    *,
    channels_last: bool = False,
    bf16: bool = False,
    compiled: bool = False,
) -> Iterator[int]:
    """Train forever as vision/train.py does, with the given changes, and yield the number of images of each step."""
    if channels_last:
        net.to(memory_format=torch.channels_last)
    forward = torch.compile(net) if compiled else net
    device = torch.device(options.device)
    treatment = create("none", first_phase=1)
    state = State({"net": net}, initial=snapshot({"net": net}), loss=cross_entropy, phase=1)
    state.batches = lambda: iter([make_batch(images, phase, phase.indices[:256], phase.labels[:256])])
    adam = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    optimizer = state.optimizers["net"] = treatment.optimizer(net, adam, Phase(1))
    phase = make_phases("warm_start", images, seed=1, share=1.0, epochs=1)[1]
    loss_sum, epoch = torch.zeros((), device=device), 0
    net.train()
    while True:
        for batch in batch_indices(1, 1, epoch, len(phase.indices), options.batch_size, device):
            inputs, labels = make_batch(images, phase, phase.indices[batch], phase.labels[batch])
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = cross_entropy(forward(inputs), labels)
            optimizer.zero_grad(set_to_none=True)
            (loss + treatment.penalty(state)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            treatment.after_step(state)
            loss_sum += loss.detach() * len(batch)
            yield len(batch)
        treatment.after_epoch(state)
        epoch += 1


def speed(steps: Iterator[int], options: argparse.Namespace) -> float:
    """Return the images per second of `options.seconds` seconds of training."""
    started, count, seconds = time.perf_counter(), 0, 0.0
    while seconds < options.seconds:
        count += next(steps)
        if options.device == "cuda" and count % (20 * options.batch_size) == 0:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    if options.device == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - started)


def compare(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one net: images per second of each variant and their ratio to the usual loop."""
    settings, size = SETTINGS[options.size][name]
    images = load("fashion_mnist", image_size=size, fit="resize", channels=3, device=options.device)
    torch.manual_seed(0)
    start = build(name, classes=10, channels=3, image_size=size, **settings).state_dict()

    def net() -> nn.Module:
        fresh = build(name, classes=10, channels=3, image_size=size, **settings)
        fresh.load_state_dict(start)
        return fresh.to(options.device)

    usual_net = net()
    if isinstance(usual_net, ViT):
        usual_net.all_tokens = True  # as in other implementations of ViT
    variants = {"usual": usual_loop(usual_net, images, options), "ours": our_loop(net(), images, options)}
    variants["ours, channels-last"] = our_loop(net(), images, options, channels_last=True)
    if options.device == "cuda":
        variants["ours, bf16"] = our_loop(net(), images, options, channels_last=True, bf16=True)
    if options.compile:
        variants["ours, compiled"] = our_loop(net(), images, options, compiled=True)
    speeds = take_turns(variants, options.rounds, lambda steps: speed(steps, options))
    shared = {"size": options.size, "model": name, "image_size": size, "batch_size": options.batch_size}
    rows = []
    for variant, values in speeds.items():
        row = shared | {"device": options.device, "variant": variant}
        row |= {"images_per_second": round(statistics.median(values), 1)}
        rows.append(row | {"ratio_to_usual": round(median_ratio(values, speeds["usual"]), 3)})
    return rows


def main() -> None:
    command, cuda = parser(__doc__), torch.cuda.is_available()
    command.add_argument("--size", choices=list(SETTINGS), default="paper" if cuda else "small")
    command.add_argument("--models", nargs="+", choices=SETTINGS["small"], help="default: all of the size")
    command.add_argument("--device", default="cuda" if cuda else "cpu")
    command.add_argument("--batch-size", type=int, default=256)
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--seconds", type=float, default=1.0, help="seconds per variant and round")
    command.add_argument(
        "--workers", type=int, default=4 if cuda else 0, help="of the usual loop's DataLoader"
    )
    command.add_argument(
        "--compile", action="store_true", help="also torch.compile (needs a C++ compiler on CPU)"
    )
    options = command.parse_args()
    torch.set_num_threads(1)
    for name in [name for name in SETTINGS[options.size] if name in (options.models or SETTINGS["small"])]:
        key = ("size", "model", "image_size", "batch_size", "device", "variant")
        record("bench_vision", compare(name, options), key)


if __name__ == "__main__":
    main()
