"""Hidden units of a net, with the layers that compute them and the layers that read them, found in one forward pass.

The output channels of a layer are units if no operation mixes them on the way to each of their readers. Two layers whose
outputs are multiplied (gated MLPs, SwiGLU) share their units. Layers are left out, with a reason, if they are added to
others (residual stream), go through attention, run twice, or are the output layer.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fire_core.passes import in_mode
from fire_core.targets.labels import is_mixed
from fire_core.targets.trace import Source
from fire_core.units.trace import CONVOLUTIONS, UnitTrace, is_stack


@dataclass(frozen=True)
class UnitLayer:
    """One hidden layer; modules are given by name.

    name: the first of `incoming`. units: number of units; of a stack of Linear layers, those of all members. incoming:
    modules whose output channels are the units (two if gated). norms: norm modules between them and the readers. outgoing:
    (reading module, input columns per unit); a unit has more than one column where a convolution is flattened.

    columns: for readers and norms in which the columns of the first unit do not come first, then those of the second,
    and so on: module -> (units, columns per unit), int64. Members of a stack have their columns one after the other.
    """

    name: str
    units: int
    incoming: tuple[str, ...]
    norms: tuple[str, ...]
    outgoing: tuple[tuple[str, int], ...]
    columns: dict[str, Tensor] = field(default_factory=dict, compare=False)

    def columns_in(self, module: str) -> Tensor:
        """Return the columns of each unit in a reader, or its channels in a norm, (units, columns), int64."""
        if module in self.columns:
            return self.columns[module]
        each = dict(self.outgoing).get(module, 1)
        return torch.arange(self.units * each, device="cpu").view(self.units, each)

    def samples(self, activations: Tensor, name: str, reader: nn.Module) -> Tensor:
        """Return a reader's input as (samples, units); positions and the several columns of a unit count as samples."""
        dims = [1] if isinstance(reader, CONVOLUTIONS) else [0, -1] if is_stack(reader) else [-1]
        columns = activations.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))
        if name in self.columns:
            by_unit = columns[..., self.columns[name].to(columns.device)]
        else:
            by_unit = columns.unflatten(-1, (self.units, -1))
        return by_unit.mT.reshape(-1, self.units)


