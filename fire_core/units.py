"""Hidden units and the layers around them: whose rows make a unit, whose columns read it.

Methods that replace single units (ReDo, continual backprop, SNR) need to know which layer feeds which. Names and order
of modules do not say; one forward pass does: the autograd graph is walked back from the input of every Linear and
convolution to the layers whose outputs arrive there. So any Python in `forward` is fine, and nothing is declared.

A layer counts when its units are its own: everything on the way to each reader is elementwise, a norm, a pool or a
reshape. Two layers that are multiplied (gated MLPs, SwiGLU) share their units. Left out, with a reason: layers that
are added to others (the residual stream has no owner), that go through attention, transposes or concatenation, that
run twice, and the output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from fire_core.errors import UserError
from fire_core.modes import in_mode

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
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
OUTSIDE = "the input"  # stands for what comes from no layer: the input itself, embeddings


@dataclass(frozen=True)
class UnitLayer:
    """One hidden layer. incoming: modules whose output channels are the units (two where gated). norms: norm modules
    between them and the readers. outgoing: (reading module, columns per unit); more than one column per unit where a
    convolution was flattened."""

    name: str
    units: int
    incoming: tuple[str, ...]
    norms: tuple[str, ...]
    outgoing: tuple[tuple[str, int], ...]


class _Sources(NamedTuple):
    layers: frozenset[str] = frozenset()
    norms: frozenset[str] = frozenset()
    trouble: str = ""


def find_unit_layers(net: nn.Module, inputs: Any) -> tuple[list[UnitLayer], dict[str, str]]:
    """Hidden layers of `net` in forward order, and why each other Linear or convolution is none.

    One forward pass of `inputs` (a tensor, or a tuple of arguments) in evaluation mode; hooks, mode and requires_grad
    are put back. Weights, gradients and random states are not touched.
    """
    made: dict[Any, str] = {}
    normed: dict[Any, str] = {}
    read: dict[str, Any] = {}
    calls: dict[str, int] = {}
    wide: set[str] = set()
    handles = []

    def after(name: str, table: dict[Any, str]) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            table[output.grad_fn] = name
            if isinstance(module, nn.Linear) and output.ndim > 2:
                wide.add(name)  # rows of tokens: flattened, its units would not lie side by side

        return hook

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            calls[name] = calls.get(name, 0) + 1
            read[name] = arguments[0].grad_fn

        return hook

    frozen = [p for p in net.parameters() if not p.requires_grad]
    try:
        for name, module in net.named_modules():
            if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
                handles += [
                    module.register_forward_pre_hook(before(name)),
                    module.register_forward_hook(after(name, made)),
                ]
            elif isinstance(module, NORMS):
                handles.append(module.register_forward_hook(after(name, normed)))
        for parameter in frozen:
            parameter.requires_grad_(True)
        leaves = tree_map(_leaf, inputs)
        with in_mode(net, training=False), torch.enable_grad():
            output = net(*leaves) if isinstance(leaves, tuple) else net(leaves)
    finally:
        for handle in handles:
            handle.remove()
        for parameter in frozen:
            parameter.requires_grad_(False)

    memory: dict[Any, _Sources] = {}
    sources = {name: _trace(node, made, normed, memory) for name, node in read.items()}
    reasons = {name: f"runs {count} times" for name, count in calls.items() if count > 1}
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            found = _trace(leaf.grad_fn, made, normed, memory)
            reasons |= dict.fromkeys(found.layers - {OUTSIDE}, "feeds the output")
    return _collect(net, sources, reasons, wide)


def _trace(
    node: Any, made: Mapping[Any, str], normed: Mapping[Any, str], memory: dict[Any, _Sources]
) -> _Sources:
    """Layers whose outputs reach `node`, the norms passed, and what mixes the units on the way, if anything does."""
    if node is None:
        return _Sources()
    if node in made:
        return _Sources(frozenset([made[node]]))
    if node not in memory:
        parts = [_trace(child, made, normed, memory) for child, _ in node.next_functions]
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
        memory[node] = _Sources(layers, norms, trouble)
    return memory[node]


def _leaf(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_(True) if floating else value


def _collect(
    net: nn.Module, sources: Mapping[str, _Sources], reasons: dict[str, str], wide: set[str]
) -> tuple[list[UnitLayer], dict[str, str]]:
    modules = dict(net.named_modules())
    layers: dict[frozenset[str], UnitLayer] = {}
    for reader, found in sources.items():
        if found.layers <= {OUTSIDE}:
            continue
        if OUTSIDE in found.layers:
            found = _Sources(
                found.layers - {OUTSIDE}, found.norms, found.trouble or "is mixed with the input"
            )
        counts = {_units(modules[name]) for name in found.layers}
        columns = 0
        if len(counts) == 1:
            columns = _columns(modules[reader], counts.pop(), flattened=not wide & found.layers)
        trouble = found.trouble or ("" if columns else f"does not fit the inputs of {reader}")
        if trouble:
            reasons |= {name: trouble for name in found.layers if name not in reasons}
            continue
        order = tuple(name for name in sources if name in found.layers)
        known = layers.get(found.layers) or UnitLayer(order[0], _units(modules[order[0]]), order, (), ())
        norms = tuple(sorted({*known.norms, *found.norms}))
        layers[found.layers] = replace(known, norms=norms, outgoing=(*known.outgoing, (reader, columns)))
    for name in sources:
        groups = [group for group in layers if name in group]
        if len(groups) > 1:
            reasons.setdefault(name, "is read alone and gated")
        elif not groups:
            reasons.setdefault(name, "is read by no layer")
    good = [layer for group, layer in layers.items() if not any(name in reasons for name in group)]
    place = {name: index for index, name in enumerate(sources)}
    return sorted(good, key=lambda layer: place[layer.name]), reasons


def _units(module: Any) -> int:
    return int(module.weight.shape[0])


def _columns(reader: Any, units: int, *, flattened: bool) -> int:
    """Input columns of `reader` per unit, 0 where they do not line up."""
    if isinstance(reader, CONVOLUTIONS):
        return int(reader.groups == 1 and reader.in_channels == units)
    columns, rest = divmod(reader.in_features, units)
    return columns if rest == 0 and (columns == 1 or flattened) else 0


def by_unit(activations: Tensor, units: int, convolution: bool) -> Tensor:
    """A reader's input as (samples, units): batch, positions and a unit's several columns are all samples."""
    if convolution:
        return activations.movedim(1, -1).reshape(-1, units)
    return activations.reshape(-1, units, activations.shape[-1] // units).transpose(1, 2).reshape(-1, units)


class Recorder:
    """Hooks that reduce the activations of each unit layer in every training forward pass, until `remove`.

    `values[layer]` holds `reduce` ((samples, units) -> any tensor) of the latest pass with gradients in training mode;
    with `always`, of any pass.
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
        modules = dict(net.named_modules())
        self._handles = [
            modules[layer.outgoing[0][0]].register_forward_pre_hook(self._hook(layer, reduce, always))
            for layer in layers
        ]

    def _hook(
        self, layer: UnitLayer, reduce: Callable[[Tensor], Tensor], always: bool
    ) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if always or (module.training and torch.is_grad_enabled()):
                with torch.no_grad():
                    seen = by_unit(arguments[0].detach(), layer.units, isinstance(module, CONVOLUTIONS))
                    self.values[layer.name] = reduce(seen)

        return hook

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


