"""L2-init (regenerative regularisation): weight decay towards the starting weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fire_core.errors import UserError
from fire_core.methods import Method, register
from fire_core.methods.full_reset import initial_of
from fire_core.phases import State


@register
@dataclass
class L2Init(Method):
    """Adds coefficient / 2 * sum (p - p_initial)^2 over all parameters to the loss (the factor 1/2 as in the FIRE code).

    Cost: a second copy of the weights on the device and two passes over them per step.
    """

    coefficient: float = 1e-4

    name: ClassVar[str] = "l2_init"
    summary: ClassVar[str] = "L2 penalty towards the initial weights"
    source: ClassVar[str] = "Kumar et al. 2023 (arXiv 2308.11958), Eq. 1"

    def __post_init__(self) -> None:
        if self.coefficient < 0.0:
            raise UserError(f"coefficient={self.coefficient} must not be negative")
        self._start: dict[str, list[Tensor]] = {}

    def penalty(self, state: State) -> Tensor | float:
        if state.phase < self.first_phase or self.coefficient == 0.0:
            return 0.0
        total: Tensor | float = 0.0
        for name, net in state.nets.items():
            parameters = dict(net.named_parameters())
            if name not in self._start:
                start = initial_of(state, name)
                self._start[name] = [start[key].to(p, copy=True) for key, p in parameters.items()]
            distances = torch._foreach_sub(list(parameters.values()), self._start[name])
            norms = torch._foreach_norm(distances)
            total = total + torch.stack(norms).square().sum()
        return 0.5 * self.coefficient * total
