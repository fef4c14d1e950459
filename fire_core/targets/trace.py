"""What one run of a net shows: of which unit, and of which row of which weight, each entry of each tensor is made.

Every output of a product with weights is a *unit*, and so is every *row* of a weight. Labels of both follow the entries
of tensors through whatever moves them (reshapes, concatenations, pools) and through elementwise functions. PyTorch tells
which operations are elementwise; what an operation that is neither elementwise nor a view does with the labels is found
by running it once more on numbers that stand for them. Units that a function reads which is not affine become *active*.

`graph` asks which layer reads which units, `dormancy` what they are worth, and `rows` which matrices a weight holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
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
    labelled ones. norms: names of norms on the way. weights: those whose outputs reach the tensor, by other products with
    weights none. scores: number of the product of two activations that it is. discrete: whether only integers of the
    input, as masks are, reach it. is_weight: whether it depends on weights alone.
    """

    units: Tensor | None = None
    rows: Tensor | None = None
    lost: Mapping[int, str] = field(default_factory=dict)
    gates: frozenset[int] = frozenset()
    norms: frozenset[str] = frozenset()
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


class Trace(TorchDispatchMode):
    """Context that follows the units of every tensor that depends on the input, and the rows of `weights`, without gradients.

    Args:
        on_read: called with each tensor that a product reads, its source, and the name of the reading module, if any.
        counted: function of the module that runs; if it returns False, its units are marked as not counted.
    Attributes:
        groups, products, reads, uses: in order of execution. sums: pairs of rows that are added. troubles: place -> why its
        units have no owner. unclear: weight -> what its rows cannot be followed through. heard: weights whose outputs
        another one reads. softened: numbers of products that a softmax follows. calls: module -> number of its runs.
        channels: norm -> label of each of its channels.
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
        self.operations = 0
        self.calls: Counter[str] = Counter()
        self.channels: dict[str, Tensor] = {}
        self._sources: Any = WeakTensorKeyDictionary()
        self._running: list[str] = []
        self._latest: nn.Module | None = None
        self._affine: dict[Any, bool] = {}
        for number, weight in enumerate(weights):
            rows = (torch.arange(len(weight), device=_device(weight)) + (number << 32)).view(
                -1, *[1] * (weight.ndim - 1)
            )
            source = Source(rows=rows.expand(weight.shape), weights=frozenset([number]), is_weight=True)
            self._sources[weight] = source

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

    def sources(self, output: Any) -> list[tuple[Tensor, Source]]:
        """Return the tensors in an output that depend on the inputs or on weights, with their sources."""
        found = [(leaf, self._sources.get(leaf)) for leaf in _tensors(output)]
        return [(leaf, source) for leaf, source in found if source is not None]

    def groups_in(self, source: Source) -> set[int]:
        """Return the numbers of the groups whose units have labels in `source`."""
        return set() if source.units is None else set((core(source.units) >> 32).unique().tolist()) - {-1}

    def places(self, source: Source) -> set[int]:
        """Return the places of the products whose units have labels in `source`."""
        return {self.groups[number].place for number in self.groups_in(source)}

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        def before(module: nn.Module, arguments: Any) -> None:
            self._latest = module

        def enter(module: nn.Module, arguments: Any) -> None:
            self.calls[name] += 1
            self._running.append(name)

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            self._running.pop()

        def after_norm(module: nn.Module, arguments: Any, output: Any) -> None:
            for leaf, source in self.sources(output):
                channels = None if source.units is None else constant(source.units, _channels(module, leaf))
                if channels is not None:
                    self.channels[name] = channels.flatten()
                    self._sources[leaf] = replace(source, norms=source.norms | {name})

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
        self.operations += 1
        if name == "copy":
            args = args[1:]  # what was there before is gone
            whole = result._base if result._is_view() else None
        known = self.sources((args, kwargs))
        known = [each for each in known if not each[1].is_weight] or known
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
            self._view(function, name, args, kwargs, result)
        elif torch.Tag.pointwise in function.tags or name in UNMARKED:
            self._elementwise(function, name, args, kwargs, known, result)
        else:
            self._other(function, name, args, kwargs, known, result)
        if name == "copy" and known and whole is not None:
            self._write_part(whole, result)
        return result

    def _set(self, result: Any, source: Source) -> None:
        for leaf in _tensors(result):
            self._sources[leaf] = source

    def _write_part(self, whole: Tensor, part: Tensor) -> None:
        """Give the entries of `whole` that `part` is a view of the source of `part`."""
        old, new = self._sources.get(whole) or Source(), self._sources[part]

        def written(before: Tensor | None, after: Tensor | None) -> Tensor | None:
            if before is None and after is None:
                return None
            before = torch.full(whole.shape, OUTSIDE, device=_device(whole)) if before is None else before
            kept = torch.empty_strided(whole.shape, whole.stride(), dtype=torch.int64, device=before.device)
            offset = part.storage_offset() - whole.storage_offset()
            view = kept.copy_(before).as_strided(part.shape, part.stride(), offset)
            view.copy_(torch.tensor(MIXED if new.lost else OUTSIDE) if after is None else after)
            return compact(kept)

        both = _joined([(whole, old), (part, new)])
        units, rows = written(old.units, new.units), written(old.rows, new.rows)
        gates, norms = old.gates | new.gates, old.norms | new.norms
        self._sources[whole] = replace(both, units=units, rows=rows, gates=gates, norms=norms)

    def _product(self, name: str, args: Any, result: Tensor) -> None:
        """Note what a product reads, and label its results where one operand is an activation and the other a weight."""
        operands = args[1:3] if name in WITH_ADDEND else args[:2]
        sources = [None if name in LOOK_UPS else self._sources.get(x) for x in operands]
        reads = [
            (i, x, s) for i, (x, s) in enumerate(zip(operands, sources)) if s is not None and not s.is_weight
        ]
        if name in WITH_ADDEND and (added := self._sources.get(args[0])) is not None:
            self._trouble(self.places(added), "is added to another layer")
        weight = next((s for s in sources if s is not None and s.is_weight), None)
        if not reads and name not in LOOK_UPS:
            return
        module = self._running[-1] if self._running else None
        convolved, w_x = name == "convolution", name not in LOOK_UPS and bool(reads and reads[0][0] == 1)
        last = [-1] if not w_x else [-2]
        matrix = operands[not w_x] if reads else operands[0]
        stacked = name in ("bmm", "baddbmm") and len(reads) == 1 and len(matrix) > 1 and matrix.stride(0) != 0
        for factor, tensor, source in reads:
            dims = [1] if convolved else last if tensor.ndim > 1 else [-1]
            columns = (
                None if source.units is None else constant(source.units, [0, *dims] if stacked else dims)
            )
            reader = module if len(reads) == 1 else None
            self.reads.append(Read(reader, name, source, columns))
            self.on_read(tensor, source, reader)
            if weight is None:
                scores = next(
                    (s.scores for _, _, s in reads if s is not source and s.scores is not None), None
                )
                self._use("product" if scores is None else "values", factor, source, scores)
        joined = _joined([(x, s) for _, x, s in reads])
        if len(reads) == 2 or not result.ndim:
            self._set(result, Source(weights=joined.weights, scores=self.operations))
            return
        dims = [1] if convolved else last if result.ndim > 1 else [-1]
        dims = [0, *dims] if stacked else dims
        shape = [1] * result.ndim
        for dim in dims:
            shape[dim] = result.shape[dim]
        units = prod(shape)
        self.products.append(Product(module, units, self.counted(self._latest)))
        number = self._new_group(len(self.products) - 1, active=False)
        labels = (torch.arange(units, device=_device(result)) + (number << 32)).view(shape)
        rows, weights = None, joined.weights
        if weight is not None:
            self.heard |= weights
            rows, weights = weight.rows, weight.weights
            if convolved and matrix.shape[1] == 1 and len(matrix) == reads[0][1].shape[1]:
                rows, weights = self._through_depthwise(
                    reads[0][2], weights
                )  # channels of the input stay apart
            elif rows is not None:
                side = int(args[6]) if convolved else -2 if w_x else -1
                rows = constant(rows, [0, side] if stacked else [side])
            rows = (
                rows.reshape(shape).expand(result.shape)
                if rows is not None and rows.numel() == units
                else None
            )
        self._set(result, Source(labels.expand(result.shape), rows, weights=weights))

    def _through_depthwise(
        self, source: Source, weights: frozenset[int]
    ) -> tuple[Tensor | None, frozenset[int]]:
        rows = None if source.rows is None else constant(source.rows, [1])
        if rows is None:
            self._lose("a depthwise convolution", source.rows)
        return rows, weights | source.weights

    def _mix(self, name: str, args: Any, known: list[tuple[Tensor, Source]], result: Any) -> None:
        """Note what attention and recurrent layers read. The units of a recurrent layer are lost."""
        joined = _joined(known)
        for tensor, source in known:
            self.reads.append(Read(None, name, source, None))
            self.on_read(tensor, source, None)
        if not name.startswith(RECURRENT):
            for factor, tensor in enumerate(args[:3]):
                self._use("attention", factor, self._sources.get(tensor) or Source())
            self._set(result, Source(weights=joined.weights))
            return
        self.heard |= joined.weights
        own = _joined([each for each in self.sources(args) if each[1].is_weight])
        self.products.append(Product(None, 0, self.counted(self._latest)))
        lost = {self._new_group(len(self.products) - 1, active=True): name}
        self._set(result, Source(lost=lost, weights=own.weights))

    def _view(self, function: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        source, parts = self._sources[args[0]], _tensors(result)

        def moved(labels: Tensor | None) -> list[Any]:
            if labels is None:
                return [None] * len(parts)
            if name in RESHAPES:
                return [labels.reshape(result.shape)]
            return tree_leaves(function(labels, *args[1:], **kwargs))

        try:
            for part, units, rows in zip(parts, moved(source.units), moved(source.rows), strict=True):
                self._sources[part] = replace(source, units=compact(units), rows=compact(rows))
        except RuntimeError:  # a view of complex numbers, or by strides
            self._lose(name, source.rows)
            lost = dict.fromkeys(self.groups_in(source), name) | dict(source.lost)
            self._set(result, replace(_joined([(args[0], source)]), lost=lost))

    def _elementwise(
        self,
        function: Any,
        name: str,
        args: Any,
        kwargs: Any,
        known: list[tuple[Tensor, Source]],
        result: Any,
    ) -> None:
        shape = tree_leaves(result)[0].shape
        source = replace(_joined(known), rows=self._rows_met(name, known, shape))
        labelled = [each for each in known if each[1].units is not None]
        if labelled:
            source = self._units_met(name, known, labelled, shape, source)
            if name not in COPIES and not self._is_affine(function, args, kwargs):
                source = self._activated(source)
        self._set(result, source)

    def _rows_met(self, name: str, known: list[tuple[Tensor, Source]], shape: torch.Size) -> Tensor | None:
        """Return the rows of elementwise results; factors are noted, and terms of a sum."""
        found = [source.rows.expand(shape) for _, source in known if source.rows is not None]
        rows = found[0] if found else None
        for other in found[1:]:
            a, b = torch.broadcast_tensors(core(rows), core(other))  # type: ignore[arg-type]
            differ = (a != b) & (a >= 0) & (b >= 0)
            if differ.any() and name in FACTORS:
                self._use("gate", 0, Source(rows=a[differ]))
                self._use("gate", 1, Source(rows=b[differ]))
                return None
            if differ.any():
                self.sums.append(torch.stack((a[differ], b[differ])).unique(dim=1))
            rows = torch.where(a < 0, b, a).expand(shape)
        return rows

    def _units_met(self, name: str, known: Any, labelled: Any, shape: torch.Size, rest: Source) -> Source:
        """Return the source of elementwise results; units of several layers that meet are noted, and followed as one."""

        def rank(entry: tuple[Tensor, Source]) -> tuple[bool, bool, int]:
            """Active units come first, then those of a tensor that is not broadcast, then those of the later product."""
            groups = [self.groups[number] for number in self.groups_in(entry[1])]
            active = any(group.active for group in groups)
            return (
                active,
                entry[0].numel() == shape.numel(),
                max((group.place for group in groups), default=-1),
            )

        chosen = max(labelled, key=rank)[1]
        units, groups, places = chosen.units.expand(shape), self.groups_in(chosen), self.places(chosen)
        gates, norms = chosen.gates, chosen.norms
        for tensor, other in known:
            if other.units is None:
                if not other.discrete and not {self.groups[number].place for number in other.lost} & places:
                    self._trouble(places, "is mixed with the input")
            elif other is not chosen:
                theirs, others = other.units.expand(shape), self.places(other)
                gates, norms = gates | other.gates, norms | other.norms
                aligned = tensor.shape == shape and _same_units(theirs, units)
                if others != places and name == "mul" and aligned:
                    gates |= others - places
                elif others != places or (self.groups_in(other) != groups and not aligned):
                    done = "multiplied by" if name == "mul" else "added to"
                    self._trouble(others | places, f"is {done} another layer")
                if (core(units) < 0).any():
                    units = compact(torch.where(units < 0, theirs, units))
        return replace(rest, units=units, lost=chosen.lost, gates=gates, norms=norms)

    def _new_group(self, place: int, active: bool) -> int:
        self.groups.append(Group(place, active))
        return len(self.groups) - 1

    def _activated(self, source: Source) -> Source:
        """Give new labels to the units that are not active yet."""
        units: Any = source.units
        for number in self.groups_in(source):
            if not self.groups[number].active:
                new = self._new_group(self.groups[number].place, active=True)
                small = core(units)
                units = torch.where(small >> 32 == number, small + (new - number << 32), small).expand(
                    units.shape
                )
        return replace(source, units=units)

    def _other(
        self,
        function: Any,
        name: str,
        args: Any,
        kwargs: Any,
        known: list[tuple[Tensor, Source]],
        result: Any,
    ) -> None:
        """Follow labels through an operation that is neither elementwise nor a view."""
        outputs, joined = _tensors(result), _joined(known)
        if not outputs:  # a number
            return
        moved = [self._moved(function, name, args, kwargs, outputs, kind) for kind in ("units", "rows")]
        statistic = "pool" not in name and outputs[0].numel() < max(x.numel() for x, _ in known)
        decision = not (outputs[0].is_floating_point() or outputs[0].is_complex())
        if _is_mixed(moved[1][0]) and not (statistic or decision or joined.is_weight):
            for _, source in known:
                self._lose(name, source.rows)
        first = next((source for _, source in known if source.units is not None), Source())
        groups = set().union(*(self.groups_in(source) for _, source in known))
        lost = joined.lost | {number: joined.lost.get(number, name) for number in groups}
        idle = [number for number in groups if not self.groups[number].active]
        if idle and _is_mixed(moved[0][0]) and not self._is_affine(function, args, kwargs, whole=True):
            lost |= dict.fromkeys(self.groups_in(self._activated(first)), name)
        gates, norms = (frozenset().union(*(getattr(s, of) for _, s in known)) for of in ("gates", "norms"))
        for output, units, rows in zip(outputs, *moved, strict=True):
            source = replace(joined, units=units, rows=rows, lost=lost, gates=gates, norms=norms)
            if units is None or not (core(units) >= 0).any():
                source = replace(source, units=None, gates=frozenset(), norms=frozenset())
            else:
                source = source if _is_mixed(units) else replace(source, lost={})
                source = self._activated(source) if name == "glu" or "softmax" in name else source
            self._sources[output] = source

    def _moved(
        self, function: Any, name: str, args: Any, kwargs: Any, outputs: list[Tensor], kind: str
    ) -> list[Tensor | None]:
        """Return the labels of the results: run the operation on numbers r and s of the labels, and look up the ratio r/s.

        r rises and s falls with a random number u of each label, so the ratio is that of one label where an entry is a
        sum, mean or maximum of entries of one unit, and of no label, but for a chance of 1e-10 for each, elsewhere.
        """
        nothing: list[Tensor | None] = [None] * len(outputs)
        present = [s for _, s in self.sources((args, kwargs)) if getattr(s, kind) is not None]
        if not present:
            return nothing
        first: Tensor = getattr(present[0], kind)
        if name == "glu":
            parts = first.chunk(2, args[1] if len(args) > 1 else -1)
            for factor, half in enumerate(parts if kind == "rows" else ()):
                self._use("gate", factor, Source(rows=half))
            return [compact(parts[0])]
        if any(word in name for word in ("norm", "softmax", "dropout")) and outputs[0].shape == first.shape:
            return [first, *nothing[1:]]
        if function._schema.is_mutable:  # running it again must not write
            return nothing
        labels = torch.cat(
            [first.new_tensor([MIXED, OUTSIDE]), *(core(getattr(s, kind)).flatten() for s in present)]
        ).unique()
        draw = torch.Generator().manual_seed(0)
        u = torch.rand(len(labels), generator=draw, dtype=torch.float64).to(labels.device)

        def numbers(slope: float, start: float) -> Any:
            def of(leaf: Tensor) -> Tensor:
                if not leaf.is_floating_point():
                    return leaf
                source = self._sources.get(leaf) or Source()
                own = getattr(source, kind)
                if own is None:
                    own = labels.new_tensor(MIXED if source.lost and kind == "units" else OUTSIDE).expand(
                        leaf.shape
                    )
                return (start + slope * u[torch.searchsorted(labels, core(own).contiguous())]).expand(
                    leaf.shape
                )

            return tree_leaves(
                function(*tree_map_only(Tensor, of, args), **tree_map_only(Tensor, of, kwargs))
            )

        try:
            pairs = zip(numbers(1.0, 1.0), numbers(-1.0, 2.0), outputs, strict=True)
            return [_labels_of(r, s, u, labels) if r.is_floating_point() else None for r, s, _ in pairs]
        except (RuntimeError, TypeError, ValueError):
            return nothing

    def _is_affine(self, function: Any, args: Any, kwargs: Any, whole: bool = False) -> bool:
        """Return whether a function is affine in its arguments with units, jointly, at random points.

        An elementwise function is given 64 numbers for each argument, unless `whole`, and its answer is kept.
        """
        leaves = tree_leaves((args, kwargs))
        key = (function, *(self._kind(leaf) for leaf in leaves))
        if whole:
            return self._affine_at(function, args, kwargs, 1.0, whole)
        if key not in self._affine:
            self._affine[key] = all(
                self._affine_at(function, args, kwargs, scale, whole) for scale in (3.0, 30.0)
            )
        return self._affine[key]

    def _kind(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf if isinstance(leaf, int | float | bool | str | None) else str(leaf)
        source = self._sources.get(leaf)
        return "units" if source is not None and source.units is not None else "tensor"

    def _affine_at(self, function: Any, args: Any, kwargs: Any, scale: float, whole: bool) -> bool:
        draw = torch.Generator().manual_seed(0)
        sides: list[dict[int, Tensor]] = [{}, {}]
        for leaf in _tensors((args, kwargs)):
            for side in sides if self._kind(leaf) == "units" else ():
                size = leaf.shape if whole else (64,)
                side[id(leaf)] = scale * (2 * torch.rand(size, generator=draw, dtype=torch.float64) - 1)

        def at(share: float) -> Tensor:
            def of(leaf: Tensor) -> Tensor:
                if id(leaf) in sides[0]:
                    x = torch.lerp(sides[0][id(leaf)], sides[1][id(leaf)], share).to(leaf.device, copy=True)
                    return x > 0 if leaf.dtype == torch.bool else x
                if whole:
                    return leaf.double() if leaf.is_floating_point() else leaf
                one = leaf.flatten()[:1].to(torch.float64 if leaf.is_floating_point() else leaf.dtype)
                return one.expand(64).clone() if len(one) else one

            with torch.random.fork_rng(devices=[]):
                result = function(*tree_map_only(Tensor, of, args), **tree_map_only(Tensor, of, kwargs))
            return tree_leaves(result)[0].double()

        try:
            return not (whole and function._schema.is_mutable) and _close(
                at(0.5), (at(0.0) + at(1.0)) / 2, 5e-3
            )
        except (RuntimeError, TypeError, ValueError):  # it takes no such numbers
            return False

    def _trouble(self, places: set[int], why: str) -> None:
        for place in places:
            self.troubles.setdefault(place, why)

    def _use(self, kind: str, factor: int, source: Source, number: int | None = None) -> None:
        if source.rows is not None:
            number = self.operations if number is None else number
            self.uses.append(Use(kind, number, factor, core(source.rows).unique()))

    def _lose(self, name: str, rows: Tensor | None) -> None:
        for weight in () if rows is None else (core(rows) >> 32).unique().tolist():
            self.unclear[weight] = f"its rows cannot be followed through {name}"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _device(tensor: Tensor) -> torch.device:
    """Return the device of a tensor's labels."""
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _joined(known: list[tuple[Tensor, Source]]) -> Source:
    """Return the source, without labels, of what is computed from all of these."""
    sources = [source for _, source in known]
    return Source(
        lost={number: name for source in sources for number, name in source.lost.items()},
        weights=frozenset().union(*(source.weights for source in sources)),
        scores=next((source.scores for source in sources if source.scores is not None), None),
        discrete=all(source.discrete for source in sources),
        is_weight=all(source.is_weight for source in sources),
    )


