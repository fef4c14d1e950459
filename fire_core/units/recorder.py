"""Recording of hidden activations, as the next layer reads them, during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fire_core.passes import first_input
from fire_core.units.graph import UnitLayer
from fire_core.units.trace import CONVOLUTIONS


def samples_by_unit(activations: Tensor, layer: UnitLayer, name: str, reader: nn.Module) -> Tensor:
    """Return a reader's input as (samples, units); positions and the several columns of a unit count as samples."""
    if isinstance(reader, CONVOLUTIONS):
        activations = activations.movedim(1, -1)
    elif getattr(reader, "stacked_matrices", False):
        activations = activations.movedim(0, -2).flatten(-2)
    if name in layer.columns:
        activations = activations[..., layer.columns[name].to(activations.device)].flatten(-2)
    columns = activations.shape[-1] // layer.units
    return activations.reshape(-1, layer.units, columns).mT.reshape(-1, layer.units)


class Recorder:
    """Hooks that record the activations of unit layers in forward passes, until `remove` or the end of a `with` block.

    Args:
        reduce: function of the activations (samples, units) of one layer, as its first reader receives them.
        always: record every pass, not only those in training mode with gradients.
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

        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if always or (module.training and torch.is_grad_enabled()):
                with torch.no_grad():
                    read = first_input(arguments, keywords).detach()
                    self.values[layer.name] = reduce(samples_by_unit(read, layer, name, module))

        return self.net.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hooks; `values` stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()
