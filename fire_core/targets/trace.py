"""What one run of a model on an example shows: how the rows of each weight are used, and which layers are its heads.

Every row of every weight gets a number. While the model runs, the numbers follow the values through operations that move,
copy or change values one by one, up to the products. Rows of one weight that reach different factors of a product (the
scores of attention, the mean of values, a gate) are different matrices; a rotation that adds rows makes them one. The
model's arithmetic is not read, so the example may be small, or on the meta device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from fire_core.errors import UserError, first_line
from fire_core.measure.inputs import call
from fire_core.measure.modes import undisturbed

Rows = slice | tuple[int, ...]
Parts = tuple[tuple[str, Rows], ...]

MOVES = set(
    "view _unsafe_view reshape _reshape_alias permute transpose t select slice split split_with_sizes chunk unbind expand "
    "clone contiguous cat stack squeeze unsqueeze index_select gather roll narrow constant_pad_nd pad flip repeat alias "
    "detach index unfold _to_copy to lift_fresh diagonal reflection_pad2d im2col max_pool2d_with_indices view_as_real "
    "_pack_padded_sequence movedim unsafe_split unsafe_chunk".split()
)
"""Operations that give each entry a place, and are repeated on the numbers of the rows."""
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "mv": (0, 1), "addmv": (1, 2), "dot": (0, 1)}
KEEP = set(
    "native_layer_norm native_batch_norm _native_batch_norm_legit_no_training native_group_norm _softmax _log_softmax "
    "native_dropout cudnn_batch_norm _fused_rms_norm mkldnn_max_pool2d masked_fill bernoulli tril triu cumsum".split()
)
"""Operations with a result for each entry that are no pointwise functions; what they mix stays within one factor."""
REDUCE = set(
    "mean sum amax amin max min var std var_mean norm linalg_vector_norm logsumexp argmax argmin any all prod topk sort "
    "_adaptive_avg_pool2d _adaptive_avg_pool1d adaptive_max_pool2d adaptive_max_pool1d avg_pool2d avg_pool1d index_add scatter_add scatter index_put nonzero equal "
    "_local_scalar_dense item adaptive_avg_pool1d upsample_bilinear2d upsample_bicubic2d upsample_nearest2d embedding "
    "native_layer_norm_backward _cdist_forward one_hot histc unique2 _unique2 is_nonzero bincount".split()
)
"""Operations that mix entries. Their results are not followed; nor do they tell the rows of a weight apart."""


class Flow(NamedTuple):
    """Where the entries of a tensor come from.

    rows: the number of a row for each entry, -1 for none; None if not followed. layers: the weights whose outputs they
    are. weight: whether they depend on weights alone. product: the product that they are the result of, if any.
    """

    rows: Tensor | None
    layers: frozenset[int] = frozenset()
    weight: bool = False
    product: int | None = None


@dataclass(frozen=True)
class Traced:
    """Result of `trace`, by `id` of the parameter.

    parts: rows of the weights whose rows are used in more than one way. whole: weights that are one matrix. unclear: why
    the use of the others is not known. heads: weights whose outputs reach the model's output, and no other weight.
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
    weights = {id(p): p for p in model.parameters() if p.dim() >= 2 and p.layout is torch.strided}
    with torch.no_grad(), undisturbed(model, training=False), _Follow(weights) as follow:
        try:
            output = call(model, example)
        except Exception as error:
            raise UserError(
                f"example: {type(model).__name__} cannot be run on it ({type(error).__name__}: {first_line(error)}): give "
                "a batch, a tuple of arguments, or a dict of keyword arguments"
            ) from error
    return follow.result(output)


