"""Replacement of single hidden units: new incoming weights, drawn from one of several laws, outgoing weights of zero."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError
from fire_core.units.graph import Entries, UnitLayer, incoming, outgoing
from fire_core.units.trace import is_stack
from fire_core.wrapped_models import inside, unwrap_with

# half widths of uniform laws, times the root of fan_in; the default is PyTorch's own, for Linear and convolutions
LAWS = {"default": 1.0, "he_uniform": 6.0**0.5}


def draw(law: str, shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return new incoming weights of units, (units, in, ...), float32 on the CPU; fan_in is the size of one unit's.

    Raises UserError for a law that is not in `LAWS`.
    """
    if law not in LAWS:
        raise UserError(f"law={law!r}: choose one of {', '.join(LAWS)}")
    bound = LAWS[law] * max(torch.Size(shape[1:]).numel(), 1) ** -0.5
    return torch.rand(shape, generator=generator, device="cpu").mul_(2 * bound).sub_(bound)


def why_not(net: nn.Module, layer: UnitLayer) -> str:
    """Return why the units of a layer must not be replaced, or ""."""
    around = (*layer.incoming, *layer.norms, *(reader for reader, _ in layer.outgoing))
    modules = [net.get_submodule(path) for path in around]
    if not all("weight" in module._parameters for module in modules):
        return "has a reparametrised weight (weight_norm), or a layer behind it has"
    if any({n for n, p in m._parameters.items() if p is not None} - {"weight", "bias"} for m in modules):
        return "has parameters besides weight and bias, or a layer behind it has"
    parameters = [p for module in modules for p in module.parameters()]
    if not all(p.requires_grad for p in parameters):
        return "is frozen, or has a frozen layer behind it"
    holders = Counter(id(p) for module in net.modules() for p in module._parameters.values())
    if any(holders[id(p)] > 1 for p in parameters):
        return "shares a parameter with another module, or a layer behind it does"
    odd = any(is_stack(m) and m.bias is not None and m.bias.ndim != 2 for m in modules)
    return "has a bias that is not (members, outputs), or a layer behind it has" if odd else ""


@torch.no_grad()
def recycle(
    net: nn.Module,
    layer: UnitLayer,
    chosen: Tensor,
    *,
    generator: torch.Generator,
    law: str = "default",
    initial: Mapping[str, Tensor] | None = None,
    optimizers: Iterable[Optimizer] = (),
) -> int:
    """Give the chosen units new incoming weights and outgoing weights of zero, in place; return the number of units.

    Incoming weights are drawn from `law`, by default U(-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's own for Linear and
    convolution, with bias 0. In the layer's norms, these channels get gain 1, bias 0, running mean 0 and variance 1.

    Args:
        chosen: bool (units,) or int64 indices of units.
        generator: CPU generator of the new weights. law: one of `LAWS`.
        initial: state dict of the start; each unit then gets its own first weights and bias back instead.
        optimizers: their moments of the entries become 0, and copies of another type the new values. Step counts stay.
    Raises: UserError if a layer or its reader has a reparametrised, shared or frozen weight, or more than weight and bias.
    """
    chosen = (chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen).cpu()
    if len(chosen) == 0:
        return 0
    if why := why_not(net, layer):
        raise UserError(f"the units of {layer.name!r} cannot be replaced: it {why}")
    optimizers, (initial, prefix) = list(optimizers), (unwrap_with(net, initial)[1], inside(net)[1])
    for entries in (*incoming(net, layer), *outgoing(net, layer)):
        _moments(optimizers, entries)  # raises what it raises before anything is changed

    def change(entries: Entries, values: Tensor | float) -> None:
        p, held = entries.parameter, _moments(optimizers, entries)
        # masters: copies of the weights in higher precision
        copies = [each.dtype != p.dtype and torch.equal(each.to(p), p) and p.any() for each in held]
        for each, follows in zip((p, *held), (True, *copies), strict=True):
            entries.write(values if follows else 0.0, each, chosen)

    for entries in incoming(net, layer):
        old = entries.read(chosen=chosen)
        if initial is not None:
            change(entries, entries.read(initial[entries.name.removeprefix(prefix)], chosen))
        else:
            change(entries, draw(law, old.shape, generator) if old.ndim > 1 else 0.0)
    for name in layer.norms:
        channels = layer.columns_in(name)[:, 0]
        for key, value in {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}.items():
            tensor = getattr(net.get_submodule(name), key, None)
            if isinstance(tensor, Tensor) and tensor.ndim:
                change(Entries(f"{name}.{key}", tensor, tuple(range(tensor.ndim)), channels), value)
    for entries in outgoing(net, layer):
        change(entries, 0.0)
    return len(chosen)


def clear_moments(optimizers: Iterable[Optimizer], entries: Entries, chosen: Any = slice(None)) -> None:
    """Set what optimizers remember of the entries of the units `chosen` (default: all) to 0, copies of weights included.

    Raises UserError for an optimizer that stores it in 8 bits.
    """
    for moments in _moments(optimizers, entries):
        entries.write(0.0, moments, chosen)


def _moments(optimizers: Iterable[Optimizer], entries: Entries) -> list[Tensor]:
    held = [each for o in optimizers for each in o.state.get(entries.parameter, {}).values()]
    found = [each for each in held if isinstance(each, Tensor) and each.numel() >= entries.parameter.numel()]
    if any(type(each) not in (Tensor, nn.Parameter) or each.dtype.itemsize == 1 for each in found):
        raise UserError("moments of 8 bits cannot be cleared in part: use an optimizer with 16 or 32")
    return [each for each in found if each.shape == entries.parameter.shape]
