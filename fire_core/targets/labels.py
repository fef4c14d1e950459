"""Labels: int64 tensors that say of which unit, or of which row of a weight, each entry of another tensor is made.

They are expanded (stride 0) along each dimension on which they do not depend, so they stay small.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fire_core.targets.operations import RESHAPES, Operation

# labels of entries that come from nothing that is followed, and of those that mix labels
OUTSIDE, MIXED = -1, -2


def counted_from(start: int, size: int, tensor: Tensor) -> Tensor:
    """Return `size` labels from `start` on, on the device of the labels of `tensor`."""
    return torch.arange(start, start + size, device="cpu" if tensor.is_meta else tensor.device)


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


def same_units(labels: Tensor, others: Tensor) -> bool:
    """Return whether labels differ by a constant, as those of two layers or branches with the same units do."""
    a, b = core(labels), core(others)
    return a.shape == b.shape and bool((a - a.min() == b - b.min()).all())


def through_view(operation: Operation, labels: Tensor | None, parts: list[Tensor]) -> list[Tensor | None]:
    """Return the labels of the results of a view."""
    if labels is None:
        return [None] * len(parts)
    if operation.name in RESHAPES:
        return [compact(labels.reshape(parts[0].shape))]
    return [compact(each) for each in operation.again(lambda leaf: labels)]


def through_any(
    operation: Operation, outputs: list[Tensor], labels_of: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    """Return the labels of the results: run the operation on numbers r and s of the labels, and look up the ratio r/s.

    r rises and s falls with a random number u of each label, so the ratio is that of one label where an entry is a
    sum, mean or maximum of entries of one unit, and of no label, but for a chance of 1e-10 for each, elsewhere.

    labels_of: function from an input of the operation to its labels.
    """
    inputs = [core(labels_of(leaf)).flatten() for leaf in operation.inputs]
    others = [inputs[0].new_full((1,), value) for value in (MIXED, OUTSIDE)]
    labels = torch.cat([*inputs, *others]).unique()
    draw = torch.Generator().manual_seed(0)
    u = torch.rand(len(labels), generator=draw, dtype=torch.float64).to(labels.device)
    values, order = u.sort()

    def numbers(slope: float, start: float) -> list[Tensor]:
        def of(leaf: Tensor) -> Tensor:
            number = u[torch.searchsorted(labels, core(labels_of(leaf)).contiguous())]
            return (start + slope * number).expand(leaf.shape) if leaf.is_floating_point() else leaf

        return operation.again(of)

    def label(rising: Tensor, falling: Tensor) -> Tensor:
        ratio = rising / falling
        found = ((2 * ratio - 1) / (1 + ratio)).contiguous()  # (1 + u) / (2 - u) = ratio
        above = torch.searchsorted(values, found).clamp_max(len(u) - 1)
        near = torch.where((values[above] - found).abs() < 1e-10, above, (above - 1).clamp_min(0))
        known = labels[order[near]].where((values[near] - found).abs() < 1e-10, MIXED)
        return compact(known.where((rising != 0) | (falling != 0), OUTSIDE))  # padding

    try:
        pairs = zip(numbers(1.0, 1.0), numbers(-1.0, 2.0), strict=True)
        return [label(r, s) if r.is_floating_point() else None for r, s in pairs]
    except (RuntimeError, TypeError, ValueError):
        return [None] * len(outputs)
