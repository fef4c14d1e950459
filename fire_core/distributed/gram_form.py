"""Projection of a tall matrix W (m, n), m >= n, that needs only its Gram matrix G = W^T W.

The polar factor is W G^(-1/2), and a step of the published iteration is X <- X (3/2 I - 1/2 X^T X) from X = W / norm.
Both are therefore W times an n x n matrix that depends on G only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fire_core.report import Row
from fire_core.settings import FireSettings
from fire_core.targets import Target

MOST_CONDITION = 1e5


@dataclass
class GramProjection:
    """Change of a matrix, W_new = W @ factor, and its report row, both computed from the Gram matrix.

    factor: (n, n), float64. Its entries are up to 1 / sigma_min, so W @ factor must be computed in float64 too.
    scale: W_new is scale times the solver's orthogonal factor; None if it is not a multiple of that (strength below 1).
    limit: largest residual that the settings allow.
    """

    factor: Tensor
    row: Row
    scale: float | None = None
    limit: float = math.inf

    def measure(self, gram: Tensor) -> None:
        """Update the row to the weights as stored, whose Gram matrix W_new^T W_new is `gram` (n, n)."""
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        self.row.dfi_after = float((gram - identity).square().sum())
        self.row.norm_after = float(gram.trace().sqrt())
        if self.scale is not None:
            self.row.dfi_factor = self.row.residual = float((gram / self.scale**2 - identity).square().sum())

    def misses_its_limit(self) -> bool:
        """Return whether the weights as stored are farther from orthogonal than the settings allow."""
        return self.scale is not None and self.row.residual is not None and self.row.residual > self.limit


def gram_projection(
    values: Tensor, vectors: Tensor, target: Target, settings: FireSettings
) -> GramProjection | None:
    """Return the change that `fire` makes to W, or None if the condition number of W is above 1e5.

    values (n,), ascending, and vectors (n, n) are the eigenvalues and eigenvectors of G in float64. settings are those
    of `fire`; the solvers "exact" and "fast" both give the polar factor.
    """
    if not (values[0] > 0 and values[-1] <= MOST_CONDITION**2 * values[0]):
        return None
    singular = values.sqrt()
    if settings.solver == "newton_schulz":
        projected = singular / (singular.norm() if settings.normalize == "frobenius" else singular[-1])
        for _ in range(settings.iterations):
            projected = 1.5 * projected - 0.5 * projected**3
    else:
        projected = torch.ones_like(singular)
    scale = target.scale if settings.scale == "official" else 1.0
    new = singular + settings.strength * (scale * projected - singular)
    factor = (vectors * (new / singular)) @ vectors.mT
    row = Row(
        name=target.name,
        parameter=target.parameter,
        shape=target.shape,
        action="projected",
        reason=target.reason,
        dfi_before=_deviation(singular),
        dfi_after=_deviation(new),
        dfi_factor=_deviation(projected),
        sfe=float((new - singular).square().sum()),
        norm_before=float(singular.norm()),
        norm_after=float(new.norm()),
        iterations=settings.iterations if settings.solver == "newton_schulz" else 1,
        completed=False,
        residual=_deviation(projected),
    )
    limit = settings.tolerance * max(1.0, target.shape[1] / 768) if settings.solver == "exact" else math.inf
    return GramProjection(factor, row, scale if settings.strength == 1.0 else None, limit)


def _deviation(singular: Tensor) -> float:
    return float((singular.square() - 1).square().sum())
