"""The dial between no intervention and FIRE: singular values clipped to an interval, singular vectors kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fire_core.engine import official_scales
from fire_core.errors import UserError
from fire_core.methods.fire import Projection
from fire_core.methods.method import OWN, PORT, register
from fire_core.report import Report, Treated
from fire_core.solvers.polar import polar
from fire_core.state import State
from fire_core.targets import Target
from fire_core.wrapped_models import table_of, treat_model

UNITS = ("scale", "absolute")


def spectral_clip(
    model: nn.Module,
    low: float = 0.0,
    high: float = math.inf,
    *,
    unit: str = "scale",
    targets: Any = "all",
    **options: Any,
) -> Report:
    """Replace every target U S V^T of `model` by U min(max(S, low), high) V^T, in place.

    U V^T is the exact polar factor of `fire_core.polar`, which also says in which directions lost rank is raised. With
    low = high = 1 the result is that of the exact projection; matrices whose singular values lie in the interval keep
    their bits.

    Args:
        low, high: bounds, 0 <= low <= high and 0 < high; high may be infinite.
        unit: what the bounds count in: "scale" is FIRE's scale of each matrix, sqrt(out / in) / taps; "absolute" is 1.
        targets: as in `fire`.
        options: `degenerate`, `min_norm` and `initial`, as in `fire`.
    Returns: a Report with one row per target.
    Raises: UserError for wrong bounds, and as `fire` does.
    """
    check_bounds(low, high, unit)

    def treat(stack: Tensor, group: list[Target]) -> Treated:
        scale = official_scales(group, stack) if unit == "scale" else torch.ones_like(stack[:, :1, :1])
        if low == high:
            factor, _, iterations, completed = polar(stack, "exact", measure=False)
            return Treated(factor * (scale * low), factor, iterations, completed)
        factor, _, iterations, completed = polar(stack.double(), "exact", measure=False)
        return Treated(clip(stack, factor, scale * low, scale * high), None, iterations, completed)

    return treat_model(
        model, table_of(model, targets), treat, action="clipped", method="spectral_clip", **options
    )


def clip(matrices: Tensor, factors: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return matrices (n, out, in) with their singular values clipped to [low, high] (n, 1, 1).

    factors: their U V^T, float64. With Q the factor of a tall W, Q^T W = V S V^T is symmetric, and the result is
    Q V clip(S) V^T.
    """
    wide = matrices.shape[-2] < matrices.shape[-1]
    tall, factor = (each.mT if wide else each for each in (matrices.double(), factors))
    inner = factor.mT @ tall
    singular, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    singular = singular.clamp_min(0.0)
    least, most = low.double().squeeze(-1), high.double().squeeze(-1)
    clipped = (factor @ vectors * singular.clamp(least, most).unsqueeze(-2)) @ vectors.mT
    inside = ((singular >= least) & (singular <= most)).all(dim=-1)[:, None, None]
    return torch.where(inside, matrices, (clipped.mT if wide else clipped).to(matrices))


def check_bounds(low: float, high: float, unit: str) -> None:
    """Raise UserError unless 0 <= low <= high, 0 < high, low is finite, and the unit is known."""
    if not (0 <= low <= high and high > 0 and low < math.inf):
        raise UserError(
            f"low={low!r}, high={high!r}: give 0 <= low <= high, with low finite and high above 0"
        )
    if unit not in UNITS:
        raise UserError(f"unit={unit!r}: choose 'scale' (FIRE's scale of each matrix) or 'absolute'")


@register
@dataclass
class SpectralClip(Projection):
    """Calls `spectral_clip`: how much isometry is needed, and at which end of the spectrum?

    low = high = 1 is `fire_exact`; low = 0 with high = inf is `none`; low = 0 alone is `cap`. Cost: that of `fire_exact`
    and a symmetric eigendecomposition of the smaller side of each matrix.
    """

    low: float = 0.5
    high: float = 2.0
    unit: str = "scale"

    name: ClassVar[str] = "spectral_clip"
    summary: ClassVar[str] = "the dial: singular values clipped to an interval around FIRE's scale"
    source: ClassVar[str] = "control of this suite"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self.low, self.high, self.unit)

    def project(self, net: nn.Module, state: State, where: dict[str, Any]) -> Report:
        return spectral_clip(net, self.low, self.high, unit=self.unit, **where, **self.settings())


@register
@dataclass
class Cap(Projection):
    """Calls `spectral_clip` with the upper bound alone: large singular values are lowered, the others stay."""

    high: float = 1.0
    unit: str = "scale"

    name: ClassVar[str] = "cap"
    summary: ClassVar[str] = "singular values above a multiple of FIRE's scale lowered to it, the others kept"
    source: ClassVar[str] = "this suite"
    proven_by: ClassVar[str] = OWN

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(0.0, self.high, self.unit)

    def project(self, net: nn.Module, state: State, where: dict[str, Any]) -> Report:
        return spectral_clip(net, 0.0, self.high, unit=self.unit, **where, **self.settings())


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

    name: ClassVar[str] = "singular_clip"
    title: ClassVar[str] = "SingularClip"
    summary: ClassVar[str] = "singular values clipped to [0.25, 4]"
    source: ClassVar[str] = "2026 (SingularClip, arXiv 2608.18319)"
    proven_by: ClassVar[str] = PORT
