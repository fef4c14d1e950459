"""Parseval regularisation: keep the rows of every weight near orthonormal during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fire_core.errors import UserError, check_range
from fire_core.methods.method import Method, register, stacked_weights
from fire_core.phases import State
from fire_core.targets import find_targets
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
    summary: ClassVar[str] = "orthogonality penalty on all weights"
    source: ClassVar[str] = "Chung et al. 2024 (arXiv 2412.07224), Eq. 4; Cisse et al. 2017"

    def __post_init__(self) -> None:
        check_range(self, "[0, inf)", "coefficient")
        if self.gram not in ("rows", "smaller"):
            raise UserError(f"gram={self.gram!r}: choose 'rows' (published) or 'smaller'")
        self._names: WeakKeyDictionary[nn.Module, tuple[list[str], list[str], set[str]]] = WeakKeyDictionary()

    def check(self, state: State) -> None:
        """Raise UserError for targets that a net does not have, and for Gram matrices beyond LARGEST_GRAM rows."""
        for net in state.nets.values():
            self._choose(net)

    def penalty(self, state: State) -> Tensor | float:
        """Return the penalty over all nets."""
        if self.coefficient == 0.0:
            return 0.0
        total: Any = 0.0
        for net in state.nets.values():
            if net not in self._names:
                self._names[net] = self._choose(net)
            parameters = dict(net.named_parameters())
            matrices, gains, stacks = self._names[net]
            total = total + sum(self.of_weight(parameters[key], key in stacks) for key in matrices)
            total = total + sum((parameters[key].square() - self.scale).square().sum() for key in gains)
        return self.coefficient * total

    def of_weight(self, weight: Tensor, stacked: bool = False) -> Tensor:
        """Return ||W W^T - scale I||_F^2 of a weight as (out, everything else), or the sum over a stack of matrices."""
        matrix = weight if stacked else weight.flatten(1)
        if self.gram == "smaller" and matrix.shape[-2] > matrix.shape[-1]:
            matrix = matrix.mT
        gram = matrix @ matrix.mT
        return (gram - torch.diag_embed(gram.new_full(gram.shape[:-1], self.scale))).square().sum()

    def _choose(self, net: nn.Module) -> tuple[list[str], list[str], set[str]]:
        """Return the names of the weights, of the gains, and of those weights that are stacks of matrices."""
        matrices = sorted({target.parameter for target in find_targets(net, self.targets).included})
        parameters, stacks = dict(net.named_parameters()), set(stacked_weights(net))
        for key in matrices:
            weight = parameters[key]
            rows, columns = weight.shape[1:] if key in stacks else weight.flatten(1).shape
            size = min(rows, columns) if self.gram == "smaller" else rows
            if size > LARGEST_GRAM:
                raise UserError(
                    f"parseval: {key} would need a {size} x {size} Gram matrix at every step: use gram=smaller, or "
                    f"leave it out with targets='all,-{key}'"
                )
        gains = [
            f"{path}.weight"
            for path, module in net.named_modules()
            if self.norms and (isinstance(module, NORMS) or getattr(module, "is_norm", False))
        ]
        return matrices, [key for key in gains if key in parameters], stacks
