"""Hidden units of a net, with the layers that compute them and the layers that read them.

Methods that replace single units (ReDo, continual backprop, SNR) need to know which layer feeds which. Names and order
of modules do not show this, but one forward pass does: the autograd graph is followed back from the input of every
Linear and convolution to the layers whose outputs reach it. `forward` may contain any Python, and nothing has to be
declared.

The output channels of a layer are units if everything between them and each reader is elementwise, a norm, a pool or a
reshape. Two layers whose outputs are multiplied (gated MLPs, SwiGLU) share their units. Layers are left out, with a
reason, if they are added to others (residual stream), go through attention, transposes or concatenation, run twice, or
are the output layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from fire_core.passes import call, first_input
from fire_core.passes import in_mode
from fire_core.targets.walk import NORMS

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SUMS = ("Add", "Sub")
# Autograd operations that keep every unit in its place.
IN_PLACE = {
    *SUMS, "Mul", "Div", "Pow", "Relu", "Gelu", "Silu", "Tanh", "Sigmoid", "LeakyRelu", "Elu", "Hardtanh", "Mish",
    "Softplus", "Threshold", "Hardswish", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeLayerNorm",
    "NativeGroupNorm", "FusedRmsNorm", "NativeDropout", "MaxPool1D", "MaxPool2DWithIndices", "MaxPool3DWithIndices",
    "AvgPool1D", "AvgPool2D", "AvgPool3D", "AdaptiveAvgPool1D", "AdaptiveAvgPool2D", "MkldnnAdaptiveAvgPool2D",
    "Mean", "Sum", "Neg", "Abs", "Clamp", "ClampMin", "Rsqrt", "Sqrt", "View", "UnsafeView", "ReshapeAlias", "Clone",
    "Alias", "ToCopy", "Squeeze", "Unsqueeze", "Expand", "Select", "Slice",
}  # fmt: skip
OUTSIDE = "the input"  # source of values that no layer computes: the input itself, embeddings


@dataclass(frozen=True)
class UnitLayer:
    """One hidden layer; modules are given by name.

    name: the first of `incoming`. units: number of units. incoming: modules whose output channels are the units (two if
    gated). norms: norm modules between them and the readers. outgoing: (reading module, input columns per unit); a unit
    has more than one column where a convolution is flattened.
    """

    name: str
    units: int
    incoming: tuple[str, ...]
    norms: tuple[str, ...]
    outgoing: tuple[tuple[str, int], ...]


class _Sources(NamedTuple):
    """Layers whose outputs reach a node of the graph, norms on the way, and why units are mixed there ("" if not)."""

    layers: frozenset[str] = frozenset()
    norms: frozenset[str] = frozenset()
    trouble: str = ""


def find_unit_layers(net: nn.Module, inputs: Any) -> tuple[list[UnitLayer], dict[str, str]]:
    """Return the hidden layers of `net` in forward order, and the reason why each other layer is left out.

    Layers are the Linear and convolution modules that run in one forward pass of `inputs` in evaluation mode; those
    that do not run are in neither result. Mode and requires_grad are restored and hooks removed. Weights and gradients
    are not changed.

    Args:
        inputs: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
    Returns: a list of UnitLayer, and a dict from module names to reasons.
    """
    traced = _Traced(net, inputs)
    memory: dict[Any, _Sources] = {}
    sources = {name: _trace(node, traced.made, traced.normed, memory) for name, node in traced.read.items()}
    reasons = {name: f"runs {count} times" for name, count in traced.calls.items() if count > 1}
    for node in traced.ends:
        found = _trace(node, traced.made, traced.normed, memory)
        reasons |= dict.fromkeys(found.layers - {OUTSIDE}, "feeds the output")
    layers = _layers_with_readers(dict(net.named_modules()), sources, traced.wide, reasons)
    for name in sources:  # in the order of the forward pass
        groups = [group for group in layers if name in group]
        if len(groups) != 1:
            reasons.setdefault(name, "is read alone and gated" if groups else "is read by no layer")
    places = {name: place for place, name in enumerate(sources)}
    good = [layer for group, layer in layers.items() if not group & reasons.keys()]
    return sorted(good, key=lambda layer: places[layer.name]), reasons


class _Traced:
    """One forward pass of `inputs` in evaluation mode, with the nodes of its autograd graph by the module they belong to.

    made, normed: node of an output -> Linear or convolution, norm. read: layer -> node of its input. ends: nodes of the
    net's own outputs. calls: how often each layer runs. wide: Linear layers of tokens, where after flattening the columns
    of one unit are not adjacent.
    """

    def __init__(self, net: nn.Module, inputs: Any) -> None:
        self.made: dict[Any, str] = {}
        self.normed: dict[Any, str] = {}
        self.read: dict[str, Any] = {}
        self.calls: Counter[str] = Counter()
        self.wide: set[str] = set()
        frozen = [p for p in net.parameters() if not p.requires_grad and p.is_floating_point()]
        handles: list[RemovableHandle] = []
        try:
            for name, module in net.named_modules():
                handles += self._watch(name, module)
            for parameter in frozen:
                parameter.requires_grad_(True)
            with in_mode(net, training=False), torch.enable_grad():
                output = call(net, tree_map(_leaf, inputs))
        finally:
            for handle in handles:
                handle.remove()
            for parameter in frozen:
                parameter.requires_grad_(False)
        self.ends = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]

    def _watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        def before(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self.calls[name] += 1
            self.read[name] = first_input(arguments, keywords).grad_fn

        def after(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            self.made[output.grad_fn] = name
            if isinstance(module, nn.Linear) and output.ndim > 2:
                self.wide.add(name)

        def after_norm(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            self.normed[output.grad_fn] = name

        if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            return [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ]
        return [module.register_forward_hook(after_norm)] if isinstance(module, NORMS) else []


def _trace(
    root: Any, made: Mapping[Any, str], normed: Mapping[Any, str], memory: dict[Any, _Sources]
) -> _Sources:
    """Return the layers whose outputs reach `root`, the norms on the way, and what mixes the units, if anything does.

    Follows the graph back without recursion, so that its depth does not matter. `memory` caches every node.
    """
    waiting = [root]
    while waiting:
        node = waiting[-1]
        if node is None or node in memory:
            waiting.pop()
        elif node in made:
            memory[node] = _Sources(frozenset([made[node]]))
        else:
            children = [child for child, _ in node.next_functions if child is not None]
            if unknown := [child for child in children if child not in memory]:
                waiting += unknown
            else:
                memory[node] = _pass(node, [memory[child] for child in children], normed)
    return _Sources() if root is None else memory[root]


def _pass(node: Any, parts: list[_Sources], normed: Mapping[Any, str]) -> _Sources:
    """Return the sources of the output of one operation, given those of its inputs."""
    parts = [part for part in parts if part.layers]
    layers = frozenset().union(*(part.layers for part in parts))
    norms = frozenset().union(*(part.norms for part in parts))
    trouble = next((part.trouble for part in parts if part.trouble), "")
    operation = node.name().rstrip("0123456789").removesuffix("Backward")
    if not layers and (operation not in IN_PLACE or getattr(node, "variable", None) is not None):
        parameter = isinstance(getattr(node, "variable", None), nn.Parameter)
        layers = frozenset() if parameter else frozenset([OUTSIDE])
    elif operation not in IN_PLACE and layers != {OUTSIDE}:
        trouble = trouble or f"goes through {operation}"
    if operation in SUMS and len({part.layers for part in parts}) > 1:
        trouble = trouble or "is added to another layer"
    if node in normed:
        norms |= {normed[node]}
    return _Sources(layers, norms, trouble)


def _leaf(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_(True) if floating else value


def _layers_with_readers(
    modules: Mapping[str, nn.Module], sources: Mapping[str, _Sources], wide: set[str], reasons: dict[str, str]
) -> dict[frozenset[str], UnitLayer]:
    """Return a UnitLayer for each group of modules whose units later modules read, with all of its readers.

    Where a reader mixes the units or does not fit them, its sources get a reason in `reasons` instead.
    """
    layers: dict[frozenset[str], UnitLayer] = {}
    for reader, found in sources.items():
        group = found.layers - {OUTSIDE}
        if not group:
            continue
        units = {_units(modules[name]) for name in group}
        columns = 0
        if len(units) == 1:
            columns = _columns(modules[reader], units.pop(), flattened=not wide & group)
        trouble = found.trouble or ("is mixed with the input" if OUTSIDE in found.layers else "")
        trouble = trouble or ("" if columns else f"does not fit the inputs of {reader}")
        if trouble:
            reasons |= {name: trouble for name in group if name not in reasons}
            continue
        order = tuple(name for name in sources if name in group)
        known = layers.get(group) or UnitLayer(order[0], _units(modules[order[0]]), order, (), ())
        norms = tuple(sorted({*known.norms, *found.norms}))
        layers[group] = replace(known, norms=norms, outgoing=(*known.outgoing, (reader, columns)))
    return layers


def _units(module: Any) -> int:
    return int(module.weight.shape[0])


def _columns(reader: Any, units: int, *, flattened: bool) -> int:
    """Return the number of input columns of `reader` per unit, or 0 if its inputs are not these units."""
    if isinstance(reader, CONVOLUTIONS):
        return int(reader.groups == 1 and reader.in_channels == units)
    columns, rest = divmod(reader.in_features, units)
    return columns if rest == 0 and (columns == 1 or flattened) else 0
