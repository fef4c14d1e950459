"""Where tensors lie in memory: which are tied, and which overlap."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fire_core.errors import UserError


def identity(parameter: Tensor) -> object:
    """Return a key that is equal for one Parameter found twice and for two with the same memory, shape and strides."""
    if not _in_memory(parameter):
        return id(parameter)
    return (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.device)


def tied_to(tensors: Mapping[str, Tensor], changed: set[str]) -> set[str]:
    """Return the names of `changed`, and of all tensors over the same memory with the same shape and strides."""
    keys = {identity(tensors[name]) for name in changed}
    return {name for name, tensor in tensors.items() if identity(tensor) in keys}


def refuse_overlaps(tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError for different tensors over one range of memory. Tied ones must be given once."""
    reached: dict[torch.device, tuple[int, str]] = {}
    for start, name, tensor in sorted((t.data_ptr(), n, t) for n, t in tensors.items() if _in_memory(t)):
        end, other = reached.get(tensor.device, (0, ""))
        if start < end:
            raise UserError(
                f"parameters {other!r} and {name!r} overlap in memory, and are neither one tied parameter nor apart: give "
                "one of them memory of its own, as in layer.weight = nn.Parameter(layer.weight.detach().clone())"
            )
        reached[tensor.device] = (start + _reach(tensor) * tensor.element_size(), name)


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether a tensor has more entries than places in memory, as after `expand`."""
    return _in_memory(tensor) and _reach(tensor) < tensor.numel()


def _reach(tensor: Tensor) -> int:
    """Return the number of entries from the first place in memory to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's class leaves PyTorch's operations as they are, unlike those of quantised weights."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _in_memory(tensor: Tensor) -> bool:
    return is_plain(tensor) and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
