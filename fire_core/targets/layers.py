"""Kinds of layers: which modules are layers or norms, how wide they are, and where their units lie."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv, instancenorm

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


def outputs_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (outputs, inputs) of a Linear, a convolution, or transformers' Conv1D with a weight of its own, else None."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() < 2:
        return None
    first, second = weight.shape[:2]
    if is_transposed(module) or isinstance(module, conv._ConvTransposeNd):
        return second * getattr(module, "groups", 1), first
    if isinstance(module, conv._ConvNd):
        return first, second * module.groups
    return (first, second) if isinstance(module, nn.Linear) else None


def is_transposed(module: nn.Module) -> bool:
    """Return whether the module is transformers' Conv1D, which stores (in, out)."""
    return hasattr(module, "nf") and any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def class_name(module: nn.Module) -> str:
    """Return the name of the class that the user wrote, without the prefix FSDP that FSDP2 adds."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if name.startswith("FSDP") and len(type(module).__mro__) > 2 else name
