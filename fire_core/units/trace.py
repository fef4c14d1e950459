"""Follows the units of a net: the outputs of its layers. Units that a function reads which is not affine become *active*."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fire_core.targets.architectures import NORMS
from fire_core.targets.labels import compact, constant, core, numbered, same_members
from fire_core.targets.trace import COPIES, WITH_ADDEND, Known, Operation, Product, Source, Trace, combined

SUMS = {"sum", "mean", "cumsum"}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_layer(module: Any) -> bool:
    """Return whether a module is a Linear, a convolution, or a stack of Linear layers."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) or (is_stack(module) and module.weight.ndim == 3)


def is_stack(module: Any) -> bool:
    """Return whether a module is declared as a stack of Linear layers (stack, out, in)."""
    return getattr(module, "stacked_matrices", False) is True


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is one of torch's norms, or declared as one (`is_norm = True`)."""
    return isinstance(module, NORMS) or getattr(module, "is_norm", False)


def has_matrix(module: nn.Module) -> bool:
    return any(p is not None and p.ndim > 1 for p in module._parameters.values())


def channel_dims(norm: Any, output: Tensor) -> list[int]:
    """Return the dimensions of the channels of a norm."""
    declared = getattr(norm, "is_norm", False)
    if declared and norm.weight.ndim == 2:
        return [0, output.ndim - 1]
    return [output.ndim - 1] if declared or isinstance(norm, nn.LayerNorm | nn.RMSNorm) else [1]


class Group(NamedTuple):
    """Units of one product, as computed, or active after one of the functions that read them; place: of the product."""

    place: int
    active: bool


class Layer(NamedTuple):
    """What computes units. module: name of its Linear, convolution or stack, if any. owner: latest module with weights."""

    module: str | None
    owner: nn.Module | None
    units: int


