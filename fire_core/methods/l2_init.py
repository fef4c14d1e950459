"""L2-init (regenerative regularisation): weight decay towards the starting weights."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fire_core.errors import check_settings
from fire_core.methods.method import FIXTURE, Method, register, start_of
from fire_core.state import State


@register
@dataclass
class L2Init(Method):
    """Adds coefficient / 2 * sum (p - p_initial)^2 over all parameters to the loss; the 1/2 is that of the FIRE code.

    Cost: a second copy of the weights on the device, and two passes over them per step.
    """

    coefficient: float = 1e-4

    name = "l2_init"
    title = "L2 init"
    summary = "L2 penalty towards the initial weights"
    source = "Kumar et al. 2023 (arXiv 2308.11958), Eq. 1"
    needs = frozenset({"initial"})
    off = {"coefficient": 0.0}
    proven_by = FIXTURE
    takes_whole_weights = True

    def __post_init__(self) -> None:
        check_settings(self, coefficient="[0, inf)")
        self._starts: WeakKeyDictionary[nn.Module, list[Tensor]] = WeakKeyDictionary()  # on the nets' devices

    def load_state_dict(self, saved: dict[str, Any], state: State) -> None:
        super().load_state_dict(saved, state)
        self._starts.clear()

    def penalty(self, state: State) -> Tensor | float:
        """Return the penalty over all nets. Raises UserError without starting weights."""
        if self.coefficient == 0.0:
            return 0.0
        total: Tensor | float = 0.0
        for name, net in state.nets.items():
            if net not in self._starts:
                inner, start = start_of(net, state.initial.get(name))
                self._starts[net] = [start[key].to(p, copy=True) for key, p in inner.named_parameters()]
            weights: list[Tensor] = list(net.parameters())
            norms = torch._foreach_norm(torch._foreach_sub(weights, self._starts[net]))
            total = total + torch.stack([norm.to(weights[0].device) for norm in norms]).square().sum()
        return 0.5 * self.coefficient * total
