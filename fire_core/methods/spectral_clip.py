"""The dial between no intervention and FIRE: singular values clipped to an interval, singular vectors kept."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fire_core.engine import Treated
from fire_core.errors import UserError, check_settings
from fire_core.methods.controls import control
from fire_core.methods.fire import Projection
from fire_core.methods.method import PORT, register
from fire_core.projection import official_scales
from fire_core.report import Report
from fire_core.solvers.polar import polar
from fire_core.targets import Target


def spectral_clip(
    model: nn.Module, low: float = 0.0, high: float = math.inf, *, unit: str = "scale", **options: Any
) -> Report:
    """Replace every target U S V^T of `model` by U min(max(S, low), high) V^T, in place, and return the report.

    U V^T is the exact polar factor of `fire_core.polar`, which also says in which directions lost rank is raised. With
    low = high = 1 the result is that of the exact projection; matrices with all singular values inside keep their bits.

    Args:
        low, high: bounds, 0 <= low <= high and 0 < high; high may be infinite.
        unit: what the bounds count in: "scale" is FIRE's scale of each matrix, sqrt(out / in) / taps; "absolute" is 1.
        options: `targets`, `degenerate`, `min_norm` and `initial`, as in `fire`.
    Raises: UserError for wrong bounds, and as `fire` does.
    """
    SpectralClip(low=low, high=high, unit=unit)  # checks them

    def treat(stack: Tensor, group: list[Target]) -> Treated:
        scale = official_scales(group, stack) if unit == "scale" else torch.ones_like(stack[:, :1, :1])
        if low == high:
            factor, *figures = polar(stack, "exact")
            return Treated(factor * (scale * low), None, *figures)
        factor, _, iterations, completed = polar(stack.double(), "exact")
        clipped = clip(stack, factor, scale * low, scale * high)
        return Treated(clipped, iterations=iterations, completed=completed)

    return control(model, treat, "spectral_clip", **options)


def clip(matrices: Tensor, factors: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return matrices (n, out, in) with their singular values clipped to [low, high] (n, 1, 1).

    factors: their U V^T, float64. With Q the factor of a tall W, Q^T W = V S V^T is symmetric, and the result is
    Q V clip(S) V^T.
    """
    wide = matrices.shape[-2] < matrices.shape[-1]
    tall, factor = (each.mT if wide else each for each in (matrices.double(), factors))
    inner = factor.mT @ tall
    singular, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    singular = singular.clamp_min(0.0).unsqueeze(-2)
    wanted = singular.clamp(low.double(), high.double())
    clipped = (factor @ vectors * wanted) @ vectors.mT
    inside = (wanted == singular).all(dim=-1, keepdim=True)
    return torch.where(inside, matrices, (clipped.mT if wide else clipped).to(matrices))


@register
@dataclass
class SpectralClip(Projection):
    """Calls `spectral_clip`: how much isometry is needed, and at which end of the spectrum?

    low = high = 1 is `fire_exact`; low = 0 with high = inf is `none`; low = 0 alone is `cap`. Cost: for each matrix, an SVD
    in float64 and a symmetric eigendecomposition of the smaller side.
    """

    low: float = 0.5
    high: float = 2.0
    unit: str = "scale"

    name = "spectral_clip"
    summary = "the dial: singular values clipped to an interval around FIRE's scale"
    source = "control of this suite"
    function = spectral_clip

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.low <= self.high and self.high > 0 and self.low < math.inf):
            wrong = f"low={self.low!r}, high={self.high!r}"
            raise UserError(f"{wrong}: give 0 <= low <= high, with low finite and high above 0")
        check_settings(self, unit="scale absolute")


@register
@dataclass
class Cap(Projection):
    """Calls `spectral_clip` with the upper bound alone: large singular values are lowered, the others stay."""

    high: float = 1.0
    unit: str = "scale"

    name = "cap"
    summary = "singular values above a multiple of FIRE's scale lowered to it, the others kept"
    source = "this suite"
    function = spectral_clip

    def __post_init__(self) -> None:
        super().__post_init__()
        SpectralClip(low=0.0, high=self.high, unit=self.unit)  # checks them


@register
@dataclass
class SingularClip(SpectralClip):
    """`spectral_clip` with the interval of SingularClip, without a scale.

    No code of the authors is known; the rule is that of a third party, which treats every Linear layer of the critics at
    the start of each task and every 200,000 steps in between. Here it acts at boundaries, on all `targets`.
    """

    low: float = 0.25
    high: float = 4.0
    unit: str = "absolute"

    name = "singular_clip"
    title = "SingularClip"
    summary = "singular values clipped to [0.25, 4]"
    source = "2026 (SingularClip, arXiv 2608.18319)"
    proven_by = PORT