def core(labels: Tensor) -> Tensor:
    """Return labels without the repetitions along expanded dimensions, which keep size 1."""
    return labels[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in labels.stride())]


def compact(labels: Tensor | None) -> Tensor | None:
    """Return labels with expanded dimensions wherever they do not depend on a dimension."""
    if labels is None:
        return None
    small = core(labels)
    for dim in range(small.ndim):
        if small.shape[dim] > 1 and (small == small.narrow(dim, 0, 1)).all():
            small = small.narrow(dim, 0, 1)
    return small.expand(labels.shape)


def constant(labels: Tensor, dims: list[int]) -> Tensor | None:
    """Return labels (sizes of `dims`) that do not depend on the other dimensions; None if they do."""
    small = core(labels)
    moved = small.movedim(dims, list(range(len(dims)))).flatten(len(dims))
    first = moved[..., :1]
    if not (moved == first).all():
        return None
    return first[..., 0].expand([labels.shape[dim] for dim in dims])


def _labels_of(rising: Tensor, falling: Tensor, u: Tensor, labels: Tensor) -> Tensor | None:
    ratio = rising / falling
    found = ((2 * ratio - 1) / (1 + ratio)).contiguous()  # (1 + u) / (2 - u) = ratio
    values, order = u.sort()
    above = torch.searchsorted(values, found).clamp_max(len(u) - 1)
    below = (above - 1).clamp_min(0)
    near = torch.where((values[above] - found).abs() < (values[below] - found).abs(), above, below)
    known = labels[order[near]].where((values[near] - found).abs() < 1e-10, MIXED)
    return compact(known.where((rising != 0) | (falling != 0), OUTSIDE))  # padding


def _is_mixed(labels: Tensor | None) -> bool:
    return labels is None or bool((core(labels) == MIXED).any())


def _same_units(labels: Tensor, others: Tensor) -> bool:
    """Return whether labels differ by a constant, as those of two layers or branches with the same units do."""
    a, b = core(labels), core(others)
    return a.shape == b.shape and bool((a - a.min() == b - b.min()).all())


def _close(values: Tensor, others: Tensor, share: float) -> bool:
    """Return whether two tensors agree up to a share of the largest finite value."""
    size = others.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return bool(torch.allclose(values, others, rtol=0.0, atol=share * float(size), equal_nan=True))


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
