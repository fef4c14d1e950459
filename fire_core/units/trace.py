"""Which unit each entry of each tensor of a forward pass comes from, found while the pass runs.

Every output of a product with weights is a unit. Its label follows it through whatever moves entries (reshapes,
permutes, concatenations, pools) and through elementwise functions. PyTorch tells which operations are elementwise; what
an operation that is neither elementwise nor a view does with the units is found by running it once more on numbers that
stand for labels. An elementwise function that is not affine makes the units that it reads *active*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from fire_core.passes import call
from fire_core.targets.walk import NORMS

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MATRIX_PRODUCTS = {"mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv"}
LOOK_UPS = {"embedding", "_embedding_bag"}
RECURRENT = ("lstm", "gru", "rnn", "mkldnn_rnn", "_thnn")
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
# elementwise operations that PyTorch does not mark as such
UNMARKED = {"_to_copy", "hardswish", "_prelu_kernel", "log_sigmoid_forward", "rrelu_with_noise", "copy"}
COPIES = {"_to_copy", "clone", "copy"}
OUTSIDE, MIXED = -1, -2  # labels of entries that come from no layer, and of those that mix units


class Group(NamedTuple):
    """Units of one product in one form: as computed, or active after one of the functions that read them.

    place: number of the product in order of execution. first: label of its first unit.
    """

    place: int
    first: int
    active: bool


@dataclass(frozen=True)
class Product:
    """A product with weights. module: name of its Linear, convolution or stack, if it is in one."""

    module: str | None
    units: int
    counted: bool


@dataclass(frozen=True)
class Source:
    """Where the entries of a tensor come from.

    labels: label of each entry, None if no entry has a unit. groups: numbers of the groups among the labels. lost: groups
    that are mixed in entries without a label -> the operation that mixed them. gates: places of products that were
    multiplied with the labelled ones. norms: names of norms on the way. discrete: whether only integers of the input, as
    masks are, reach the tensor.
    """

    labels: Any = None
    groups: frozenset[int] = frozenset()
    lost: Mapping[int, str] = field(default_factory=dict)
    gates: frozenset[int] = frozenset()
    norms: frozenset[str] = frozenset()
    discrete: bool = False


class Read(NamedTuple):
    """One product's input. columns: label of each input of the layer; None if they differ between samples."""

    module: str | None
    operation: str
    source: Source
    columns: Tensor | None