@dataclass(frozen=True)
class Entries:
    """The entries of one parameter, or of a tensor of its shape such as its gradient, that belong to each unit.

    name: of the parameter. parameter: the parameter itself. dims: its dimensions of units: of rows or columns, after that of
    the members of a stack. places: of each unit along these, (units,) or (units, columns); their shape if in order.
    """

    name: str
    parameter: Tensor
    dims: tuple[int, ...]
    places: Tensor | tuple[int, ...]

    def read(self, tensor: Tensor | None = None, chosen: Any = slice(None)) -> Tensor:
        """Return the entries of the units `chosen` (default: all) in the parameter, or in a tensor of the same shape.

        Incoming weights are (units, in, ...), biases and gains (units,), outgoing weights (units, columns, out, ...). The
        result may be a view: to change the parameter, use `write`.
        """
        return self._by_unit(tensor)[self.place(chosen)]

    def write(self, values: Any, tensor: Tensor | None = None, chosen: Any = slice(None)) -> None:
        """Set these entries, in place, to `values`: a number, or a tensor of the shape that `read` returns."""
        by_unit = self._by_unit(tensor)
        with torch.no_grad():
            by_unit[self.place(chosen)] = values.to(by_unit) if isinstance(values, Tensor) else values

    def place(self, chosen: Any) -> tuple[Any, ...]:
        """Return the index of the units `chosen`: along units if they are in order, else along each of `dims`."""
        if isinstance(self.places, tuple):
            return (chosen,)
        size = self.parameter.shape[self.dims[-1]]
        return (self.places[chosen] // size, self.places[chosen] % size)[-len(self.dims) :]

    def _by_unit(self, tensor: Tensor | None) -> Tensor:
        whole = self.parameter.detach() if tensor is None else tensor
        moved = whole.movedim(self.dims, tuple(range(len(self.dims))))
        return moved.unflatten(0, self.places) if isinstance(self.places, tuple) else moved


def incoming(net: nn.Module, layer: UnitLayer) -> list[Entries]:
    """Return the weights (units, in, ...) and biases (units,) that compute a layer's units."""
    found = []
    for name in layer.incoming:
        module = net.get_submodule(name)
        members = torch.arange(layer.units, device="cpu")
        rows = ((0, 1), members) if is_stack(module) else ((0,), (layer.units,))
        for kind, parameter in module.named_parameters(recurse=False):
            found.append(Entries(f"{name}.{kind}".lstrip("."), parameter, *rows))
    return found


def outgoing(net: nn.Module, layer: UnitLayer) -> list[Entries]:
    """Return the weights (units, columns, out, ...) that read a layer's units, one for each of `layer.outgoing`."""
    found = []
    for name, _ in layer.outgoing:
        module: Any = net.get_submodule(name)
        stacked = is_stack(module)
        in_order = not stacked and name not in layer.columns
        places = (layer.units, -1) if in_order else layer.columns_in(name)
        entries = Entries(f"{name}.weight".lstrip("."), module.weight, (0, 2) if stacked else (1,), places)
        found.append(entries)
    return found


class Recorder:
    """Hooks that record the activations of unit layers in forward passes, until `remove`.

    Args:
        reduce: function of the activations (samples, units) of one layer, as its first reader receives them.
        always: True: record every pass and keep its graph. False: only training passes with gradients, detached.
    Attributes:
        values: result of `reduce` in the latest recorded pass, by name of the layer.
    """

    def __init__(
        self,
        net: nn.Module,
        layers: Iterable[UnitLayer],
        reduce: Callable[[Tensor], Tensor],
        *,
        always: bool = False,
    ) -> None:
        self.values: dict[str, Tensor] = {}
        self.net = net
        self._handles = [self._record(layer, reduce, always) for layer in layers]

    def _record(self, layer: UnitLayer, reduce: Callable[[Tensor], Tensor], always: bool) -> RemovableHandle:
        name = layer.outgoing[0][0]
        reader = self.net.get_submodule(name)

        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if module is reader and (always or (module.training and torch.is_grad_enabled())):
                read = arguments[0] if arguments else keywords["input"]
                with torch.set_grad_enabled(always and torch.is_grad_enabled()):
                    units = layer.samples(read if always else read.detach(), name, module)
                    self.values[layer.name] = reduce(units)

        return reader.register_forward_pre_hook(hook, with_kwargs=True)  # a copy of the net has the hook, too

    def remove(self) -> None:
        """Remove the hooks; `values` stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def find_unit_layers(net: nn.Module, inputs: Any) -> tuple[list[UnitLayer], dict[str, str]]:
    """Return the hidden layers of `net` in forward order, and the reason why each other layer is left out.

    The layers are the Linear and convolution modules, and stacks of Linear layers (`stacked_matrices = True`), that run in
    one forward pass of `inputs` in evaluation mode; those that do not run are in neither result. Mode and requires_grad are
    restored and hooks removed. Weights and gradients are not changed.

    Args:
        inputs: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
    Returns: a list of UnitLayer, and a dict from module names to reasons.
    """
    reads: list[tuple[Source, str | None, str, Tensor | None]] = []
    trace = UnitTrace(lambda tensor, *read: reads.append(read))
    with in_mode(net, training=False):
        output = trace.run(net, inputs)
    modules = [layer.module for layer in trace.layers]
    reasons = {name: f"runs {n} times" for name, n in Counter(modules).items() if name and n > 1}

    def leave_out(places: Iterable[int], why: str) -> None:
        for place in places:
            if name := modules[place]:
                reasons.setdefault(name, why)

    for _, source in trace.sources(output):
        leave_out(trace.places({*source.lost, *trace.groups_in(source)}) | source.gates, "feeds the output")
    for place, why in trace.troubles.items():
        leave_out([place], why)
    found: dict[frozenset[int], tuple[int, dict[str, Tensor]]] = {}  # gated layers -> one, columns by reader
    several = Counter(reader for reader, _ in {(r, frozenset(trace.groups_in(s))) for s, r, *_ in reads})
    for source, reader, reading, labels in reads:
        for number, operation in source.lost.items() if is_mixed(source.labels) else ():
            leave_out(trace.places([number]), f"goes through {operation}")
        places = trace.places(trace.groups_in(source))
        if reader is None or several[reader] > 1:
            through = f"{reader}, which runs several times" if reader else reading
            leave_out(places | source.gates, f"goes through {through}")
            continue
        grouped = getattr(net.get_submodule(reader), "groups", 1) > 1
        for place in (place for place in places if modules[place]):
            group = frozenset({place} | source.gates)
            columns = None if grouped else _columns(trace, place, labels)
            if columns is None:
                leave_out(group, f"does not fit the inputs of {reader}")
            else:
                known = found.setdefault(group, (place, {}))[1].setdefault(reader, columns)
                if not torch.equal(known, columns):
                    leave_out(group, f"goes through {reader} in two orders")
    for place in range(len(modules)):
        count = sum(place in group for group in found)
        if count != 1:
            leave_out([place], "is read alone and gated" if count else "is read by no layer")
    layers, widths = [], {r: labels.numel() for _, r, _, labels in reads if labels is not None}
    widths |= {norm: labels.numel() for norm, labels in trace.channels.items() if labels is not None}
    for group, (place, readers) in found.items():
        names = tuple(str(modules[each]) for each in sorted(group))
        if set(names) & reasons.keys():
            continue
        channels = {norm: _columns(trace, place, labels) for norm, labels in trace.channels.items()}
        norms = {norm: each for norm, each in channels.items() if each is not None and each.shape[1] == 1}
        orders = {
            name: each
            for name, each in (readers | norms).items()
            if not torch.equal(each.flatten(), torch.arange(widths[name], device="cpu"))
        }
        outgoing = tuple((reader, each.shape[1]) for reader, each in readers.items())
        units = trace.layers[place].units
        layers.append(UnitLayer(names[0], units, names, tuple(sorted(norms)), outgoing, orders))
    return sorted(layers, key=lambda layer: modules.index(layer.name)), reasons


def _columns(trace: UnitTrace, place: int, labels: Tensor | None) -> Tensor | None:
    """Return where the labels of one product's units are, (units, columns); None if not every unit has as many."""
    if labels is None:
        return None
    labels, own = labels.flatten().cpu(), [n for n, group in enumerate(trace.groups) if group.place == place]
    found = torch.isin(labels >> 32, torch.tensor(own, device="cpu")).nonzero().flatten()
    unit = labels[found] & (2**32 - 1)
    counts = unit.bincount(minlength=trace.layers[place].units)
    if not len(found) or counts.min() != counts.max():
        return None
    return found[unit.argsort(stable=True)].view(len(counts), -1)
