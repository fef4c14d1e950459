"""Tensors that share memory: two Parameters over one storage, or a transpose or slice of another tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def sharing(tensors: Mapping[str, Tensor]) -> dict[str, set[str]]:
    """Return, for each tensor that shares entries with others, the names of these others.

    Meta, sparse and empty tensors and subclasses such as DTensor are ignored.
    """
    spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if _in_memory(tensor))
    found: dict[str, set[str]] = {}
    reaching: list[tuple[int, str]] = []  # earlier tensors that may reach into the next one
    for start, end, name in spans:
        reaching = [(other_end, other) for other_end, other in reaching if other_end > start]
        for _, other in reaching:
            if tensors[name].device == tensors[other].device and _overlap(tensors[name], tensors[other]):
                found.setdefault(name, set()).add(other)
                found.setdefault(other, set()).add(name)
        reaching.append((end, name))
    return found


def _in_memory(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors whose spans overlap share an entry; two columns of one buffer do not."""
    if first.is_contiguous() and second.is_contiguous():
        return True
    (start, _), (_, end) = (
        min(_span(first), _span(second)),
        max(_span(first), _span(second), key=lambda s: s[1]),
    )
    size = first.element_size()
    marks = torch.zeros((end - start) // size + 1, dtype=torch.bool)
    views = [
        marks.as_strided(tensor.shape, tensor.stride(), (tensor.data_ptr() - start) // size)
        for tensor in (first, second)
    ]
    views[0].fill_(True)
    return bool(views[1].any())