class Trace(TorchDispatchMode):
    """Context that follows the units of every tensor that depends on `inputs`, without gradients.

    Args:
        on_read: called with each tensor that a product reads, and its source.
        counted: function of the module that runs; if it returns False, its units are marked as not counted.
    Attributes:
        groups, products, reads: in order of execution. troubles: place -> why its units have no owner. calls: module ->
        number of its runs. channels: norm -> label of each of its channels.
    """

    def __init__(
        self,
        on_read: Callable[[Tensor, Source], None] = lambda tensor, source: None,
        counted: Callable[[nn.Module | None], bool] = lambda module: True,
    ) -> None:
        super().__init__()
        self.on_read, self.counted = on_read, counted
        self.groups: list[Group] = []
        self.products: list[Product] = []
        self.reads: list[Read] = []
        self.troubles: dict[int, str] = {}
        self.calls: Counter[str] = Counter()
        self.channels: dict[str, Tensor] = {}
        self.size = 0  # number of labels
        self._sources: Any = WeakTensorKeyDictionary()
        self._running: list[str] = []
        self._latest: nn.Module | None = None
        self._affine: dict[Any, bool] = {}

    def run(self, net: nn.Module, inputs: Any) -> Any:
        """Run `inputs` through `net` in its present mode and return the output."""
        inputs = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, inputs)
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Tensor):
                self._sources[leaf] = Source(discrete=not leaf.is_floating_point())
        with ExitStack() as hooks:
            for name, module in net.named_modules():
                for handle in self._watch(name, module):
                    hooks.callback(handle.remove)
            with torch.no_grad(), self:
                return call(net, inputs)

    def source(self, tensor: Tensor) -> Source | None:
        """Return where the entries of a tensor come from; None if it does not depend on the inputs."""
        return self._sources.get(tensor)

    def places(self, source: Source) -> set[int]:
        """Return the places of the products whose units have labels in `source`."""
        return {self.groups[number].place for number in source.groups}

    def present(self, source: Source) -> set[int]:
        """Return those places that occur among the labels: after a slice, there may be fewer."""
        if source.labels is None:
            return set()
        found = core(source.labels).unique()
        groups = [self.groups[number] for number in source.groups]
        ends = [(g, g.first + self.products[g.place].units) for g in groups]
        return {g.place for g, end in ends if ((found >= g.first) & (found < end)).any()}

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        def before(module: nn.Module, arguments: Any) -> None:
            self._latest = module

        def enter(module: nn.Module, arguments: Any) -> None:
            self.calls[name] += 1
            self._running.append(name)

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            self._running.pop()

        def after_norm(module: nn.Module, arguments: Any, output: Any) -> None:
            source = self._sources.get(output) if isinstance(output, Tensor) else None
            if source is not None and source.labels is not None:
                channels = constant(source.labels, _channel_dims(module, output))
                if channels is not None:
                    self.channels[name] = channels.flatten()
                    self._sources[output] = replace(source, norms=source.norms | {name})

        weights = [getattr(module, "weight", None), *module._parameters.values()]
        if any(isinstance(weight, Tensor) and weight.ndim > 1 for weight in weights):
            yield module.register_forward_pre_hook(before)
        if is_layer(module):
            yield module.register_forward_pre_hook(enter)
            yield module.register_forward_hook(leave)
        elif isinstance(module, NORMS) or getattr(module, "is_norm", False):
            yield module.register_forward_hook(after_norm)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and note where the entries of its results come from."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__.rstrip("_")
        if name == "copy":
            args = args[1:]  # what was there before is gone
            whole = result._base if result._is_view() else None
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sources = [source for tensor in read if (source := self._sources.get(tensor)) is not None]
        if name in MATRIX_PRODUCTS or name == "convolution" or name in LOOK_UPS:
            self._product(name, args, result)
        elif not sources:
            pass
        elif name.startswith((*ATTENTION, *RECURRENT)):
            self._mix(name, read, result)
        elif all(source.labels is None for source in sources):
            lost = {key: value for source in sources for key, value in source.lost.items()}
            self._set(result, Source(lost=lost, discrete=all(source.discrete for source in sources)))
        elif function.is_view or name in ("_unsafe_view", "unsafe_split", "unsafe_chunk"):
            self._view(function, name, args, kwargs, result)
        elif torch.Tag.pointwise in function.tags or name in UNMARKED:
            self._elementwise(function, name, args, kwargs, read, result)
        else:
            self._other(function, name, args, kwargs, read, result)
        if name == "copy" and sources and whole is not None:
            self._write_part(whole, result)
        return result

    def _write_part(self, whole: Tensor, part: Tensor) -> None:
        """Give the entries of `whole` that `part` is a view of the source of `part`."""
        old, new = self._sources.get(whole) or Source(), self._sources[part]
        labels = torch.full(whole.shape, OUTSIDE, device=whole.device) if old.labels is None else old.labels
        kept = torch.empty_strided(
            whole.shape, whole.stride(), dtype=labels.dtype, device=whole.device
        ).copy_(labels)
        place = kept.as_strided(part.shape, part.stride(), part.storage_offset() - whole.storage_offset())
        place.copy_(new.labels if new.labels is not None else torch.tensor(MIXED if new.lost else OUTSIDE))
        groups, lost = old.groups | new.groups, dict(old.lost) | dict(new.lost)
        self._sources[whole] = Source(kept, groups, lost, old.gates | new.gates, old.norms | new.norms)

    def _set(self, result: Any, source: Source) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._sources[leaf] = source

    def _new_group(self, place: int, units: int, active: bool) -> Group:
        group = Group(place, self.size, active)
        self.groups.append(group)
        self.size += units
        return group

    def _product(self, name: str, args: Any, result: Tensor) -> None:
        """Note what a product reads, and label its results where one operand is an activation and the other a weight."""
        first, second = args[1:3] if name in ("addmm", "baddbmm", "addmv") else args[:2]
        operands = [None if name in LOOK_UPS else self._sources.get(x) for x in (first, second)]
        if name in ("addmm", "baddbmm", "addmv") and (added := self._sources.get(args[0])) is not None:
            self._trouble(self.places(added), "is added to another layer")
        reads = [(x, s) for x, s in zip((first, second), operands, strict=True) if s is not None]
        stacked = (
            name in ("bmm", "baddbmm") and len(reads) == 1 and _differs(second if operands[0] else first)
        )
        by_row = name != "convolution" and operands[0] is None  # W x instead of x W
        for tensor, source in reads:
            module = self._running[-1] if self._running and len(reads) == 1 else None
            dims = [1] if name == "convolution" else [-2 if by_row and tensor.ndim > 1 else -1]
            columns = (
                None if source.labels is None else constant(source.labels, [0, *dims] if stacked else dims)
            )
            self.reads.append(Read(module, name, source, columns))
            self.on_read(tensor, source)
        if len(reads) == 2 or not result.ndim:
            self._set(result, Source())
        elif reads or name in LOOK_UPS:
            dim = (
                1
                if name == "convolution"
                else -2
                if by_row and name not in LOOK_UPS and result.ndim > 1
                else -1
            )
            shape = [1] * result.ndim
            shape[dim] = result.shape[dim]
            if stacked:
                shape[0] = result.shape[0]
            units = shape[dim] * shape[0] if stacked else shape[dim]
            module = self._running[-1] if self._running else None
            self.products.append(Product(module, units, self.counted(self._latest)))
            group = self._new_group(len(self.products) - 1, units, active=False)
            labels = torch.arange(group.first, group.first + units, device=result.device).view(shape)
            self._set(result, Source(labels.expand(result.shape), frozenset([len(self.groups) - 1])))

    def _mix(self, name: str, read: list[Tensor], result: Any) -> None:
        """Note what attention and recurrent layers read. The units of a recurrent layer are lost."""
        for tensor in read:
            if (source := self._sources.get(tensor)) is not None:
                self.reads.append(Read(None, name, source, None))
                self.on_read(tensor, source)
        lost = {}
        if name.startswith(RECURRENT):
            self.products.append(Product(None, 0, self.counted(self._latest)))
            self._new_group(len(self.products) - 1, 0, active=True)
            lost = {len(self.groups) - 1: name}
        self._set(result, Source(lost=lost))

    def _view(self, function: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        source = self._sources[args[0]]
        try:
            if name in ("view", "_unsafe_view", "_reshape_alias"):
                labels = source.labels.reshape(result.shape)
            else:
                labels = function(source.labels, *args[1:], **kwargs)
        except RuntimeError:  # a view of complex numbers, or by strides
            self._set(result, Source(lost=dict.fromkeys(source.groups, name) | dict(source.lost)))
            return
        for part, part_labels in zip(tree_leaves(result), tree_leaves(labels), strict=True):
            self._sources[part] = replace(source, labels=part_labels)

    def _elementwise(
        self, function: Any, name: str, args: Any, kwargs: Any, read: list[Tensor], result: Any
    ) -> None:
        output = tree_leaves(result)[0]
        known = [(x, s) for x in read if (s := self._sources.get(x)) is not None]

        def rank(entry: tuple[Tensor, Source]) -> tuple[bool, bool, int]:
            """Active units come first, then those of a tensor that is not broadcast, then those of the later product."""
            active = any(self.groups[number].active for number in entry[1].groups)
            return active, entry[0].numel() == output.numel(), max(self.places(entry[1]))

        chosen = max([each for each in known if each[1].labels is not None], key=rank)[1]
        labels, groups, places = chosen.labels.expand(output.shape), chosen.groups, self.places(chosen)
        gates, norms = chosen.gates, chosen.norms
        for tensor, other in known:
            if other.labels is None:
                if not other.discrete and not {self.groups[number].place for number in other.lost} & places:
                    self._trouble(places, "is mixed with the input")
            elif other is not chosen:
                theirs, others = other.labels.expand(output.shape), self.places(other)
                gates, norms = gates | other.gates, norms | other.norms
                aligned = tensor.shape == output.shape and _same_units(theirs, labels)
                if others != places and name == "mul" and aligned:
                    gates |= others - places
                elif others != places or (other.groups != groups and not aligned):
                    done = "multiplied by" if name == "mul" else "added to"
                    self._trouble(others | places, f"is {done} another layer")
                if (core(labels) < 0).any():
                    labels, groups = torch.where(labels < 0, theirs, labels), groups | other.groups
        source = Source(labels, groups, chosen.lost, gates, norms)
        if name not in COPIES and not self._is_affine(function, args, kwargs):
            source = self._activated(source)
        self._set(result, source)

    def _activated(self, source: Source) -> Source:
        """Give new labels to the units that are not active yet."""
        labels, groups = source.labels, set(source.groups)
        for number in source.groups:
            group = self.groups[number]
            if not group.active:
                units = self.products[group.place].units
                new = self._new_group(group.place, units, active=True)
                inside = (core(labels) >= group.first) & (core(labels) < group.first + units)
                labels = torch.where(inside, core(labels) + (new.first - group.first), core(labels)).expand(
                    labels.shape
                )
                groups = groups - {number} | {len(self.groups) - 1}
        return replace(source, labels=labels, groups=frozenset(groups))

    def _other(
        self, function: Any, name: str, args: Any, kwargs: Any, read: list[Tensor], result: Any
    ) -> None:
        """Follow the units through an operation that is neither elementwise nor a view."""
        known = [s for x in read if (s := self._sources.get(x)) is not None]
        groups = frozenset().union(*(s.groups for s in known))
        lost = {key: value for s in known for key, value in s.lost.items()}
        lost |= {number: lost.get(number, name) for number in groups}
        gates, norms = (frozenset().union(*(getattr(s, of) for s in known)) for of in ("gates", "norms"))
        first = next(s for s in known if s.labels is not None)
        in_place = any(word in name for word in ("norm", "softmax", "dropout"))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        found: list[Tensor | None] = [None] * len(outputs)
        if name == "glu":
            half = outputs[0].shape[args[1] if len(args) > 1 else -1]
            found[0] = first.labels.narrow(args[1] if len(args) > 1 else -1, 0, half)
        elif in_place and outputs[0].shape == first.labels.shape:
            found[0] = first.labels
        elif not function._schema.is_mutable:  # running it again must not write
            found = self._followed(function, args, kwargs, outputs)
        idle = [number for number in groups if not self.groups[number].active]
        mixed = found[0] is None or bool((core(found[0]) == MIXED).any())
        if idle and mixed and not self._is_linear_here(function, args, kwargs, outputs[0]):
            lost |= dict.fromkeys(self._activated(first).groups, name)
        for output, labels in zip(outputs, found, strict=True):
            if labels is None or not (core(labels) >= 0).any():
                self._sources[output] = Source(lost=lost)
                continue
            source = Source(labels, groups, lost if (core(labels) == MIXED).any() else {}, gates, norms)
            self._sources[output] = self._activated(source) if name == "glu" or "softmax" in name else source

    def _is_linear_here(self, function: Any, args: Any, kwargs: Any, output: Tensor) -> bool:
        """Return whether an operation treats the mean of its input and of the reversed input as a linear one does."""

        def result(share: float) -> Tensor:
            def of(leaf: Any) -> Any:
                units = isinstance(leaf, Tensor) and self._kind(leaf) == "units"
                return torch.lerp(leaf, leaf.flip(*range(leaf.ndim)), share) if units else leaf

            return tree_leaves(function(*tree_map(of, args), **tree_map(of, kwargs)))[0].double()

        try:
            return not function._schema.is_mutable and _close(
                result(0.5), (output.double() + result(1.0)) / 2, 1e-3
            )
        except (RuntimeError, TypeError, ValueError):
            return False

    def _followed(self, function: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> list[Tensor | None]:
        """Return the labels of the results: run the operation on numbers r and s of the labels, and look up the ratio r/s.

        r rises and s falls with a random number u of each label, so the ratio is that of one label where an entry is a
        sum, mean or maximum of entries of one unit, and of no label, but for a chance of 1e-10 for each, elsewhere.
        """
        draw = torch.Generator().manual_seed(0)
        u = torch.rand(self.size + 2, generator=draw, dtype=torch.float64).to(outputs[0].device)

        def numbers(slope: float, start: float) -> Any:
            def of(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                    return leaf
                source = self._sources.get(leaf) or Source()
                labels = torch.tensor(MIXED if source.lost else OUTSIDE, device=leaf.device).expand(
                    leaf.shape
                )
                labels = labels if source.labels is None else source.labels
                return start + slope * u[labels + 2]

            return tree_leaves(function(*tree_map(of, args), **tree_map(of, kwargs)))

        try:
            pairs = zip(numbers(1.0, 1.0), numbers(-1.0, 2.0), outputs, strict=True)
            return [self._labels_of(r, s, u) if r.is_floating_point() else None for r, s, _ in pairs]
        except (RuntimeError, TypeError, ValueError):
            return [None] * len(outputs)

    def _labels_of(self, rising: Tensor, falling: Tensor, u: Tensor) -> Tensor:
        ratio = rising / falling
        found = ((2 * ratio - 1) / (1 + ratio)).contiguous()  # (1 + u) / (2 - u) = ratio
        values, order = u.sort()
        above = torch.searchsorted(values, found).clamp_max(len(u) - 1)
        below = (above - 1).clamp_min(0)
        near = torch.where((values[above] - found).abs() < (values[below] - found).abs(), above, below)
        labels = (order[near] - 2).where((values[near] - found).abs() < 1e-10, MIXED)
        return labels.where((rising != 0) | (falling != 0), OUTSIDE)  # padding

    def _is_affine(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an elementwise function is affine in its arguments with labels, jointly."""
        leaves = tree_leaves((args, kwargs))
        key = (function, *(self._kind(leaf) for leaf in leaves))
        if key not in self._affine:
            self._affine[key] = all(self._affine_at(function, args, kwargs, scale) for scale in (3.0, 30.0))
        return self._affine[key]

    def _kind(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf if isinstance(leaf, int | float | bool | str | None) else str(leaf)
        source = self._sources.get(leaf)
        return "units" if source is not None and source.labels is not None else "tensor"

    def _affine_at(self, function: Any, args: Any, kwargs: Any, scale: float) -> bool:
        draw = torch.Generator().manual_seed(0)

        def numbers(points: dict[int, Tensor]) -> Tensor:
            def of(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                if self._kind(leaf) == "units":
                    x = points[id(leaf)].to(leaf.device, copy=True)
                    return x > 0 if leaf.dtype == torch.bool else x
                one = leaf.flatten()[:1].to(torch.float64 if leaf.is_floating_point() else leaf.dtype)
                return one.expand(64).clone() if len(one) else one

            with torch.random.fork_rng(devices=[]):
                result = function(*tree_map(of, args), **tree_map(of, kwargs))
            return tree_leaves(result)[0].double()

        units = {
            id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and self._kind(x) == "units"
        }
        sides = [
            {key: scale * (2 * torch.rand(64, generator=draw, dtype=torch.float64) - 1) for key in units}
            for _ in "ab"
        ]
        try:
            a, b = (numbers(side) for side in sides)
            middle = numbers({key: (sides[0][key] + sides[1][key]) / 2 for key in units})
        except (RuntimeError, TypeError, ValueError):  # it takes no such numbers
            return False
        return _close(middle, (a + b) / 2, 5e-3)

    def _trouble(self, places: set[int], why: str) -> None:
        for place in places:
            self.troubles.setdefault(place, why)


def core(labels: Tensor) -> Tensor:
    """Return labels without the repetitions along expanded dimensions, which keep size 1."""
    return labels[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in labels.stride())]


def _same_units(labels: Tensor, others: Tensor) -> bool:
    """Return whether labels differ by a constant, as those of two layers or branches with the same units do."""
    a, b = core(labels), core(others)
    return a.shape == b.shape and bool((a - a.min() == b - b.min()).all())


def _close(values: Tensor, others: Tensor, share: float) -> bool:
    """Return whether two tensors agree up to a share of the largest finite value."""
    size = others.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return bool(torch.allclose(values, others, rtol=0.0, atol=share * float(size), equal_nan=True))


def constant(labels: Tensor, dims: list[int]) -> Tensor | None:
    """Return labels (sizes of `dims`) that do not depend on the other dimensions; None if they do."""
    small = core(labels)
    moved = small.movedim(dims, list(range(len(dims)))).flatten(len(dims))
    first = moved[..., :1]
    if not (moved == first).all():
        return None
    return first[..., 0].expand([labels.shape[dim] for dim in dims])


def is_layer(module: Any) -> bool:
    """Return whether a module is a Linear, a convolution, or a stack of Linear layers (stack, out, in)."""
    stack = getattr(module, "stacked_matrices", False) is True
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) or (stack and module.weight.ndim == 3)


def _channel_dims(norm: Any, output: Tensor) -> list[int]:
    if getattr(norm, "is_norm", False) and norm.weight.ndim == 2:
        return [0, output.ndim - 1]
    by_last = isinstance(norm, nn.LayerNorm | nn.RMSNorm) or getattr(norm, "is_norm", False)
    return [output.ndim - 1] if by_last else [1]


def _differs(weight: Tensor) -> bool:
    """Return whether the members of a stack of matrices are not one matrix, expanded."""
    return weight.shape[0] > 1 and weight.stride(0) != 0