@torch.no_grad()
def recycle(
    net: nn.Module,
    layer: UnitLayer,
    chosen: Tensor,
    *,
    generator: torch.Generator,
    initial: Mapping[str, Tensor] | None = None,
    optimizers: Iterable[Optimizer] = (),
) -> int:
    """Give the chosen units fresh incoming weights and outgoing weights of zero, in place; returns how many.

    Incoming weights are drawn from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's default for Linear and convolution,
    with bias 0; with `initial` (a state dict of the start) each unit gets its own first weights and bias back. Norms
    of the layer start anew in these channels. The moments that `optimizers` keep for the entries touched become 0; their
    step counts, shared by a whole parameter, stay.

    Args:
        chosen: bool (units,) or int64 indices of units. generator: CPU generator of the new weights.
    """
    rows = (chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen).cpu()
    if len(rows) == 0:
        return 0
    modules = dict(net.named_modules())
    for name in layer.incoming:
        module = modules[name]
        for kind, parameter in module.named_parameters(recurse=False):
            fresh = torch.zeros_like(parameter[rows], device="cpu")
            if initial is not None:
                fresh = initial[f"{name}.{kind}" if name else kind][rows]
            elif parameter.ndim > 1:
                bound = parameter[0].numel() ** -0.5
                fresh = torch.rand(fresh.shape, generator=generator).mul_(2 * bound).sub_(bound)
            parameter[rows] = fresh.to(parameter)
            _clear_moments(optimizers, parameter, (rows,))
    for name in layer.norms:
        _restart_norm(modules[name], rows, layer.units, optimizers)
    for name, columns in layer.outgoing:
        weight = modules[name].weight
        places = (rows[:, None] * columns + torch.arange(columns)).flatten()
        weight[:, places] = 0.0
        _clear_moments(optimizers, weight, (slice(None), places))
    return len(rows)


def _restart_norm(norm: nn.Module, rows: Tensor, units: int, optimizers: Iterable[Optimizer]) -> None:
    fresh = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
    for key, value in fresh.items():
        tensor = getattr(norm, key, None)
        if tensor is not None and tensor.shape == (units,):
            tensor[rows] = value
            _clear_moments(optimizers, tensor, (rows,))


def _clear_moments(optimizers: Iterable[Optimizer], parameter: Tensor, place: tuple[Any, ...]) -> None:
    for optimizer in optimizers:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                value[place] = 0


def coming_inputs(batches: Callable[[], Iterable[Any]] | None, net: str, method: str) -> Any:
    """Inputs for `net` from the first of the coming batches; a dict of inputs is read by the net's name."""
    if batches is None:
        raise UserError(
            f"method {method!r} looks at the data: set state.batches to a callable that yields batches"
        )
    for inputs, *_ in batches():
        return inputs[net] if isinstance(inputs, Mapping) else inputs
    raise UserError(f"method {method!r} looks at the data, but state.batches() yielded no batch")
