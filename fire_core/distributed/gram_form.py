"""The projection of a tall matrix from its Gram matrix alone.

Legend: W (m, n) with m >= n, G = W^T W, X_0 = W / norm. The polar factor is W G^(-1/2) and a step of the published
iteration is X <- X (3/2 I - 1/2 X^T X), so both are W times an n x n matrix that depends on G only.
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
    """factor: (n, n) float64 with W_new = W @ factor; row: the report's line, computed from the Gram matrix.

    factor has entries up to 1 / sigma_min, so W @ factor wants float64 too. `scale` is what an isometry in W_new is
    multiplied with, None where W_new is not a multiple of the solver's factor (strength below 1). limit: largest residual
    that the settings allow.
    """

    factor: Tensor
    row: Row
    scale: float | None = None
    limit: float = math.inf

    def measure(self, gram: Tensor) -> None:
        """Put into the row what W_new^T W_new = `gram` (n, n) says of the weights as they are stored."""
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        self.row.dfi_after = float((gram - identity).square().sum())
        self.row.norm_after = float(gram.trace().sqrt())
        if self.scale is not None:
            self.row.dfi_factor = self.row.residual = float((gram / self.scale**2 - identity).square().sum())

    def misses_its_limit(self) -> bool:
        """Whether the weights as stored are farther from orthogonal than the settings allow."""
        return self.scale is not None and self.row.residual is not None and self.row.residual > self.limit


def gram_projection(
    values: Tensor, vectors: Tensor, target: Target, settings: FireSettings
) -> GramProjection | None:
    """The same change of W as `fire` makes, or None where the Gram matrix is too ill-conditioned for that.

    values, vectors: (n,) rising and (n, n), float64: eigenvalues and eigenvectors of G. settings: of `fire`.
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
