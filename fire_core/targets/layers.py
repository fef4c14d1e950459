"""Kinds of layers: which modules are layers or norms, and where the channels of norms lie."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm

NORMS = (
    *(batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    nn.LocalResponseNorm,
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_layer(module: Any) -> bool:
    """Return whether a module is a Linear, a convolution, or a stack of Linear layers (stack, out, in)."""
    stack = getattr(module, "stacked_matrices", False) is True
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) or (stack and module.weight.ndim == 3)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is one of torch's norms, or declared as one (`is_norm = True`)."""
    return isinstance(module, NORMS) or getattr(module, "is_norm", False)


def channel_dims(norm: Any, output: Tensor) -> list[int]:
    """Return the dimensions of the channels of a norm."""
    declared = getattr(norm, "is_norm", False)
    if declared and norm.weight.ndim == 2:
        return [0, output.ndim - 1]
    return [output.ndim - 1] if declared or isinstance(norm, nn.LayerNorm | nn.RMSNorm) else [1]
