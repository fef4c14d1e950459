"""Hidden units of a net, with the layers that compute them and the layers that read them, found in one forward pass.

The output channels of a layer are units if no operation mixes them on the way to each of their readers. Two layers whose
outputs are multiplied (gated MLPs, SwiGLU) share their units. Layers are left out, with a reason, if they are added to
others (residual stream), go through attention, run twice, or are the output layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fire_core.passes import in_mode
from fire_core.targets.labels import is_mixed
from fire_core.units.trace import UnitTrace


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
        return torch.arange(self.units * each).view(self.units, each)


@dataclass(frozen=True)
class Entries:
    """The entries of one parameter, or of a tensor of its shape such as its gradient, that belong to each unit.

    name: of the parameter. parameter: the parameter itself. index: place of each unit, empty if units are in order.
    columns: whether units are columns of the weight, not rows.
    """

    name: str
    parameter: Tensor
    units: int
    index: tuple[Tensor, ...] = ()
    columns: bool = False

    def read(self, tensor: Tensor | None = None, chosen: Any = slice(None)) -> Tensor:
        """Return the entries of the units `chosen` (default: all) in the parameter, or in a tensor of the same shape.

        Incoming weights are (units, in, ...), biases and gains (units,), outgoing weights (units, columns, out, ...). The
        result may be a view: to change the parameter, use `write`.
        """
        return self._by_unit(tensor)[self._place(chosen)]

    def write(self, values: Any, tensor: Tensor | None = None, chosen: Any = slice(None)) -> None:
        """Set these entries, in place, to `values`: a number, or a tensor of the shape that `read` returns."""
        by_unit = self._by_unit(tensor)
        with torch.no_grad():
            by_unit[self._place(chosen)] = values.to(by_unit) if isinstance(values, Tensor) else values

    def _by_unit(self, tensor: Tensor | None) -> Tensor:
        whole = self.parameter.detach() if tensor is None else tensor
        if self.columns:
            whole = whole.transpose(*([1, 2] if len(self.index) > 1 else [0, 1]))
        return whole if self.index or not self.columns else whole.unflatten(0, (self.units, -1))

    def _place(self, chosen: Any) -> Any:
        return tuple(part[chosen] for part in self.index) or (chosen,)


def incoming(net: nn.Module, layer: UnitLayer) -> list[Entries]:
    """Return the weights (units, in, ...) and biases (units,) that compute a layer's units."""
    found = []
    for name in layer.incoming:
        module = net.get_submodule(name)
        index = _members(module, torch.arange(layer.units), 0)
        for kind, parameter in module.named_parameters(recurse=False):
            found.append(Entries(f"{name}.{kind}".lstrip("."), parameter, layer.units, index))
    return found


def outgoing(net: nn.Module, layer: UnitLayer) -> list[Entries]:
    """Return the weights (units, columns, out, ...) that read a layer's units, one for each of `layer.outgoing`."""
    found = []
    for name, _ in layer.outgoing:
        module: Any = net.get_submodule(name)
        columns = layer.columns_in(name)
        index = _members(module, columns, 1) or ((columns,) if name in layer.columns else ())
        found.append(Entries(f"{name}.weight".lstrip("."), module.weight, layer.units, index, columns=True))
    return found


def _members(module: Any, places: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Return members of a stack (stack, out, in), and rows (dim 0) or columns (dim 1) in each; () if it is no stack."""
    if getattr(module, "stacked_matrices", False) is not True:
        return ()
    size = module.weight.shape[1 + dim]
    return places // size, places % size


def find_unit_layers(net: nn.Module, inputs: Any) -> tuple[list[UnitLayer], dict[str, str]]:
    """Return the hidden layers of `net` in forward order, and the reason why each other layer is left out.

    The layers are the Linear and convolution modules, and stacks of Linear layers (`stacked_matrices = True`), that run in
    one forward pass of `inputs` in evaluation mode; those that do not run are in neither result. Mode and requires_grad are
    restored and hooks removed. Weights and gradients are not changed.

    Args:
        inputs: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
    Returns: a list of UnitLayer, and a dict from module names to reasons.
    """
    trace = UnitTrace()
    with in_mode(net, training=False):
        output = trace.run(net, inputs)
    modules = [layer.module for layer in trace.layers]
    reasons = {name: f"runs {n} times" for name, n in Counter(modules).items() if name and n > 1}

    def leave_out(places: Iterable[int], why: str) -> None:
        reasons.update({name: why for place in places if (name := modules[place]) and name not in reasons})

    for _, source in trace.sources(output):
        leave_out(trace.places({*source.lost, *trace.groups_in(source)}) | source.gates, "feeds the output")
    for place, why in trace.troubles.items():
        leave_out([place], why)
    found: dict[frozenset[int], tuple[int, dict[str, Tensor]]] = {}  # gated layers -> one, columns by reader
    for reader, reading, source, labels in trace.reads:
        places = trace.places(trace.groups_in(source))
        for number, operation in source.lost.items() if is_mixed(source.labels) else ():
            leave_out(trace.places([number]), f"goes through {operation}")
        if reader is None:
            leave_out(places | source.gates, f"goes through {reading}")
            continue
        grouped = getattr(net.get_submodule(reader), "groups", 1) > 1
        for place in (place for place in places if modules[place]):
            group = frozenset({place} | source.gates)
            columns = None if grouped else _columns(trace, place, labels)
            if columns is None:
                leave_out(group, f"does not fit the inputs of {reader}")
            else:
                found.setdefault(group, (place, {}))[1][reader] = columns
    for place in range(len(modules)):
        count = sum(place in group for group in found)
        if count != 1:
            leave_out([place], "is read alone and gated" if count else "is read by no layer")
    layers = []
    for group, (place, readers) in found.items():
        names = tuple(str(modules[each]) for each in sorted(group))
        if set(names) & reasons.keys():
            continue
        channels = {norm: _columns(trace, place, labels) for norm, labels in trace.channels.items()}
        norms = {norm: each for norm, each in channels.items() if each is not None and each.shape[1] == 1}
        orders = {
            name: each
            for name, each in {**readers, **norms}.items()
            if not torch.equal(each.flatten(), torch.arange(each.numel()))
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
    found = torch.isin(labels >> 32, torch.tensor(own)).nonzero().flatten()
    unit = labels[found] & (2**32 - 1)
    counts = unit.bincount(minlength=trace.layers[place].units)
    if not len(found) or counts.min() != counts.max():
        return None
    return found[unit.argsort(stable=True)].view(len(counts), -1)
