"""Labels: int64 tensors that say of which unit, or of which row of a weight, each entry of another tensor is made.

They are expanded (stride 0) along each dimension on which they do not depend, so they stay small.
"""

from math import prod

import torch
from torch import Tensor

# labels of entries that come from nothing that is followed, and of those that mix labels
OUTSIDE, MIXED = -1, -2


def numbered(group: int, sizes: list[int], tensor: Tensor) -> Tensor:
    """Return the labels (*sizes) of the members of a group, on the device of the labels of `tensor`."""
    device, start = "cpu" if tensor.is_meta else tensor.device, group << 32
    return torch.arange(start, start + prod(sizes), device=device).view(sizes)


def core(labels: Tensor) -> Tensor:
    """Return labels without the repetitions along expanded dimensions, which keep size 1."""
    return labels[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in labels.stride())]


def compact(labels: Tensor) -> Tensor:
    """Return labels with expanded dimensions wherever they do not depend on a dimension."""
    small = core(labels)
    for dim in range(small.ndim):
        if small.shape[dim] > 1 and (small == small.narrow(dim, 0, 1)).all():
            small = small.narrow(dim, 0, 1)
    return small.expand(labels.shape)


def constant(labels: Tensor | None, dims: list[int]) -> Tensor | None:
    """Return labels (sizes of `dims`) that do not depend on the other dimensions; None if they do."""
    if labels is None:
        return None
    moved = core(labels).movedim(dims, list(range(len(dims)))).flatten(len(dims))
    alike = bool((moved == moved[..., :1]).all())
    return moved[..., 0].expand([labels.shape[dim] for dim in dims]) if alike else None


def is_mixed(labels: Tensor | None) -> bool:
    """Return whether entries mix labels, or are not followed."""
    return labels is None or bool((core(labels) == MIXED).any())


def same_members(labels: Tensor, others: Tensor) -> bool:
    """Return whether labels differ by a constant, as those of two layers or branches with the same units do."""
    a, b = core(labels), core(others)
    return a.shape == b.shape and bool((a - a.min() == b - b.min()).all())
