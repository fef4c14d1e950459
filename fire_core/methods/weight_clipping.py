"""Weight clipping: no weight may leave a multiple of the range from which it was drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fire_core.errors import UserError
from fire_core.methods.method import Method, find_weights, register
from fire_core.phases import State


def clip_weights(model: nn.Module, factor: float = 2.0, targets: str | list[str] = "all") -> None:
    """Clamp each target weight of `model` and the bias beside it to [-factor * s, factor * s], in place.

    s = 1 / sqrt(fan_in) is the bound of PyTorch's default initialisation, for the bias too.
    """
    _clip(model, bounds(model, targets), factor)


def bounds(model: nn.Module, targets: str | list[str]) -> dict[str, float]:
    """Return s of each target weight and of the bias beside it, by parameter name."""
    parameters, found = dict(model.named_parameters()), {}
    for key, start in find_weights(model, targets).items():
        found[key] = parameters[key].flatten(start).shape[-1] ** -0.5
        bias = f"{key.removesuffix('weight')}bias"
        if key.endswith("weight") and bias in parameters:
            found[bias] = found[key]
    return found


@torch.no_grad()
def _clip(model: nn.Module, limits: dict[str, float], factor: float) -> None:
    parameters = dict(model.named_parameters())
    for key, limit in limits.items():
        parameters[key].clamp_(-factor * limit, factor * limit)


@register
@dataclass
class WeightClipping(Method):
    """Calls `clip_weights` after every optimizer step.

    Args:
        factor: the paper's kappa. Its value there depends on the task; the default is ours.

    The paper clips to the range of the initialisation. Networks of ours that are drawn from another distribution than
    PyTorch's default are clipped to the default's range all the same. Cost: one pass over the weights per step.
    """

    factor: float = 2.0
    targets: str | list[str] = "all"

    name: ClassVar[str] = "weight_clipping"
    summary: ClassVar[str] = "weights clipped to a multiple of their initial range after every step"
    source: ClassVar[str] = "Elsayed et al. 2024 (arXiv 2407.01704)"

    def __post_init__(self) -> None:
        if self.factor <= 0.0:
            raise UserError(f"factor={self.factor} must be above 0: use e.g. 2")
        self._bounds: WeakKeyDictionary[nn.Module, dict[str, float]] = WeakKeyDictionary()

    def check(self, state: State) -> None:
        """Raise UserError for targets that a net does not have."""
        for net in state.nets.values():
            find_weights(net, self.targets)

    def after_step(self, state: State) -> None:
        """Clip the weights of all nets."""
        for net in state.nets.values():
            if net not in self._bounds:
                self._bounds[net] = bounds(net, self.targets)
            _clip(net, self._bounds[net], self.factor)
