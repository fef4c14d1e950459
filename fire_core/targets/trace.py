"""What one run of a net shows: of which unit, and of which row of which weight, each entry of each tensor is made.

Every output of a product with weights is a *unit*, and so is every *row* of a weight. Labels of both follow the entries
of tensors through whatever moves them (reshapes, concatenations, pools) and through elementwise functions. PyTorch tells
which operations are elementwise; what an operation that is neither elementwise nor a view does with the labels is found
by running it once more on numbers that stand for them. Units that a function reads which is not affine become *active*.

`graph` asks which layer reads which units, `dormancy` what they are worth, and `rows` which matrices a weight holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from fire_core.passes import call

NORMS = (
    *(batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    nn.LocalResponseNorm,
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
WITH_ADDEND = {"addmm", "baddbmm", "addmv"}
PRODUCTS = {"mm", "bmm", "mv", "dot", "convolution", *WITH_ADDEND}
LOOK_UPS = {"embedding", "_embedding_bag"}
RECURRENT = ("lstm", "gru", "rnn", "mkldnn_rnn", "_thnn")
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
RESHAPES = {"view", "_unsafe_view", "_reshape_alias"}
COPIES = {"_to_copy", "clone", "copy"}
# elementwise operations that PyTorch does not mark as such
UNMARKED = {"hardswish", "_prelu_kernel", "log_sigmoid_forward", "rrelu_with_noise", *COPIES}
SUMS = {"sum", "mean", "cumsum"}
FACTORS = {"mul", "div", "addcmul", "addcdiv"}
OUTSIDE, MIXED = (
    -1,
    -2,
)  # labels of entries that come from nothing that is followed, and of those that mix labels


class Group(NamedTuple):
    """Units of one product in one form: as computed, or active after one of the functions that read them.

    place: number of the product in order of execution. The label of a unit is number of the group << 32 | unit.
    """

    place: int
    active: bool


class Product(NamedTuple):
    """A product with weights. module: name of its Linear, convolution or stack, if it is in one."""

    module: str | None
    units: int
    counted: bool


@dataclass(frozen=True)
class Source:
    """Where the entries of a tensor come from.

    units: label of each entry, None if no entry has a unit. rows: likewise, weight << 32 | row. lost: groups that are mixed
    in entries without a label -> the operation that mixed them. gates: places of products that were multiplied with the
    labelled ones. weights: those whose outputs reach the tensor without another product with weights. scores: number of
    the product of two activations that it is. discrete: whether only integers of the input, as masks are, reach it.
    is_weight: whether it depends on weights alone.
    """

    units: Tensor | None = None
    rows: Tensor | None = None
    lost: dict[int, str] = field(default_factory=dict)
    gates: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    scores: int | None = None
    discrete: bool = False
    is_weight: bool = False


class Read(NamedTuple):
    """The input of a product. columns: label of each input of the layer; None if they differ between samples."""

    module: str | None
    operation: str
    source: Source
    columns: Tensor | None


class Use(NamedTuple):
    """Rows that are one factor (0, 1, 2) of a "product" of activations, "attention" or a "gate", by its number.

    A factor of the product with such a product is one of "values", with the number of the latter.
    """

    kind: str
    number: int
    factor: int
    rows: Tensor


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


Known = list[tuple[Tensor, Source]]


class Trace(TorchDispatchMode):
    """Context that follows the units of what depends on the input, and the rows of `weights`, without gradients.

    Args:
        on_read: called with each tensor that a product reads, its source, and the name of the reading module, if any.
        counted: function of the module that runs; if it returns False, its units are marked as not counted.
    Attributes:
        groups, products, reads, uses: in order of execution. sums: pairs of rows that are added. troubles: place -> why its
        units have no owner. unclear: weight -> what its rows cannot be followed through. heard: weights whose outputs
        another one reads. softened: numbers of products that a softmax follows. channels: norm -> label of each of its
        channels.
    """

    def __init__(
        self,
        on_read: Callable[[Tensor, Source, str | None], None] = lambda tensor, source, module: None,
        counted: Callable[[nn.Module | None], bool] = lambda module: True,
        weights: Iterable[Tensor] = (),
    ) -> None:
        super().__init__()
        self.on_read, self.counted = on_read, counted
        self.groups: list[Group] = []
        self.products: list[Product] = []
        self.reads: list[Read] = []
        self.uses: list[Use] = []
        self.sums: list[Tensor] = []
        self.troubles: dict[int, str] = {}
        self.unclear: dict[int, str] = {}
        self.heard: set[int] = set()
        self.softened: set[int] = set()
        self.channels: dict[str, Tensor] = {}
        self._operations = 0
        self._sources: Any = WeakTensorKeyDictionary()
        self._running: list[str] = []
        self._latest: nn.Module | None = None
        self._affine: dict[Any, bool] = {}
        for number, weight in enumerate(weights):
            rows = _labels(number, len(weight), weight).view(-1, *[1] * (weight.ndim - 1))
            own = frozenset([number])
            self._sources[weight] = Source(rows=rows.expand(weight.shape), weights=own, is_weight=True)

    def run(self, net: nn.Module, inputs: Any) -> Any:
        """Run `inputs` through `net` in its present mode and return the output."""
        inputs = tree_map_only(Tensor, Tensor.detach, inputs)
        for leaf in _tensors(inputs):
            self._sources[leaf] = Source(discrete=not leaf.is_floating_point())
        with ExitStack() as hooks:
            for name, module in net.named_modules():
                for handle in self._watch(name, module):
                    hooks.callback(handle.remove)
            with torch.no_grad(), self:
                return call(net, inputs)

    def sources(self, output: Any) -> Known:
        """Return the tensors in an output that depend on the inputs or on weights, with their sources."""
        found = [(leaf, self._sources.get(leaf)) for leaf in _tensors(output)]
        return [(leaf, source) for leaf, source in found if source is not None]

    def groups_in(self, source: Source) -> set[int]:
        """Return the numbers of the groups whose units have labels in `source`."""
        return set() if source.units is None else set((core(source.units) >> 32).unique().tolist()) - {-1}

    def places(self, groups: Iterable[int]) -> set[int]:
        """Return the places of the products whose units are in some groups."""
        return {self.groups[number].place for number in groups}

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        has_weight = any(p is not None and p.ndim > 1 for p in module._parameters.values())
        layer, norm = is_layer(module), isinstance(module, NORMS) or getattr(module, "is_norm", False)

        def enter(module: nn.Module, arguments: Any) -> None:
            self._latest = module if has_weight else self._latest
            if layer:
                self._running.append(name)

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            if layer:
                self._running.pop()
            for leaf, source in self.sources(output) if norm else ():
                channels = constant(source.units, _channels(module, leaf))
                if channels is not None:
                    self.channels[name] = channels.flatten()

        if has_weight or layer or norm:
            yield module.register_forward_pre_hook(enter)
            yield module.register_forward_hook(leave)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and note where the entries of its results come from."""
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__.rstrip("_")
        args = args[1:] if name == "copy" else args  # what was there before is gone
        known = self.sources((args, kwargs))
        known = [each for each in known if not each[1].is_weight] or known
        operation = Operation(function, name, args, kwargs or {})
        self._operations += 1
        if "softmax" in name:
            self.softened |= {source.scores for _, source in known if source.scores is not None}
        if name in PRODUCTS or name in LOOK_UPS:
            self._product(name, args, result)
        elif not known:
            pass
        elif name.startswith((*ATTENTION, *RECURRENT)):
            self._mix(name, args, known, result)
        elif all(source.units is None and source.rows is None for _, source in known):
            self._set(result, _joined(known))
        elif function.is_view or name in ("_unsafe_view", "unsafe_split", "unsafe_chunk"):
            self._view(operation, result)
        elif torch.Tag.pointwise in function.tags or name in UNMARKED:
            self._elementwise(operation, known, result)
        elif outputs := _tensors(result):
            self._other(operation, known, outputs)
        if name == "copy" and known and result._is_view():
            self._write_part(result._base, result)
        return result

    def _set(self, result: Any, source: Source) -> None:
        for leaf in _tensors(result):
            self._sources[leaf] = source

    def _write_part(self, whole: Tensor, part: Tensor) -> None:
        """Note that `part`, a view of `whole`, was written: what is in `whole` is not followed any more."""
        written = [(each, source) for each in (whole, part) if (source := self._sources.get(each))]
        for _, source in written:
            self._lose("a write into a part", source.rows)
        lost = {n: "a write into a part" for _, source in written for n in self.groups_in(source)}
        joined = _joined(written)
        self._sources[whole] = replace(joined, lost=lost | joined.lost)

    def _product(self, name: str, args: Any, result: Tensor) -> None:
        """Note what a product reads, and label its results where one operand is an activation and the other a weight."""
        operands = args[1:3] if name in WITH_ADDEND else args[:2]
        sources = [None if name in LOOK_UPS else self._sources.get(x) for x in operands]
        reads = [(i, s) for i, s in enumerate(sources) if s is not None and not s.is_weight]
        weight = next((s for s in sources if s is not None and s.is_weight), None)
        if name in WITH_ADDEND and (added := self._sources.get(args[0])) is not None:
            self._trouble(self.places(self.groups_in(added)), "is added to another layer")
        if not reads and name not in LOOK_UPS:
            return
        module = self._running[-1] if self._running else None
        heard = frozenset().union(*(source.weights for _, source in reads))
        side = -2 if reads and reads[0][0] == 1 else -1  # W x or x W
        matrix = operands[0 if side == -2 else 1]
        stacked = "bmm" in name and len(reads) == 1 and len(matrix) > 1 and matrix.stride(0) != 0

        def along(tensor: Tensor) -> list[int]:
            """Return the dimensions of units."""
            last = 1 if name == "convolution" else side if tensor.ndim > 1 else -1
            return [0, last] if stacked else [last]

        for factor, source in reads:
            tensor, reader = operands[factor], module if len(reads) == 1 else None
            self.reads.append(Read(reader, name, source, constant(source.units, along(tensor))))
            self.on_read(tensor, source, reader)
            scores = next((s.scores for _, s in reads if s is not source and s.scores is not None), None)
            if weight is None:
                self._use("product" if scores is None else "values", factor, source.rows, scores)
        if len(reads) == 2 or not result.ndim:
            self._set(result, Source(weights=heard, scores=self._operations))
            return
        shape = [1] * result.ndim
        for dim in along(result):
            shape[dim] = result.shape[dim]
        number = self._new_group(module, prod(shape), active=False)
        rows, weights = None, heard
        if weight is not None:
            self.heard |= heard
            rows, weights = weight.rows, weight.weights
            if name != "convolution":
                rows = constant(rows, [0, side] if stacked else [side])
            elif matrix.shape[1] > 1 or len(matrix) != operands[0].shape[1]:
                rows = constant(rows, [int(args[6])])  # 1 in a transposed convolution
            else:  # channels of the input stay apart
                rows, weights = constant(reads[0][1].rows, [1]), weights | heard
                if rows is None:
                    self._lose("a depthwise convolution", reads[0][1].rows)
        fits = rows is not None and rows.numel() == prod(shape)
        rows = rows.reshape(shape).expand(result.shape) if rows is not None and fits else None
        units = _labels(number, prod(shape), result).view(shape).expand(result.shape)
        self._set(result, Source(units, rows, weights=weights))

    def _mix(self, name: str, args: Any, known: Known, result: Any) -> None:
        """Note what attention and recurrent layers read. The units of a recurrent layer are lost."""
        for tensor, source in known:
            self.reads.append(Read(None, name, source, None))
            self.on_read(tensor, source, None)
        weights, lost = _joined(known).weights, {}
        if name.startswith(RECURRENT):
            self.heard |= weights
            weights = _joined([each for each in self.sources(args) if each[1].is_weight]).weights
            lost = {self._new_group(None, 0, active=True): name}
        else:
            for factor, tensor in enumerate(args[:3]):
                self._use("attention", factor, self._sources.get(tensor, Source()).rows)
        self._set(result, Source(lost=lost, weights=weights))

    def _view(self, operation: Operation, result: Any) -> None:
        source, parts = self._sources[operation.args[0]], _tensors(result)

        def moved(labels: Tensor | None) -> list[Any]:
            if labels is None:
                return [None] * len(parts)
            if operation.name in RESHAPES:
                return [compact(labels.reshape(result.shape))]
            return [compact(each) for each in operation.again(lambda x: labels)]

        try:
            for part, units, rows in zip(parts, moved(source.units), moved(source.rows), strict=True):
                self._sources[part] = replace(source, units=units, rows=rows)
        except RuntimeError:  # a view of complex numbers, or by strides
            self._lose(operation.name, source.rows)
            lost = dict.fromkeys(self.groups_in(source), operation.name) | source.lost
            self._set(result, replace(source, units=None, rows=None, lost=lost, gates=frozenset()))

    def _elementwise(self, operation: Operation, known: Known, result: Any) -> None:
        shape = tree_leaves(result)[0].shape
        source = replace(_joined(known), rows=self._rows_met(operation.name, known, shape))
        if any(each.units is not None for _, each in known):
            source = self._units_met(operation.name, known, shape, source)
            if operation.name not in COPIES and not self._is_affine(operation):
                source = self._activated(source)
        self._set(result, source)

    def _rows_met(self, name: str, known: Known, shape: torch.Size) -> Tensor | None:
        """Return the rows of elementwise results; factors are noted, and terms of a sum."""
        found = [source.rows.expand(shape) for _, source in known if source.rows is not None]
        rows = found[0] if found else None
        for other in found[1:]:
            a, b = torch.broadcast_tensors(core(rows), core(other))  # type: ignore[arg-type]
            differ = (a != b) & (a >= 0) & (b >= 0)
            if differ.any() and name in FACTORS:
                self._use("gate", 0, a[differ])
                self._use("gate", 1, b[differ])
                return None
            if differ.any():
                self.sums.append(torch.stack((a[differ], b[differ])).unique(dim=1))
            rows = torch.where(a < 0, b, a).expand(shape)
        return rows

    def _units_met(self, name: str, known: Known, shape: torch.Size, rest: Source) -> Source:
        """Return the source of elementwise results; units of several layers that meet are noted, and followed as one."""

        def rank(entry: tuple[Tensor, Source]) -> tuple[bool, bool, int]:
            """Active units come first, then those of a tensor that is not broadcast, then those of the later product."""
            groups = [self.groups[number] for number in self.groups_in(entry[1])]
            whole = entry[0].numel() == shape.numel()
            return any(g.active for g in groups), whole, max((g.place for g in groups), default=-1)

        chosen = max([each for each in known if each[1].units is not None], key=rank)[1]
        units, groups, gates = chosen.units.expand(shape), self.groups_in(chosen), chosen.gates  # type: ignore
        places = self.places(groups)
        for tensor, other in known:
            if other.units is None:
                if not other.discrete and not self.places(other.lost) & places:
                    self._trouble(places, "is mixed with the input")
            elif other is not chosen:
                theirs, their_groups = other.units.expand(shape), self.groups_in(other)
                others, gates = self.places(their_groups), gates | other.gates
                aligned = tensor.shape == shape and _same_units(theirs, units)
                if others != places and name == "mul" and aligned:
                    gates |= others - places
                elif others != places or (their_groups != groups and not aligned):
                    done = "multiplied by" if name == "mul" else "added to"
                    self._trouble(others | places, f"is {done} another layer")
                if (core(units) < 0).any():
                    units = compact(torch.where(units < 0, theirs, units))
        return replace(rest, units=units, lost=chosen.lost, gates=gates)

    def _new_group(self, module: str | None, units: int, active: bool) -> int:
        """Start the units of a product, and return the number of their group."""
        self.products.append(Product(module, units, self.counted(self._latest)))
        self.groups.append(Group(len(self.products) - 1, active))
        return len(self.groups) - 1

    def _activated(self, source: Source) -> Source:
        """Give new labels to the units that are not active yet."""
        units: Any = source.units
        for number in self.groups_in(source):
            if not self.groups[number].active:
                self.groups.append(Group(self.groups[number].place, active=True))
                small, step = core(units), len(self.groups) - 1 - number << 32
                units = torch.where(small >> 32 == number, small + step, small).expand(units.shape)
        return replace(source, units=units)

    def _other(self, operation: Operation, known: Known, outputs: list[Tensor]) -> None:
        """Follow labels through an operation that is neither elementwise nor a view."""
        name, joined = operation.name, _joined(known)
        all_units, all_rows = (self._moved(operation, outputs, kind) for kind in ("units", "rows"))
        smaller = outputs[0].numel() < max(x.numel() for x, _ in known)
        statistic = smaller and "pool" not in name and not operation.function._schema.is_mutable
        decision = not (outputs[0].is_floating_point() or outputs[0].is_complex())
        if is_mixed(all_rows[0]) and not (statistic or decision or joined.is_weight):
            for _, source in known:
                self._lose(name, source.rows)
        groups = {number: source for _, source in known for number in self.groups_in(source)}
        lost = dict.fromkeys(groups, name) | joined.lost
        idle = [source for number, source in groups.items() if not self.groups[number].active]
        if idle and is_mixed(all_units[0]) and name not in SUMS:
            lost |= dict.fromkeys(self.groups_in(self._activated(idle[0])), name)
        for output, units, rows in zip(outputs, all_units, all_rows, strict=True):
            source = replace(joined, units=units, rows=rows, lost=lost)
            if units is None or not (core(units) >= 0).any():
                source = replace(source, units=None, gates=frozenset())
            elif not is_mixed(units):
                source = replace(source, lost={})
            active = source.units is not None and (name == "glu" or "softmax" in name)
            self._sources[output] = self._activated(source) if active else source

    def _moved(self, operation: Operation, outputs: list[Tensor], kind: str) -> list[Tensor | None]:
        """Return the labels of the results: run the operation on numbers r and s of the labels, and look up the ratio r/s.

        r rises and s falls with a random number u of each label, so the ratio is that of one label where an entry is a
        sum, mean or maximum of entries of one unit, and of no label, but for a chance of 1e-10 for each, elsewhere.
        """
        function, name, args, kwargs = operation
        nothing: list[Tensor | None] = [None] * len(outputs)
        present = [own for _, s in self.sources((args, kwargs)) if (own := getattr(s, kind)) is not None]
        if not present:
            return nothing
        if name == "glu":
            halves = present[0].chunk(2, args[1] if len(args) > 1 else -1)
            for factor, half in enumerate(halves if kind == "rows" else ()):
                self._use("gate", factor, half)
            return [compact(halves[0])]
        in_place = any(word in name for word in ("norm", "softmax", "dropout"))
        if in_place and outputs[0].shape == present[0].shape:
            return [present[0], *nothing[1:]]
        if function._schema.is_mutable:  # running it again must not write
            return nothing
        others = torch.cat([present[0].new_full((1,), value) for value in (MIXED, OUTSIDE)])
        labels = torch.cat([others, *(core(own).flatten() for own in present)]).unique()
        draw = torch.Generator().manual_seed(0)
        u = torch.rand(len(labels), generator=draw, dtype=torch.float64).to(labels.device)
        values, order = u.sort()

        def numbers(slope: float, start: float) -> list[Any]:
            def of(leaf: Tensor) -> Tensor:
                source = self._sources.get(leaf, Source())
                missing = others[int(kind == "rows" or not source.lost)].expand(leaf.shape)
                own = getattr(source, kind) if getattr(source, kind) is not None else missing
                number = u[torch.searchsorted(labels, core(own).contiguous())]
                return (start + slope * number).expand(leaf.shape) if leaf.is_floating_point() else leaf

            return operation.again(of)

        def label(rising: Tensor, falling: Tensor) -> Tensor | None:
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
            return nothing

    def _is_affine(self, operation: Operation) -> bool:
        """Return whether an elementwise function is affine in its arguments with units, jointly, at 64 random points."""
        leaves = tree_leaves((operation.args, operation.kwargs))
        key = (operation.function, *(self._kind(leaf) for leaf in leaves))
        if key not in self._affine:
            self._affine[key] = all(self._affine_at(operation, scale) for scale in (3.0, 30.0))
        return self._affine[key]

    def _kind(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf if isinstance(leaf, int | float | bool | str | None) else str(leaf)
        return "units" if self._sources.get(leaf, Source()).units is not None else "tensor"

    def _affine_at(self, operation: Operation, scale: float) -> bool:
        draw = torch.Generator().manual_seed(0)
        ends: dict[int, Tensor] = {}
        for leaf in _tensors((operation.args, operation.kwargs)):
            if self._kind(leaf) == "units":
                ends[id(leaf)] = scale * (2 * torch.rand(2, 64, generator=draw, dtype=torch.float64) - 1)

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

    def _trouble(self, places: set[int], why: str) -> None:
        for place in places:
            self.troubles.setdefault(place, why)

    def _use(self, kind: str, factor: int, rows: Tensor | None, number: int | None = None) -> None:
        if rows is not None:
            number = self._operations if number is None else number
            self.uses.append(Use(kind, number, factor, core(rows).unique()))

    def _lose(self, name: str, rows: Tensor | None) -> None:
        for weight in () if rows is None else (core(rows) >> 32).unique().tolist():
            if weight >= 0:
                self.unclear[weight] = f"its rows cannot be followed through {name}"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _device(tensor: Tensor) -> torch.device:
    """Return the device of a tensor's labels."""
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _labels(number: int, size: int, tensor: Tensor) -> Tensor:
    """Return the labels of the units of a group, or of the rows of a weight."""
    return torch.arange(size, device=_device(tensor)) + (number << 32)


def _joined(known: Known) -> Source:
    """Return the source, without labels, of what is computed from all of these."""
    sources = [source for _, source in known]
    return Source(
        lost={number: name for source in sources for number, name in source.lost.items()},
        gates=frozenset().union(*(source.gates for source in sources)),
        weights=frozenset().union(*(source.weights for source in sources)),
        scores=next((source.scores for source in sources if source.scores is not None), None),
        discrete=all(source.discrete for source in sources),
        is_weight=all(source.is_weight for source in sources),
    )


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


def _same_units(labels: Tensor, others: Tensor) -> bool:
    """Return whether labels differ by a constant, as those of two layers or branches with the same units do."""
    a, b = core(labels), core(others)
    return a.shape == b.shape and bool((a - a.min() == b - b.min()).all())


def is_layer(module: Any) -> bool:
    """Return whether a module is a Linear, a convolution, or a stack of Linear layers (stack, out, in)."""
    stack = getattr(module, "stacked_matrices", False) is True
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) or (stack and module.weight.ndim == 3)


def _channels(norm: Any, output: Tensor) -> list[int]:
    """Return the dimensions of the channels of a norm."""
    if getattr(norm, "is_norm", False) and norm.weight.ndim == 2:
        return [0, output.ndim - 1]
    by_last = isinstance(norm, nn.LayerNorm | nn.RMSNorm) or getattr(norm, "is_norm", False)
    return [output.ndim - 1] if by_last else [1]
