"""Records what the next layer reads, reduced on the spot, in every training pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fire_core.measure.inputs import first_input
from fire_core.units.graph import CONVOLUTIONS, UnitLayer


def samples_by_unit(activations: Tensor, units: int, convolution: bool) -> Tensor:
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
        self.net = net
        modules = dict(net.named_modules())
        self._handles = [
            modules[layer.outgoing[0][0]].register_forward_pre_hook(
                self._hook(layer, reduce, always), with_kwargs=True
            )
            for layer in layers
        ]

    def _hook(
        self, layer: UnitLayer, reduce: Callable[[Tensor], Tensor], always: bool
    ) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if always or (module.training and torch.is_grad_enabled()):
                with torch.no_grad():
                    read = first_input(arguments, keywords).detach()
                    self.values[layer.name] = reduce(
                        samples_by_unit(read, layer.units, isinstance(module, CONVOLUTIONS))
                    )

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
