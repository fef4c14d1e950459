"""Matrices for the benchmarks of the solvers: real layer shapes with fresh, ill, collapsed or trained weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fire_core.checkpoints.files import open_checkpoint
from fire_core.checkpoints.targets import targets_of
from fire_core.targets import find_targets
from language.model import Decoder, Shape
from vision.models import build

Groups = dict[tuple[int, int], Tensor]
"""Matrices of one shape stacked, (count, out, in) float32, by shape."""

KINDS = ("fresh", "ill", "collapsed")


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
    matrices = [target.matrix(net).detach() for target in find_targets(net, rule).included]
    return spoil(stack_by_shape(matrices), kind)


def groups_of_checkpoint(path: Path) -> Groups:
    """Return the target matrices of a checkpoint, stacked by shape."""
    checkpoint = open_checkpoint(path)
    table, _ = targets_of(checkpoint)
    return stack_by_shape([target.matrix(checkpoint.tensors) for target in table.included])


def stack_by_shape(matrices: list[Tensor]) -> Groups:
    """Return float32 copies of `matrices`, stacked by shape."""
    shapes = dict.fromkeys(tuple(matrix.shape) for matrix in matrices)
    return {s: torch.stack([m.float() for m in matrices if tuple(m.shape) == s]) for s in shapes}


def spoil(groups: Groups, kind: str) -> Groups:
    """Return the matrices changed as `kind`, one of KINDS, says.

    "fresh": unchanged. "ill": columns multiplied by 1 to 1e-4, evenly spaced in the logarithm. "collapsed": all
    singular values but the largest tenth multiplied by 1e-3.
    """
    if kind == "fresh":
        return groups
    if kind == "ill":
        return {s: stack * torch.logspace(0, -4, s[1]) for s, stack in groups.items()}
    found = {}
    for shape, stack in groups.items():
        left, singular, right = torch.linalg.svd(stack.double(), full_matrices=False)
        singular[:, max(1, singular.shape[1] // 10) :] *= 1e-3
        found[shape] = ((left * singular.unsqueeze(1)) @ right).float()
    return found
