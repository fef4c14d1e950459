"""Parseval regularisation: keep the rows of every weight near orthonormal during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fire_core.errors import UserError, check_range
from fire_core.methods.method import Method, register
from fire_core.state import State
from fire_core.targets.walk import NORMS

LARGEST_GRAM = 16384


@register
@dataclass
class Parseval(Method):
    """Adds coefficient * sum ||W W^T - scale I||_F^2 over the weights W to the loss.

    A weight is taken as one matrix (out, everything else), and a stack of matrices as these matrices.

    Args:
        norms: add ||w^2 - scale||^2 for the gains w of norm layers, as the FIRE code does. A norm layer of your own
            needs the attribute `is_norm = True`.
        gram: "rows" is W W^T as published, with which the penalty of a weight with more rows than columns cannot become
            0; "smaller" takes the smaller of the two Gram matrices.
        targets: the weights, a rule of `find_targets`.

    Cost: one product W W^T per weight and step, with 2 out^2 in operations forward and twice as many backward.
    """

    coefficient: float = 1e-3
    scale: float = 1.0
    norms: bool = True
    gram: str = "rows"
    targets: str | list[str] = "all"

    name: ClassVar[str] = "parseval"
    title: ClassVar[str] = "Parseval"
    summary: ClassVar[str] = "orthogonality penalty on all weights"
    source: ClassVar[str] = "Chung et al. 2024 (arXiv 2412.07224), Eq. 4; Cisse et al. 2017"
    off: ClassVar[dict[str, Any] | None] = {"coefficient": 0.0}

    def __post_init__(self) -> None:
        check_range(self, "[0, inf)", "coefficient", "scale")
        if self.gram not in ("rows", "smaller"):
            raise UserError(f"gram={self.gram!r}: choose 'rows' (published) or 'smaller'")

    def check(self, state: State) -> None:
        """Raise UserError for targets that a net does not have, and for Gram matrices beyond LARGEST_GRAM rows."""
        for net in state.nets.values():
            parameters = dict(net.named_parameters())
            for key, view in self.weights(net).items():
                rows, columns = view.matrices(parameters[key]).shape[-2:]
                size = min(rows, columns) if self.gram == "smaller" else rows
                if size > LARGEST_GRAM:
                    raise UserError(
                        f"parseval: {key} would need a {size} x {size} Gram matrix at every step: use gram=smaller, or "
                        f"leave it out with targets='all,-{key}'"
                    )

    def penalty(self, state: State) -> Tensor | float:
        """Return the penalty over all nets."""
        if self.coefficient == 0.0:
            return 0.0
        total: Any = 0.0
        for net in state.nets.values():
            parameters, weights = dict(net.named_parameters()), self.weights(net)
            total = total + sum(self.of(view.matrices(parameters[key])) for key, view in weights.items())
            gains = self._gains(net) if self.norms else []
            total = total + sum((gain.square() - self.scale).square().sum() for gain in gains)
        return self.coefficient * total

    def of(self, matrices: Tensor) -> Tensor:
        """Return ||W W^T - scale I||_F^2 of a matrix, or the sum over matrices (..., out, in)."""
        if self.gram == "smaller" and matrices.shape[-2] > matrices.shape[-1]:
            matrices = matrices.mT
        gram = matrices @ matrices.mT
        return (gram - torch.diag_embed(gram.new_full(gram.shape[:-1], self.scale))).square().sum()

    def _gains(self, net: nn.Module) -> list[Tensor]:
        """Return the gains of the norm layers, once each."""
        norms = (m for m in net.modules() if isinstance(m, NORMS) or getattr(m, "is_norm", False))
        gains = (getattr(m, "weight", None) for m in norms)
        return list({id(gain): gain for gain in gains if isinstance(gain, nn.Parameter)}.values())
