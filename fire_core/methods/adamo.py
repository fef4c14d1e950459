"""AdamO: a pull towards isometric weights beside the optimizer's step, which Adam's moments do not see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fire_core.errors import UserError, check_range
from fire_core.methods.method import Method, register
from fire_core.state import State


def isometry_gradient(matrices: Tensor) -> Tensor:
    """Return the gradient of ||W^T W - I||_F^2, or of ||W W^T - I||_F^2 for wide W, for each matrix (..., out, in).

    It is 4 W (W^T W - I), or 4 (W W^T - I) W: zero where all singular values are 1.
    """
    wide = matrices.shape[-2] < matrices.shape[-1]
    tall = matrices.mT if wide else matrices
    gram = tall.mT @ tall
    gradient = 4.0 * (tall @ gram - tall)
    return gradient.mT if wide else gradient


@register
@dataclass
class AdamO(Method):
    """Moves every weight W by -rate * coefficient * `isometry_gradient`(W) at each optimizer step.

    The gradient is that at the weights before the step, and `rate` is the learning rate that the weight's parameter group
    has at that step. The moments of Adam follow the loss alone, as those of AdamW do. A weight is taken as one matrix
    (out, everything else), and a stack of matrices as these matrices.

    The paper's text was not available to us, only summaries of it. They give the update, the penalty with the smaller
    Gram matrix, and the equal step sizes of both parts, but neither the coefficients, so that the default is ours, nor
    the layers: we take those of `targets`.

    Cost: three matrix products per weight and step, and one copy of the weights during the step.
    """

    coefficient: float = 1e-2
    targets: str | list[str] = "all"

    name: ClassVar[str] = "adamo"
    title: ClassVar[str] = "AdamO"
    summary: ClassVar[str] = "step towards isometric weights, decoupled from Adam's moments"
    source: ClassVar[str] = "Rosseau et al. 2026 (AdamO, arXiv 2606.09762)"
    off: ClassVar[dict[str, Any] | None] = {"coefficient": 0.0}
    takes_whole_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range(self, "[0, inf)", "coefficient")
        self._gradients: list[tuple[float, nn.Parameter, Tensor]] = []

    @torch.no_grad()
    def penalty(self, state: State) -> Tensor | float:
        """Compute the step from the weights as they are, and return 0.0."""
        self._gradients = []
        groups = [group for optimizer in state.optimizers.values() for group in optimizer.param_groups]
        if not groups:
            raise UserError(
                "method 'adamo' moves by the learning rate: give State(optimizers={'net': optimizer})"
            )
        rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
        for net in state.nets.values():
            parameters = dict(net.named_parameters())
            for key, view in self.weights(net).items():
                gradient = isometry_gradient(view.matrices(parameters[key]))
                step = view.weight(gradient, parameters[key])
                rate = rates.get(parameters[key], 0.0)  # a weight without an optimizer stays
                self._gradients.append((rate * self.coefficient, parameters[key], step))
        return 0.0

    @torch.no_grad()
    def after_step(self, state: State) -> None:
        """Take the step that `penalty` computed."""
        for size, parameter, gradient in self._gradients:
            parameter.sub_(gradient, alpha=size)
        self._gradients = []
