"""Parseval regularisation: keep the rows of every weight near orthonormal during training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fire_core.errors import UserError, check_settings
from fire_core.methods.method import FIXTURE, Method, register
from fire_core.state import State
from fire_core.units.trace import is_norm

LARGEST_GRAM = 16384


@register
@dataclass
class Parseval(Method):
    """Adds coefficient * sum ||W W^T - scale I||_F^2 over the weights W to the loss.

    A weight is taken as one matrix (out, everything else), and a stack of matrices as these matrices. Cost: one product
    W W^T per weight and step, with 2 out^2 in operations forward and twice as many backward.

    Args:
        norms: add ||w^2 - scale||^2 for the gains w of norm layers, as the FIRE code does. A norm layer of your own
            needs the attribute `is_norm = True`.
        gram: "rows" is W W^T as published, never I with more rows than columns; "smaller" is the smaller Gram matrix.
        targets: the weights, a rule of `find_targets`.
    """

    coefficient: float = 1e-3
    scale: float = 1.0
    norms: bool = True
    gram: str = "rows"
    targets: str | list[str] = "all"

    name = "parseval"
    title = "Parseval"
    summary = "orthogonality penalty on all weights"
    source = "Chung et al. 2024 (arXiv 2412.07224), Eq. 4; Cisse et al. 2017"
    off = {"coefficient": 0.0}
    proven_by = FIXTURE
    takes_whole_weights = True

    def __post_init__(self) -> None:
        check_settings(self, coefficient="[0, inf)", scale="[0, inf)", gram="rows smaller")

    def check(self, state: State) -> None:
        """Raise UserError for targets that a net does not have, shards, and Gram matrices beyond LARGEST_GRAM rows."""
        super().check(state)
        for net in state.nets.values():
            for key, view in self.weights(net).items():
                rows, columns = view.matrices(net.get_parameter(key)).shape[-2:]
                size = min(rows, columns) if self.gram == "smaller" else rows
                if size > LARGEST_GRAM:
                    wrong = f"parseval: {key} would need a {size} x {size} Gram matrix at every step"
                    raise UserError(f"{wrong}: use gram=smaller, or leave it out with targets='all,-{key}'")

    def penalty(self, state: State) -> Tensor | float:
        if self.coefficient == 0.0:
            return 0.0
        total: Any = 0.0
        for net in state.nets.values():
            matrices = [view.matrices(net.get_parameter(key)) for key, view in self.weights(net).items()]
            if self.gram == "smaller":
                matrices = [each.mT if each.shape[-2] > each.shape[-1] else each for each in matrices]
            grams = [each @ each.mT for each in matrices]
            goals = [self.scale * torch.eye(g.shape[-1], dtype=g.dtype, device=g.device) for g in grams]
            total = total + sum(_squared_sums(grams, goals))
            norms = (m for m in net.modules() if is_norm(m)) if self.norms else ()
            found = dict.fromkeys(getattr(norm, "weight", None) for norm in norms)  # each once
            gains: Any = [gain for gain in found if isinstance(gain, nn.Parameter)]
            if gains:
                total = total + sum(_squared_sums(torch._foreach_mul(gains, gains), self.scale))
        return self.coefficient * total


def _squared_sums(values: Any, goals: Any) -> list[Tensor]:
    """Return sum (value - goal)^2 of each tensor."""
    distances = torch._foreach_sub(values, goals)
    return [square.sum() for square in torch._foreach_mul(distances, distances)]
