"""Calls of PyTorch's functions: what kinds there are, and which elementwise ones are affine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

RESHAPES = {"view", "_unsafe_view", "_reshape_alias"}
COPIES = {"_to_copy", "clone", "copy"}
# elementwise operations that PyTorch does not mark as such
UNMARKED = {"hardswish", "_prelu_kernel", "log_sigmoid_forward", "rrelu_with_noise", *COPIES}


class Operation(NamedTuple):
    """One call of a function of PyTorch."""

    function: Any
    name: str
    args: Any
    kwargs: Any

    def again(self, of: Callable[[Tensor], Tensor]) -> list[Any]:
        """Return the results for other tensors."""
        args, kwargs = (tree_map_only(Tensor, of, each) for each in (self.args, self.kwargs))
        return tree_leaves(self.function(*args, **kwargs))

    @property
    def inputs(self) -> list[Tensor]:
        return tensors_in((self.args, self.kwargs))

    @property
    def is_view(self) -> bool:
        return self.function.is_view or self.name in ("_unsafe_view", "unsafe_split", "unsafe_chunk")

    @property
    def is_elementwise(self) -> bool:
        return torch.Tag.pointwise in self.function.tags or self.name in UNMARKED


def is_affine(operation: Operation, varies: Callable[[Tensor], bool]) -> bool:
    """Return whether an elementwise function is affine in the tensors that vary, jointly, at 64 random points."""
    return operation.name in COPIES or all(_affine_at(operation, varies, scale) for scale in (3.0, 30.0))


def _affine_at(operation: Operation, varies: Callable[[Tensor], bool], scale: float) -> bool:
    draw = torch.Generator().manual_seed(0)
    ends = {
        id(leaf): scale * (2 * torch.rand(2, 64, generator=draw, dtype=torch.float64) - 1)
        for leaf in operation.inputs
        if varies(leaf)
    }

    def at(share: float) -> Tensor:
        def of(leaf: Tensor) -> Tensor:
            if id(leaf) in ends:
                start, end = ends[id(leaf)]
                x = torch.lerp(start, end, share).to(leaf.device)
                return x > 0 if leaf.dtype == torch.bool else x
            leaf = leaf.double() if leaf.is_floating_point() else leaf
            return leaf.flatten()[:1].expand(64).clone() if leaf.numel() else leaf

        with torch.random.fork_rng(devices=[]):
            return operation.again(of)[0].double()

    try:
        middle, mean = at(0.5), (at(0.0) + at(1.0)) / 2
        largest = mean.nan_to_num(0.0, 0.0, 0.0).abs().max()
        return torch.allclose(middle, mean, rtol=0.0, atol=5e-3 * float(largest), equal_nan=True)
    except (RuntimeError, TypeError, ValueError):  # it takes no such numbers
        return False


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
