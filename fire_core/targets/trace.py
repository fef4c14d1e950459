"""What one run of a model on an example shows: how the rows of each weight are used, and which layers are its heads.

Every row of every weight has a number. While the model runs, the numbers follow the values through operations that move
or change them one by one, up to the products. Rows of one weight that reach different factors (of the scores of attention,
of the mean of values, of a gate) are different matrices; a rotation, which adds rows, makes them one. Only places are
followed, not values, so the example may be small, and even on the meta device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from fire_core.errors import UserError, first_line
from fire_core.passes import call, undisturbed

Rows = slice | tuple[int, ...]
Parts = tuple[tuple[str, Rows], ...]

MOVE_NAMES = (
    "view _unsafe_view _reshape_alias permute transpose t select slice split split_with_sizes unbind expand clone cat stack "
    "squeeze unsqueeze index_select gather roll constant_pad_nd flip repeat alias detach index unfold _to_copy diagonal "
    "lift_fresh"
)
MOVES = frozenset(MOVE_NAMES.split())
"""Operations that give each entry a place; they are repeated on the numbers of the rows."""
SAME_PLACES = {"clone", "_to_copy", "lift_fresh", "detach", "alias"}
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0, "addmv": 1, "dot": 0, "convolution": 0}
"""Operations that multiply matrices, and the argument that is the first factor; the second factor follows it."""
EACH_ENTRY_NAMES = (
    "native_layer_norm native_batch_norm _native_batch_norm_legit_no_training native_group_norm _fused_rms_norm _softmax "
    "_log_softmax _safe_softmax native_dropout hardswish prelu _prelu_kernel log_sigmoid_forward rrelu_with_noise tril triu "
    "masked_fill cumsum"
)
EACH_ENTRY = frozenset(EACH_ENTRY_NAMES.split())
"""Operations with one result for each entry that PyTorch does not count as pointwise, norms included."""
MEANS = {"mean", "sum", "amax", "amin"}
"""Operations along some dimensions: results are followed where these have the same row throughout."""
DECISION_NAMES = (
    "max min var std var_mean norm linalg_vector_norm logsumexp argmax argmin any all prod topk sort equal nonzero "
    "_local_scalar_dense is_nonzero bincount histc one_hot _unique2 embedding"
)
DECISIONS = frozenset(DECISION_NAMES.split())
"""Operations whose results are statistics or choices; they are not followed."""


class Flow(NamedTuple):
    """Where the entries of a tensor come from.

    rows: the number of a row for each entry, -1 for none; None if not followed. layers: the weights whose outputs they
    are. weight: whether they depend on weights alone. product: the last product that they are the result of, if any.
    """

    rows: Tensor | None = None
    layers: frozenset[int] = frozenset()
    weight: bool = False
    product: int | None = None


@dataclass(frozen=True)
class Traced:
    """Result of `trace`, by `id` of the parameter.

    parts: rows of the weights whose rows are used in more than one way. whole: weights that are one matrix. unclear: why
    the use of others is not known. heads: weights whose outputs reach the model's output, and no other weight.
    """

    parts: dict[int, Parts] = field(default_factory=dict)
    whole: frozenset[int] = frozenset()
    unclear: dict[int, str] = field(default_factory=dict)
    heads: frozenset[int] = frozenset()


def trace(model: nn.Module, example: Any) -> Traced:
    """Run `model` once on `example`, in evaluation mode, and return what it shows of its weights.

    Args:
        example: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
    Raises: UserError if the model cannot be run on it.
    """
    weights: dict[int, Tensor] = {
        id(p): p for p in model.parameters() if p.dim() >= 2 and p.layout is torch.strided
    }
    with torch.no_grad(), undisturbed(model, training=False), _Follow(weights) as follow:
        try:
            output = call(model, example)
        except Exception as error:
            raise UserError(
                f"example: {type(model).__name__} cannot be run on it ({type(error).__name__}: {first_line(error)}): give "
                "a batch, a tuple of arguments, or a dict of keyword arguments"
            ) from error
    return follow.result(output)


@cache
def _is_pointwise(packet: Any) -> bool:
    """Return whether an operation, or the one that it does in place, has one result for each entry."""
    name = packet.__name__
    plain = getattr(torch.ops.aten, name.rstrip("_"), packet) if not name.startswith("_") else packet
    return name.rstrip("_") in EACH_ENTRY or any(
        torch.Tag.pointwise in getattr(p, overload).tags
        for p in (packet, plain)
        for overload in p.overloads()
    )


class _Follow(TorchDispatchMode):
    """Context in which the rows of `weights` are followed."""

    def __init__(self, weights: dict[int, Tensor]) -> None:
        super().__init__()
        self.flows: Any = WeakTensorKeyDictionary()
        self.keys, self.starts = list(weights), [0]  # weights, and the number of the first row of each
        self.uses: dict[int, set[tuple[str, int, int]]] = defaultdict(set)  # row -> (kind, operation, factor)
        self.same: dict[int, int] = {}  # row -> a row that it is added to
        self.unclear: dict[int, str] = {}
        self.read: set[int] = set()  # weights whose outputs another weight reads
        self.softened: set[int] = set()  # products that a softmax follows
        self.operations = 0
        for key, weight in weights.items():
            rows = torch.arange(self.starts[-1], self.starts[-1] + len(weight), dtype=torch.int32)
            rows = rows.view(-1, *[1] * (weight.dim() - 1)).expand(weight.shape)
            self.flows[weight] = Flow(rows, frozenset({key}), weight=True)
            self.starts.append(self.starts[-1] + len(weight))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and follow the entries of its results."""
        result = function(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [flow for tensor in read if (flow := self.flows.get(tensor)) is not None]
        if not known:
            return result
        self.operations += 1
        name = function.overloadpacket.__name__
        name = name if name.startswith("__") else name.rstrip("_")
        flow = Flow(
            None,
            frozenset().union(*(f.layers for f in known)),
            len(known) == len(read) and all(f.weight for f in known),
            next((f.product for f in known if f.product is not None), None),
        )
        rows: list[Any] = []
        if name in PRODUCTS:
            first = PRODUCTS[name]
            flow = self._product(name, args[first], args[first + 1], result)
            rows = [flow.rows]
        elif name.startswith("_scaled_dot_product"):
            for factor, tensor in enumerate(args[:3]):
                self._note("attention", factor, self.flows.get(tensor, flow).rows)
        elif name == "glu" and known[0].rows is not None:
            for factor, half in enumerate(known[0].rows.chunk(2, args[1] if len(args) > 1 else -1)):
                self._note("gate", factor, half)
        elif name in MOVES:
            rows = self._moved(function, name, args, kwargs or {}, result)
        elif name == "copy":
            rows = [self._written(args[0], args[1])]
        elif _is_pointwise(function.overloadpacket):
            if "softmax" in name and flow.product is not None:
                self.softened.add(flow.product)
            rows = [self._pointwise(name, read, flow.weight, tree_leaves(result)[0].shape)]
        elif name in MEANS or "pool" in name or "upsample" in name:
            rows = [self._averaged(name, args, kwargs or {}, tree_leaves(result)[0])]
        elif name not in DECISIONS:
            self._lose(name, [f.rows for f in known if not f.weight])
        for leaf, own in zip(tree_leaves(result), [*rows, *[None] * len(tree_leaves(result))]):
            if isinstance(leaf, Tensor):
                fits = isinstance(own, Tensor) and own.dtype == torch.int32 and own.shape == leaf.shape
                self.flows[leaf] = flow._replace(rows=own if fits else None)
        return result

    def _moved(self, function: Any, name: str, args: Any, kwargs: Any, result: Any) -> list[Any]:
        """Repeat an operation that moves entries on the numbers of the rows."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        followed = [flow.rows for t in tensors if (flow := self.flows.get(t)) is not None]
        if all(rows is None for rows in followed):
            return []
        if name in SAME_PLACES:
            return followed[:1]
        if name in ("view", "_unsafe_view", "_reshape_alias"):
            return [followed[0].reshape(result.shape)]  # type: ignore[union-attr]

        def numbers(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            rows = self.flows.get(leaf, Flow()).rows
            return torch.full(leaf.shape, -1, dtype=torch.int32) if rows is None else rows

        if any(t.is_meta and not t.is_floating_point() for t in tensors):
            self._lose(name, followed)  # places without values
            return []
        if name == "constant_pad_nd":
            return [torch.nn.functional.pad(numbers(args[0]), args[1], value=-1)]
        try:
            return tree_leaves(function(*tree_map(numbers, args), **tree_map(numbers, kwargs)))
        except (RuntimeError, NotImplementedError):
            self._lose(name, followed)
            return []

    def _averaged(self, name: str, args: Any, kwargs: Any, result: Tensor) -> Tensor | None:
        """Return the rows of a mean along some dimensions, or of a pool over the places of an image."""
        rows = self.flows.get(args[0], Flow()).rows
        if rows is None or (name in MEANS and len(args) < 2):
            return None
        dims, keep = (args[1], kwargs.get("keepdim", args[2] if len(args) > 2 else False)) if name in MEANS else (
            tuple(range(2, rows.dim())), True)  # fmt: skip
        low, high = rows.amin(dims, keepdim=keep), rows.amax(dims, keepdim=keep)
        if torch.equal(low, high):
            return low.expand(result.shape) if _expands(low.shape, result.shape) else None
        if name not in MEANS:
            self._lose(name, [rows])
        return None

    def _written(self, place: Tensor, values: Tensor) -> Tensor | None:
        """Return the rows of `place.copy_(values)`; what is written into a part of another tensor is not followed."""
        old, new = (self.flows.get(tensor, Flow()).rows for tensor in (place, values))
        if place._is_view():
            self._lose("a copy into a part of a tensor", [old, new])
            return None
        return None if new is None else new.expand(place.shape)

    def _product(self, name: str, left: Tensor, right: Tensor, result: Tensor) -> Flow:
        """Follow a matrix product or a convolution: it is a layer if one of its factors depends on weights alone."""
        a, b = self.flows.get(left, Flow()), self.flows.get(right, Flow())
        if a.weight and b.weight:
            return Flow(None, a.layers | b.layers, weight=True)
        if not (a.weight or b.weight):
            for factor, flow in enumerate((a, b)):
                self._note("product", factor, flow.rows)
            return Flow(None, a.layers | b.layers, product=self.operations)
        weight, inputs = (a, b) if a.weight else (b, a)
        self.read |= inputs.layers
        if weight.rows is None:
            return Flow(None, weight.layers)
        if name != "convolution":
            line = (
                weight.rows.select(-2, 0).unsqueeze(-2)
                if b.weight
                else weight.rows.select(-1, 0).unsqueeze(-1)
            )
            stored = bool((weight.rows == line).all()) and line.dim() == result.dim()
            return Flow(line.expand(result.shape) if stored else None, weight.layers)
        channels = weight.rows.flatten(1)[:, 0]
        if right.shape[1] == 1 and len(right) == left.shape[1]:  # depthwise: channels of the input stay apart
            if inputs.rows is not None:
                entries = inputs.rows.movedim(1, -1).flatten(0, -2)
                if (entries != entries[0]).any():
                    self._lose("a depthwise convolution", [inputs.rows])
                channels = entries[0]
            weight = Flow(None, inputs.layers | weight.layers)
        shaped = channels.view(1, -1, *[1] * (result.dim() - 2))
        return Flow(
            shaped.expand(result.shape) if shaped.shape[1] == result.shape[1] else None, weight.layers
        )

    def _pointwise(self, name: str, read: list[Tensor], weight: bool, shape: torch.Size) -> Tensor | None:
        """Return the rows of results for each entry; factors are noted, terms of a sum are joined."""
        flows = [flow for tensor in read if (flow := self.flows.get(tensor)) is not None]
        found = [f.rows for f in flows if f.rows is not None and f.weight == weight]
        found = [rows.expand(shape) for rows in found if _expands(rows.shape, shape)]
        if not found:
            return None
        rows = found[0]
        for other in found[1:]:
            a, b = _without_copies(rows, other)
            differ = (a != b) & (a >= 0) & (b >= 0)
            if differ.any() and name in ("mul", "div", "addcmul", "addcdiv"):
                self._note("gate", 0, a[differ])
                self._note("gate", 1, b[differ])
                return None
            for pair in (a[differ].long() * 2**31 + b[differ]).unique().tolist():
                first, second = sorted((self._root(pair // 2**31), self._root(pair % 2**31)))
                self.same[second] = first
            rows = torch.where(a < 0, b, a).expand(shape)
        return rows

    def _note(self, kind: str, factor: int, rows: Tensor | None) -> None:
        """Note that rows reach one factor of the present operation."""
        for row in _numbers(rows):
            self.uses[row].add((kind, self.operations, factor))

    def _lose(self, name: str, followed: Iterable[Tensor | None]) -> None:
        """Note that the rows cannot be followed through an operation."""
        for rows in followed:
            for row in _numbers(rows):
                self.unclear[self.keys[bisect_right(self.starts, row) - 1]] = (
                    f"its rows cannot be followed through {name}"
                )

    def _root(self, row: int) -> int:
        """Return the first of the rows that are added to each other."""
        while (above := self.same.get(row, row)) != row:
            row = above
        return row

    def result(self, output: Any) -> Traced:
        """Return what was seen, given the output of the model."""
        uses: dict[int, set[tuple[str, int, int]]] = defaultdict(set)
        for row, seen in self.uses.items():
            uses[self._root(row)] |= seen
        parts: dict[int, Parts] = {}
        for key, start, end in zip(self.keys, self.starts, self.starts[1:]):
            groups: dict[frozenset, list[int]] = defaultdict(list)
            for row in range(start, end):
                groups[frozenset(uses.get(self._root(row), ()))].append(row - start)
            if len(groups) > 1:
                parts[key] = tuple(zip(self._names(groups), map(_as_slice, groups.values())))
        heads: set[int] = set()
        for leaf in tree_leaves(output):
            layers = self.flows.get(leaf, Flow()).layers if isinstance(leaf, Tensor) else frozenset()
            heads |= layers if not layers & self.read else frozenset()
        clear = {key: cut for key, cut in parts.items() if key not in self.unclear}
        whole = frozenset(self.keys) - self.unclear.keys() - parts.keys()
        return Traced(clear, whole, self.unclear, frozenset(heads))

    def _names(self, groups: Iterable[frozenset]) -> list[str]:
        """Return the names of parts: q, k and v of attention, else numbers."""
        names = []
        for uses in groups:
            inside = {(number, factor) for kind, number, factor in uses if kind == "product"}
            roles = {"qkv"[factor] for kind, _, factor in uses if kind == "attention"}
            roles = roles or {"qk"[factor] for number, factor in inside if number in self.softened}
            roles = roles or ({"v"} if inside else set())
            names.append(roles.pop() if len(roles) == 1 else "")
        clear = all(names) and len(set(names)) == len(names)
        return names if clear else [f"part {i}" for i in range(len(names))]


def _numbers(rows: Tensor | None) -> list[int]:
    """Return the numbers of rows in a tensor, once each."""
    return [] if rows is None else [row for row in _without_copies(rows)[0].unique().tolist() if row >= 0]


def _without_copies(*tensors: Tensor) -> list[Tensor]:
    """Return tensors of one shape with a single entry along each dimension in which all of them are expanded."""
    dims = range(tensors[0].dim())
    index = tuple(slice(0, 1) if all(t.stride(d) == 0 for t in tensors) else slice(None) for d in dims)
    return [t[index] for t in tensors]


def _expands(small: torch.Size, large: torch.Size) -> bool:
    return len(small) <= len(large) and all(s in (1, n) for s, n in zip(reversed(small), reversed(large)))


def _as_slice(rows: list[int]) -> Rows:
    """Return ascending row numbers as a slice where they are consecutive."""
    return slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else tuple(rows)
