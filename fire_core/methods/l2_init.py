"""L2-init (regenerative regularisation): weight decay towards the starting weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fire_core.errors import check_range
from fire_core.methods.full_reset import check_initial, initial_of
from fire_core.methods.method import FIXTURE, Method, register
from fire_core.state import State
from fire_core.wrapped_models import unwrap_with


@register
@dataclass
class L2Init(Method):
    """Adds coefficient / 2 * sum (p - p_initial)^2 over all parameters to the loss; the 1/2 is that of the FIRE code.

    Cost: a second copy of the weights on the device, and two passes over them per step.
    """

    coefficient: float = 1e-4

    name: ClassVar[str] = "l2_init"
    title: ClassVar[str] = "L2 init"
    summary: ClassVar[str] = "L2 penalty towards the initial weights"
    source: ClassVar[str] = "Kumar et al. 2023 (arXiv 2308.11958), Eq. 1"
    needs: ClassVar[frozenset[str]] = frozenset({"initial"})
    off: ClassVar[dict[str, Any] | None] = {"coefficient": 0.0}
    proven_by: ClassVar[str] = FIXTURE
    takes_whole_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range(self, "[0, inf)", "coefficient")
        # for each net: its starting weights as given in State.initial, and copies of them on the net's device
        self._starts: WeakKeyDictionary[nn.Module, tuple[Mapping[str, Tensor], list[Tensor]]] = (
            WeakKeyDictionary()
        )

    def penalty(self, state: State) -> Tensor | float:
        """Return the penalty over all nets. Raises UserError without starting weights."""
        if self.coefficient == 0.0:
            return 0.0
        total: Tensor | float = 0.0
        for name, net in state.nets.items():
            weights: list[Tensor] = list(net.parameters())
            norms = torch._foreach_norm(
                torch._foreach_sub(weights, self._start(net, initial_of(state, name)))
            )
            total = total + torch.stack([norm.to(weights[0].device) for norm in norms]).square().sum()
        return 0.5 * self.coefficient * total

    def _start(self, net: nn.Module, initial: Mapping[str, Tensor]) -> list[Tensor]:
        known = self._starts.get(net)
        if known is None or known[0] is not initial:
            inner, start = unwrap_with(net, initial)
            parameters = dict(inner.named_parameters())
            check_initial(start, parameters)
            known = initial, [start[key].to(p, copy=True) for key, p in parameters.items()]
            self._starts[net] = known
        return known[1]