class UnitTrace(Trace):
    """Follows the units of what depends on the input.

    Attributes:
        groups, layers: in order of execution; the place of a layer is its number in `layers`. troubles: place -> why its
            units have no owner. channels: norm -> labels of its channels.

    on_read: called with each tensor that a product reads, its source, the name of the reading module, if any, the operation,
        and the label of each input of the module, None if they differ between samples.
    """

    def __init__(self, on_read: Callable[[Tensor, Source, str | None, str, Tensor | None], None]) -> None:
        super().__init__()
        self.on_read = on_read
        self.groups: list[Group] = []
        self.layers: list[Layer] = []
        self.troubles: dict[int, str] = {}
        self.channels: dict[str, Tensor] = {}
        self._running: list[str] = []
        self._latest: nn.Module | None = None
        self._affine: dict[Any, bool] = {}

    def run(self, net: nn.Module, inputs: Any) -> Any:
        with ExitStack() as hooks:
            for name, module in net.named_modules():
                if is_layer(module) or is_norm(module) or has_matrix(module):
                    hooks.callback(module.register_forward_pre_hook(partial(self._enter, name)).remove)
                    hooks.callback(module.register_forward_hook(partial(self._leave, name)).remove)
            return super().run(net, inputs)

    def _enter(self, name: str, module: nn.Module, arguments: Any) -> None:
        self._latest = module if has_matrix(module) else self._latest
        if is_layer(module):
            self._running.append(name)

    def _leave(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if is_layer(module):
            self._running.pop()
        for leaf, source in self.sources(output) if is_norm(module) else ():
            channels = constant(source.labels, channel_dims(module, leaf))
            if channels is not None:
                self.channels[name] = channels.flatten()

    def places(self, groups: Iterable[int]) -> set[int]:
        """Return the places of the layers whose units are in some groups."""
        return {self.groups[number].place for number in groups}

    def product(self, product: Product, result: Tensor) -> Source:
        reads = product.reads
        if product.name in WITH_ADDEND and (added := self._sources.get(product.args[0])) is not None:
            self._trouble(self.places(self.groups_in(added)), "is added to another layer")
        module = self._running[-1] if self._running else None
        for factor, source in reads:
            tensor = product.operands[factor]
            columns = constant(source.labels, product.along(tensor))
            self.on_read(tensor, source, module if len(reads) == 1 else None, product.name, columns)
        if len(reads) == 2 or not result.ndim:
            return Source()
        sizes = product.sizes(result)
        self.groups.append(Group(len(self.layers), active=False))
        self.layers.append(Layer(module, self._latest, prod(sizes)))
        return Source(numbered(len(self.groups) - 1, sizes, result).expand(result.shape))

    def attention(self, operation: Operation, known: Known) -> Source:
        for tensor, source in known:
            self.on_read(tensor, source, None, operation.name, None)
        return Source()

    def elementwise(self, operation: Operation, known: Known, shape: torch.Size) -> Source:
        """Units of several layers that meet are noted, and followed as one."""

        def rank(entry: tuple[Tensor, Source]) -> tuple[bool, bool, int]:
            """Active units come first, then those of a tensor that is not broadcast, then those of the later layer."""
            groups = [self.groups[number] for number in self.groups_in(entry[1])]
            whole = entry[0].numel() == shape.numel()
            return any(g.active for g in groups), whole, max((g.place for g in groups), default=-1)

        chosen: Any = max([each for each in known if each[1].labels is not None], key=rank)[1]
        units, groups, gates = chosen.labels.expand(shape), self.groups_in(chosen), chosen.gates
        places, multiplied = self.places(groups), operation.name == "mul"
        for tensor, other in known:
            if other.labels is None:
                if not other.discrete and not self.places(other.lost) & places:
                    self._trouble(places, "is mixed with the input")
            elif other is not chosen:
                theirs, others = other.labels.expand(shape), self.places(self.groups_in(other))
                aligned = tensor.shape == shape and same_members(theirs, units)
                gates |= other.gates
                if others != places and multiplied and aligned:
                    gates |= others - places
                elif others != places or (self.groups_in(other) != groups and not aligned):
                    done = "multiplied by" if multiplied else "added to"
                    self._trouble(others | places, f"is {done} another layer")
                if (core(units) < 0).any():
                    units = compact(torch.where(units < 0, theirs, units))
        source = replace(combined(known), labels=units, lost=chosen.lost, gates=gates)
        return source if self._is_affine(operation) else self._activated(source)

    def other(self, operation: Operation, known: Known, output: Tensor, mixes: bool) -> Source:
        groups = {number: source for _, source in known for number in self.groups_in(source)}
        lost = [*groups]
        idle = [source for number, source in groups.items() if not self.groups[number].active]
        if idle and mixes and operation.name not in SUMS:
            lost += self.groups_in(self._activated(idle[0]))
        joined = combined(known)
        return replace(joined, lost=dict.fromkeys(lost, operation.name) | joined.lost)

    def _other(self, operation: Operation, known: Known, outputs: list[Tensor]) -> None:
        super()._other(operation, known, outputs)
        for output in outputs if operation.name == "glu" or "softmax" in operation.name else ():
            self._sources[output] = self._activated(self._sources[output])

    def lose(self, why: str, known: Known) -> Source:
        joined, lost = combined(known), [n for _, source in known for n in self.groups_in(source)]
        return replace(joined, lost=dict.fromkeys(lost, why) | joined.lost, gates=frozenset())

    def _trouble(self, places: set[int], why: str) -> None:
        for place in places:
            self.troubles.setdefault(place, why)

    def _activated(self, source: Source) -> Source:
        """Give new labels to the units that are not active yet."""
        units: Any = source.labels
        for number in self.groups_in(source):
            if not self.groups[number].active:
                self.groups.append(Group(self.groups[number].place, active=True))
                small, step = core(units), len(self.groups) - 1 - number << 32
                units = torch.where(small >> 32 == number, small + step, small).expand(units.shape)
        return replace(source, labels=units)

    def _is_affine(self, operation: Operation) -> bool:
        def varies(leaf: Tensor) -> bool:
            return self._sources.get(leaf, Source()).labels is not None

        # what decides: the function, the constants among its arguments, and which tensors vary
        text = str(tree_map_only(Tensor, varies, (operation.args, operation.kwargs)))
        if (key := (operation.function, text)) not in self._affine:
            varying = [leaf for leaf in operation.inputs if varies(leaf)]
            self._affine[key] = operation.name in COPIES or is_affine(operation, varying)
        return self._affine[key]


def is_affine(operation: Operation, varying: list[Tensor]) -> bool:
    """Return whether an elementwise function is affine in the tensors that vary, jointly, at 64 points of two scales."""
    draw = torch.Generator().manual_seed(0)
    double: Any = {"dtype": torch.float64, "device": "cpu"}
    scales = torch.tensor([[3.0], [30.0]], **double)
    points = [2 * torch.rand(2, 2, 64, generator=draw, **double) - 1 for _ in varying]
    ends = {id(leaf): scales * each for leaf, each in zip(varying, points, strict=True)}

    def at(share: float) -> Tensor:
        def of(leaf: Tensor) -> Tensor:
            if id(leaf) in ends:
                start, end = ends[id(leaf)]
                x = torch.lerp(start, end, share).to(leaf.device)
                return x > 0 if leaf.dtype == torch.bool else x
            leaf = leaf.double() if leaf.is_floating_point() else leaf
            return leaf.flatten()[:1].expand(2, 64).clone() if leaf.numel() else leaf

        with torch.random.fork_rng(devices=[]):
            return operation.again(of)[0].double()

    try:
        middle, mean = at(0.5), (at(0.0) + at(1.0)) / 2
        largest = mean.nan_to_num(0.0, 0.0, 0.0).abs().amax(dim=1).tolist()
        triples = zip(middle, mean, largest, strict=True)
        return all(torch.allclose(a, b, rtol=0.0, atol=5e-3 * top, equal_nan=True) for a, b, top in triples)
    except (RuntimeError, TypeError, ValueError):  # it takes no such numbers
        return False
