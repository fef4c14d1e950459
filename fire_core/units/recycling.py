"""Replacement of single hidden units: new incoming weights, outgoing weights of zero."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError
from fire_core.units.graph import UnitLayer


def why_not(net: nn.Module, layer: UnitLayer) -> str:
    """Return why the units of a layer must not be replaced, or ""."""
    around = (*layer.incoming, *layer.norms, *(reader for reader, _ in layer.outgoing))
    modules = [net.get_submodule(path) for path in around]
    if not all("weight" in module._parameters for module in modules):
        return "has a reparametrised weight (weight_norm), or a layer behind it has"
    parameters = [p for module in modules for p in module.parameters()]
    if not all(p.requires_grad for p in parameters):
        return "is frozen, or has a frozen layer behind it"
    holders = Counter(id(p) for module in net.modules() for p in module._parameters.values())
    tied = any(holders[id(p)] > 1 for p in parameters)
    return "shares a parameter with another module, or a layer behind it does" if tied else ""


@torch.no_grad()
def recycle(
    net: nn.Module,
    layer: UnitLayer,
    chosen: Tensor,
    *,
    generator: torch.Generator,
    initial: Mapping[str, Tensor] | None = None,
    gain: float = 1.0,
    optimizers: Iterable[Optimizer] = (),
) -> int:
    """Give the chosen units new incoming weights and outgoing weights of zero, in place; return the number of units.

    Incoming weights are drawn from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's default for Linear and convolution,
    with bias 0. In the layer's norms, these channels get gain 1, bias 0, running mean 0 and variance 1.

    Args:
        chosen: bool (units,) or int64 indices of units.
        generator: CPU generator of the new weights.
        gain: the range of the new weights as a multiple of that; 6**0.5 is He's uniform draw.
        initial: state dict of the start; each unit then gets its own first weights and bias back instead.
        optimizers: their moments of the changed entries become 0. Step counts belong to whole parameters and stay.
    Raises: UserError if a layer or one that reads it has a reparametrised, shared or frozen weight.
    """
    chosen = (chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen).cpu()
    if len(chosen) == 0:
        return 0
    if why := why_not(net, layer):
        raise UserError(f"the units of {layer.name!r} cannot be replaced: it {why}")
    modules, optimizers = dict(net.named_modules()), list(optimizers)
    for name in layer.incoming:
        module = modules[name]
        for kind, parameter in module.named_parameters(recurse=False):
            fresh = torch.zeros_like(parameter[chosen], device="cpu")
            if initial is not None:
                fresh = initial[f"{name}.{kind}" if name else kind][chosen]
            elif parameter.ndim > 1:
                fresh = uniform(fresh.shape, gain * parameter[0].numel() ** -0.5, generator)
            parameter[chosen] = fresh.to(parameter)
            _clear_moments(optimizers, parameter, (chosen,))
    for name in layer.norms:
        _restart_norm(modules[name], chosen, layer.units, optimizers)
    for name, columns in layer.outgoing:
        weight = modules[name].weight
        places = (chosen[:, None] * columns + torch.arange(columns)).flatten()
        weight[:, places] = 0.0
        _clear_moments(optimizers, weight, (slice(None), places))
    return len(chosen)


def uniform(shape: Sequence[int], bound: float, generator: torch.Generator) -> Tensor:
    """Return a new tensor drawn from U(-bound, bound) on the CPU."""
    return torch.rand(*shape, generator=generator).mul_(2 * bound).sub_(bound)


def _restart_norm(norm: nn.Module, chosen: Tensor, units: int, optimizers: Sequence[Optimizer]) -> None:
    fresh = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
    for key, value in fresh.items():
        tensor = getattr(norm, key, None)
        if tensor is not None and tensor.shape == (units,):
            tensor[chosen] = value
            _clear_moments(optimizers, tensor, (chosen,))


def _clear_moments(optimizers: Sequence[Optimizer], parameter: Tensor, place: tuple[Any, ...]) -> None:
    for optimizer in optimizers:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                value[place] = 0
