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
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fire_core.passes import call
from fire_core.targets.labels import (
    MIXED,
    OUTSIDE,
    compact,
    constant,
    core,
    counted_from,
    is_mixed,
    same_units,
    through_any,
    through_view,
)
from fire_core.targets.layers import channel_dims, is_layer, is_norm
from fire_core.targets.operations import Operation, is_affine, tensors_in
from fire_core.targets.record import Group, Known, Product, Read, Record, Source, combined

WITH_ADDEND = {"addmm", "baddbmm", "addmv"}
PRODUCTS = {"mm", "bmm", "mv", "dot", "convolution", *WITH_ADDEND}
LOOK_UPS = {"embedding", "_embedding_bag"}
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
SUMS = {"sum", "mean", "cumsum"}
FACTORS = {"mul", "div", "addcmul", "addcdiv"}


class Trace(Record, TorchDispatchMode):
    """Context that follows the units of what depends on the input, and the rows of `weights`, without gradients.

    Args:
        on_read: called with each tensor that a product reads, its source, and the name of the reading module, if any.
    """

    def __init__(
        self,
        on_read: Callable[[Tensor, Source, str | None], None] = lambda tensor, source, module: None,
        weights: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(weights)
        self.on_read = on_read
        self._running: list[str] = []
        self._latest: nn.Module | None = None
        self._affine: dict[Any, bool] = {}

    def run(self, net: nn.Module, inputs: Any) -> Any:
        """Run `inputs` through `net` in its present mode and return the output."""
        inputs = tree_map_only(Tensor, Tensor.detach, inputs)
        for leaf in tensors_in(inputs):
            self._sources[leaf] = Source(discrete=not leaf.is_floating_point())
        with ExitStack() as hooks:
            for name, module in net.named_modules():
                for handle in self._watch(name, module):
                    hooks.callback(handle.remove)
            with torch.no_grad(), self:
                return call(net, inputs)

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        has_weight = any(p is not None and p.ndim > 1 for p in module._parameters.values())
        layer, norm = is_layer(module), is_norm(module)

        def enter(module: nn.Module, arguments: Any) -> None:
            self._latest = module if has_weight else self._latest
            if layer:
                self._running.append(name)

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            if layer:
                self._running.pop()
            for leaf, source in self.sources(output) if norm else ():
                channels = constant(source.units, channel_dims(module, leaf))
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
        elif name.startswith(ATTENTION):
            self._attend(operation, known, result)
        elif all(source.units is None and source.rows is None for _, source in known):
            self._set(result, combined(known))
        elif operation.is_view:
            self._view(operation, result)
        elif operation.is_elementwise:
            self._elementwise(operation, known, result)
        elif outputs := tensors_in(result):
            self._other(operation, known, outputs)
        if name == "copy" and known and result._is_view():
            self._write_part(result._base, result)
        return result

    def _set(self, result: Any, source: Source) -> None:
        for leaf in tensors_in(result):
            self._sources[leaf] = source

    def _write_part(self, whole: Tensor, part: Tensor) -> None:
        """Note that `part`, a view of `whole`, was written: what is in `whole` is not followed any more."""
        written = self.sources((whole, part))
        for _, source in written:
            self._lose("a write into a part", source.rows)
        lost = {n: "a write into a part" for _, source in written for n in self.groups_in(source)}
        joined = combined(written)
        self._sources[whole] = replace(joined, lost=lost | joined.lost)

    def _read(self, operation: str, tensor: Tensor, source: Source, module: str | None, columns: Any) -> None:
        self.reads.append(Read(module, operation, source, columns))
        self.on_read(tensor, source, module)

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
            self._read(name, tensor, source, reader, constant(source.units, along(tensor)))
            scores = next((s.scores for _, s in reads if s is not source and s.scores is not None), None)
            if weight is None:
                self._use("product" if scores is None else "values", factor, source.rows, scores)
        if len(reads) == 2 or not result.ndim:
            self._set(result, Source(weights=heard, scores=self._operations))
            return
        shape = [1] * result.ndim
        for dim in along(result):
            shape[dim] = result.shape[dim]
        number = len(self.groups)
        self.groups.append(Group(len(self.products), active=False))
        self.products.append(Product(module, self._latest, prod(shape)))
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
        units = counted_from(number << 32, prod(shape), result).view(shape).expand(result.shape)
        self._set(result, Source(units, rows, weights=weights))

    def _attend(self, operation: Operation, known: Known, result: Any) -> None:
        """Note what attention reads."""
        for tensor, source in known:
            self._read(operation.name, tensor, source, None, None)
        for factor, tensor in enumerate(operation.args[:3]):
            self._use("attention", factor, self._sources.get(tensor, Source()).rows)
        self._set(result, Source(weights=combined(known).weights))

    def _view(self, operation: Operation, result: Any) -> None:
        source, parts = self._sources[operation.args[0]], tensors_in(result)
        try:
            labels = [through_view(operation, own, parts) for own in (source.units, source.rows)]
            for part, units, rows in zip(parts, *labels, strict=True):
                self._sources[part] = replace(source, units=units, rows=rows)
        except RuntimeError:  # a view of complex numbers, or by strides
            self._lose(operation.name, source.rows)
            lost = dict.fromkeys(self.groups_in(source), operation.name) | source.lost
            self._set(result, replace(source, units=None, rows=None, lost=lost, gates=frozenset()))

    def _elementwise(self, operation: Operation, known: Known, result: Any) -> None:
        shape = tensors_in(result)[0].shape
        source = replace(combined(known), rows=self._rows_met(operation.name, known, shape))
        if any(each.units is not None for _, each in known):
            source = self._units_met(operation.name, known, shape, source)
            if not self._is_affine(operation):
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
                pairs = (a[differ] << 32 | b[differ]).unique()  # much faster than of two columns
                self.sums.append(torch.stack((pairs >> 32, pairs & 2**32 - 1)))
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
                aligned = tensor.shape == shape and same_units(theirs, units)
                if others != places and name == "mul" and aligned:
                    gates |= others - places
                elif others != places or (their_groups != groups and not aligned):
                    done = "multiplied by" if name == "mul" else "added to"
                    self._trouble(others | places, f"is {done} another layer")
                if (core(units) < 0).any():
                    units = compact(torch.where(units < 0, theirs, units))
        return replace(rest, units=units, lost=chosen.lost, gates=gates)

    def _other(self, operation: Operation, known: Known, outputs: list[Tensor]) -> None:
        """Follow labels through an operation that is neither elementwise nor a view."""
        name, joined = operation.name, combined(known)
        if not joined.is_weight and len(self.sources((operation.args, operation.kwargs))) > len(known):
            self.heard |= joined.weights  # a recurrent layer
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
        """Return the labels of the results, of `kind` "units" or "rows"."""
        function, name, args, _ = operation
        nothing: list[Tensor | None] = [None] * len(outputs)
        present = [own for _, s in self.sources(operation.inputs) if (own := getattr(s, kind)) is not None]
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

        def labels_of(leaf: Tensor) -> Tensor:
            source = self._sources.get(leaf, Source())
            own = getattr(source, kind)
            missing = MIXED if kind == "units" and source.lost else OUTSIDE
            return present[0].new_tensor(missing).expand(leaf.shape) if own is None else own

        return through_any(operation, outputs, labels_of)

    def _is_affine(self, operation: Operation) -> bool:
        def varies(leaf: Tensor) -> bool:
            return self._sources.get(leaf, Source()).units is not None

        # what decides: the function, the constants among its arguments, and which tensors vary
        text = str(tree_map_only(Tensor, varies, (operation.args, operation.kwargs)))
        if (key := (operation.function, text)) not in self._affine:
            self._affine[key] = is_affine(operation, varies)
        return self._affine[key]