class _Follow(TorchDispatchMode):
    """Context in which the rows of `weights` are followed."""

    def __init__(self, weights: dict[int, Tensor]) -> None:
        super().__init__()
        self.flows: Any = WeakTensorKeyDictionary()
        self.first: dict[int, int] = {}  # weight -> number of its first row
        self.sizes: dict[int, int] = {}
        self.uses: dict[int, set[tuple[str, int, int]]] = defaultdict(set)  # row -> (kind, operation, operand)
        self.lost: dict[int, str] = {}  # weight -> operation that it could not be followed through
        self.read: set[int] = set()  # weights whose outputs another weight reads
        self.same: dict[int, int] = {}  # row -> row that it was added to
        self.softened: set[int] = set()  # products that a softmax follows
        self.operations = 0
        number = 0
        for key, weight in weights.items():
            self.first[key], self.sizes[key] = number, len(weight)
            # of an expert stack or a Conv1D, too, the first dimension is counted; `result` leaves these out
            rows = torch.arange(number, number + len(weight), dtype=torch.int32)
            rows = rows.view(-1, *[1] * (weight.dim() - 1)).expand(weight.shape)
            self.flows[weight] = Flow(rows, frozenset({key}), weight=True)
            number += len(weight)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and follow it."""
        result = function(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        flows = [self.flows.get(tensor) for tensor in read]
        if not any(flows):
            return result
        name = function.overloadpacket.__name__
        inplace = name.endswith("_") and not name.startswith("_")
        name = name.rstrip("_") if inplace else name
        self.operations += 1
        known = [flow for flow in flows if flow is not None]
        layers = frozenset().union(*(flow.layers for flow in known))
        whole = Flow(None, layers, all(flow.weight for flow in known) and len(known) == len(read),
                     next((f.product for f in known if f.product is not None), None))  # fmt: skip
        if name in PRODUCTS or name in ("convolution", "_convolution"):
            a, b = (args[i] for i in PRODUCTS.get(name, (0, 1)))
            out = self.product(name, a, b, result)
        elif name.startswith("_scaled_dot_product") or name.startswith("_flash") or name.startswith("_efficient"):
            for operand, tensor in enumerate(args[:3]):
                self.note("sdpa", operand, self.flows.get(tensor))
            out = whole._replace(weight=False)
        elif name == "glu":
            if (flow := known[0]).rows is not None:
                for operand, half in enumerate(flow.rows.chunk(2, args[1] if len(args) > 1 else -1)):
                    self.note("gate", operand, Flow(half))
            out = whole
        elif name in MOVES:
            return self.moved(function, name, args, kwargs or {}, result, whole, inplace)
        elif torch.Tag.pointwise in function.tags or name in KEEP or inplace and name in ("copy", "fill"):
            if name == "_softmax" and whole.product is not None:
                self.softened.add(whole.product)
            first = next((leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), None)
            out = whole if first is None else whole._replace(rows=self.pointwise(name, read, first.shape))
            if name == "copy":
                out = self.written(args[0], args[1], out)
        else:
            if name not in REDUCE:
                for flow in known:
                    if flow.rows is not None and not flow.weight:
                        self.lost.update({key: name for key in self.owners(flow.rows)})
            out = whole
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.flows[leaf] = out if out.rows is not None and out.rows.shape == leaf.shape else out._replace(rows=None)
        return result

    def written(self, place: Tensor, values: Tensor, out: Flow) -> Flow:
        """Follow `place.copy_(values)`: what is written into a part of another tensor is lost."""
        flow = self.flows.get(values)
        rows = None if flow is None else flow.rows
        if place._is_view():
            for lost in (rows, self.flows.get(place, Flow(None)).rows):
                if lost is not None:
                    self.lost.update({key: "copy_ into a part of a tensor" for key in self.owners(lost)})
            return out._replace(rows=None)
        return out._replace(rows=None if rows is None else rows.expand(place.shape))

    def moved(self, function, name, args, kwargs, result, whole, inplace):  # type: ignore[no-untyped-def]
        """Repeat an operation that moves entries on the numbers of the rows."""

        def numbers(leaf: Any) -> Any:
            flow = self.flows.get(leaf) if isinstance(leaf, Tensor) else None
            if flow is not None and flow.rows is not None:
                return flow.rows
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                return torch.full(leaf.shape, -1, dtype=torch.int32)
            return leaf

        if all(self.flows.get(t) is None or self.flows.get(t).rows is None for t in tree_leaves(args) if isinstance(t, Tensor)):
            rows = None
        elif name in ("view", "_unsafe_view", "_reshape_alias"):
            rows = numbers(args[0]).reshape(result.shape)
        elif any(t.is_meta and self.flows.get(t) is None and not t.is_floating_point() for t in tree_leaves(args) if isinstance(t, Tensor)):
            rows = None  # places that have no values
            for flow in map(self.flows.get, [t for t in tree_leaves(args) if isinstance(t, Tensor)]):
                if flow is not None and flow.rows is not None:
                    self.lost.update({key: name for key in self.owners(flow.rows)})
        elif name in ("_to_copy", "to", "clone", "contiguous", "lift_fresh"):
            rows = numbers(args[0])
        elif name == "constant_pad_nd":
            rows = torch.nn.functional.pad(numbers(args[0]), args[1], value=-1)
        else:
            try:
                rows = function(*tree_map(numbers, args), **tree_map(numbers, kwargs))
            except (RuntimeError, NotImplementedError):
                for flow in map(self.flows.get, [t for t in tree_leaves(args) if isinstance(t, Tensor)]):
                    if flow is not None and flow.rows is not None:
                        self.lost.update({key: name for key in self.owners(flow.rows)})
                rows = None
        parts = tree_leaves(rows)
        for i, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor):
                part = parts[i] if rows is not None and i < len(parts) else None
                same = isinstance(part, Tensor) and part.shape == leaf.shape and part.dtype == torch.int32
                self.flows[leaf] = whole._replace(rows=part if same else None)
        return result

    def product(self, name: str, a: Tensor, b: Tensor, result: Tensor) -> Flow:
        """Follow a matrix product or a convolution: a layer if one factor depends on weights alone."""
        left, right = self.flows.get(a), self.flows.get(b)
        weights = [flow for flow in (left, right) if flow is not None and flow.weight]
        if len(weights) == 2:
            return Flow(None, left.layers | right.layers, True)
        if not weights:
            for operand, flow in enumerate((left, right)):
                self.note("product", operand, flow)
            layers = frozenset().union(*(flow.layers for flow in (left, right) if flow is not None))
            return Flow(None, layers, product=self.operations)
        weight = weights[0]
        inside = right if weight is left else left
        if inside is not None:
            self.read |= inside.layers
        rows = weight.rows
        if rows is not None and "convolution" in name:
            depthwise = b.shape[1] == 1 and len(b) == a.shape[1]
            if depthwise:  # each channel of the input stays a channel of its own
                kept = None
                if inside is not None and inside.rows is not None:
                    channels = inside.rows.movedim(1, -1).flatten(0, -2)
                    kept = channels[0] if (channels == channels[0]).all() else None
                    if kept is None:
                        self.lost.update({key: "depthwise convolution" for key in self.owners(inside.rows)})
                if kept is not None:
                    shape = [1, -1, *[1] * (result.dim() - 2)]
                    return Flow(kept.view(shape).expand(result.shape), inside.layers | weight.layers)
                return Flow(None, (inside.layers if inside else frozenset()) | weight.layers)
            channels = rows.flatten(1)[:, 0]
            shape = [1, -1, *[1] * (result.dim() - 2)]
            fits = len(channels) == result.shape[1]
            rows = channels.view(shape).expand(result.shape) if fits else None
        elif rows is not None:
            line = rows.select(-2, 0).unsqueeze(-2) if weight is right and rows.dim() > 1 else rows.select(-1, 0).unsqueeze(-1)
            constant = rows.dim() > 1 and bool((rows == (line)).all())
            rows = line.expand(result.shape) if constant and result.dim() == rows.dim() else None
        return Flow(rows, weight.layers)

    def pointwise(self, name: str, read: list[Tensor], shape: torch.Size) -> Tensor | None:
        """Return the rows of a result computed entry by entry; factors of a product are noted, terms of a sum joined."""
        found: list[Tensor] = []
        for tensor in read:
            flow = self.flows.get(tensor)
            if flow is None or flow.rows is None or (flow.weight and not all(self._weight(t) for t in read)):
                continue
            try:
                found.append(flow.rows.expand(shape))
            except RuntimeError:
                continue
        if not found:
            return None
        rows = found[0]
        for other in found[1:]:
            a, b = _without_copies(rows, other)
            differ = (a != b) & (a >= 0) & (b >= 0)
            if differ.any():
                if name in ("mul", "div", "addcmul", "addcdiv"):
                    self.note("gate", 0, Flow(a[differ]))
                    self.note("gate", 1, Flow(b[differ]))
                    return None
                self.join(a[differ], b[differ])
            if (a < 0).any():
                rows = torch.where(a < 0, b, a).expand(shape)
        return rows

    def _weight(self, tensor: Tensor) -> bool:
        flow = self.flows.get(tensor)
        return flow is not None and flow.weight

    def note(self, kind: str, operand: int, flow: Flow | None) -> None:
        """Note that rows reach one operand of an operation."""
        if flow is not None and flow.rows is not None and not flow.weight:
            for row in _without_copies(flow.rows)[0].unique().tolist():
                self.uses[row].add((kind, self.operations, operand))

    def join(self, rows: Tensor, others: Tensor) -> None:
        """Note that rows are added to each other."""
        for pair in (rows.long() * 2**31 + others).unique().tolist():
            a, b = self.root(pair // 2**31), self.root(pair % 2**31)
            self.same[max(a, b)] = min(a, b)

    def root(self, row: int) -> int:
        """Return the first of the rows that are added to each other."""
        while (above := self.same.get(row, row)) != row:
            row = above
        return row

    def owners(self, rows: Tensor) -> set[int]:
        """Return the weights that have some of these rows."""
        present = _without_copies(rows)[0].unique().tolist()
        owners = sorted(self.first, key=self.first.__getitem__)
        starts = [self.first[key] for key in owners]
        return {owners[bisect_right(starts, row) - 1] for row in present if row >= 0}

    def result(self, output: Any) -> Traced:
        """Return what was seen."""
        joined: dict[int, set[tuple[str, int, int]]] = defaultdict(set)
        for row, uses in self.uses.items():
            joined[self.root(row)] |= uses
        parts: dict[int, Parts] = {}
        whole = set()
        for key, first in self.first.items():
            if key in self.lost:
                continue
            groups: dict[frozenset, list[int]] = defaultdict(list)
            for row in range(self.sizes[key]):
                groups[frozenset(joined.get(self.root(first + row), ()))].append(row)
            if len(groups) == 1:
                whole.add(key)
            else:
                names = self.names(list(groups))
                parts[key] = tuple((name, _as_slice(rows)) for name, rows in zip(names, groups.values(), strict=True))
        heads: set[int] = set()
        for leaf in tree_leaves(output):
            flow = self.flows.get(leaf) if isinstance(leaf, Tensor) else None
            if flow is not None and not flow.layers & self.read:
                heads |= flow.layers
        unclear = {key: f"its rows cannot be followed through {name}" for key, name in self.lost.items()}
        return Traced(parts, frozenset(whole), unclear, frozenset(heads))

    def names(self, groups: list[frozenset]) -> list[str]:
        """Return names of the parts: q, k and v of attention, else ordinals."""
        roles = {0: "q", 1: "k", 2: "v"}
        named = []
        for uses in groups:
            fused = {roles[operand] for kind, _, operand in uses if kind == "sdpa"}
            inside = {(number, operand) for kind, number, operand in uses if kind == "product"}
            scores = {roles[operand] for number, operand in inside if number in self.softened}
            values = {"v"} if inside and not scores else set()
            (role,) = candidates if len(candidates := fused or scores or values) == 1 else [""]
            named.append(role)
        if "" in named or len(set(named)) < len(named):
            return [f"part {i}" for i in range(len(groups))]
        return named


def _without_copies(*rows: Tensor) -> list[Tensor]:
    """Return tensors of one shape with a single entry along each dimension in which all of them are expanded."""
    index = tuple(
        slice(0, 1) if all(r.stride(d) == 0 for r in rows) else slice(None) for d in range(rows[0].dim())
    )
    return [r[index] for r in rows]


def _as_slice(rows: list[int]) -> Rows:
    """Return ascending row numbers as a slice where they are consecutive."""
    consecutive = rows[-1] - rows[0] + 1 == len(rows)
    return slice(rows[0], rows[-1] + 1) if consecutive else tuple(rows)
