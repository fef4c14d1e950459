"""AdamO: a pull towards isometric weights beside the optimizer's step, which Adam's moments do not see."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fire_core.errors import check_settings
from fire_core.methods.method import PORT, Method, register
from fire_core.state import State


def isometry_gradient(matrices: Tensor) -> Tensor:
    """Return the gradient of ||W^T W - I||_F^2, or of ||W W^T - I||_F^2 for wide W, for each matrix (..., out, in).

    It is 4 W (W^T W - I), or 4 (W W^T - I) W: zero where all singular values are 1.
    """
    wide = matrices.shape[-2] < matrices.shape[-1]
    tall = matrices.mT if wide else matrices
    gradient = 4.0 * (tall @ (tall.mT @ tall) - tall)
    return gradient.mT if wide else gradient


@register
@dataclass
class AdamO(Method):
    """Moves every weight W by -rate * coefficient * the gradient of a pull towards isometry, beside each optimizer step.

    `rate` is the learning rate that the weight's parameter group has at that step. A weight is taken as one matrix (out,
    everything else), and a stack of matrices as these matrices. Cost: three matrix products per weight and step, and with
    "paper" one copy of the weights during the step.

    Args:
        reading: "paper" is `isometry_gradient`, at the weights before the step: equation 16 as two independent readers give
            it, with the paper's coefficient as default. "code" is half of it, at the weights after the step: the port by
            the paper's first author, which searched coefficients of 1e-3, 1e-2 and 1e-1.
        targets: the weights, a rule of `find_targets`. Paper and port leave out embeddings and the output layer of
            language models; here they are taken too unless `targets` says otherwise.
    """

    coefficient: float = 1e-3
    targets: str | list[str] = "all"
    reading: str = "paper"

    name = "adamo"
    title = "AdamO"
    summary = "step towards isometric weights, decoupled from Adam's moments"
    source = "Rosseau et al. 2026 (AdamO, arXiv 2606.09762)"
    proven_by = PORT
    off = {"coefficient": 0.0}
    takes_whole_weights = True
    needs = frozenset({"gradients", "optimizers"})

    def __post_init__(self) -> None:
        check_settings(self, coefficient="[0, inf)", reading="paper code")
        self._pulls: list[tuple[nn.Parameter, Tensor, float]] = []  # weight, gradient, size of the step

    def before_step(self, state: State) -> None:
        if self.reading == "paper":
            self._compute(state, 1.0)

    @torch.no_grad()
    def after_step(self, state: State) -> None:
        if self.reading == "code":
            self._compute(state, 0.5)
        for parameter, pull, size in self._pulls:
            parameter.sub_(pull, alpha=size)
        self._pulls = []

    def after_skip(self, state: State) -> None:
        self._pulls = []

    @torch.no_grad()
    def _compute(self, state: State, factor: float) -> None:
        groups = [group for optimizer in state.optimizers.values() for group in optimizer.param_groups]
        rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
        for net in state.nets.values():
            for key, view in self.weights(net).items():
                parameter = net.get_parameter(key)
                pull = view.weight(isometry_gradient(view.matrices(parameter)), parameter)
                rate = rates.get(parameter, 0.0)  # a weight without an optimizer stays
                self._pulls.append((parameter, pull, factor * rate * self.coefficient))
