"""Controls that separate the parts of FIRE: the norms of the weights, their directions, and the flat spectrum.

Their other options (`targets`, `degenerate`, `min_norm`, `initial`), reports and errors are those of `fire`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fire_core.engine import Treated, Treatment, table_of, treat_model
from fire_core.methods.fire import Projection
from fire_core.methods.method import register
from fire_core.projection import FireSettings, official_scales
from fire_core.report import Report
from fire_core.seeding import derive
from fire_core.solvers.polar import polar
from fire_core.state import State
from fire_core.targets import Target

ITERATIONS, NORMALIZE = FireSettings.iterations, FireSettings.normalize


def control(model: nn.Module, treatment: Treatment, name: str, targets: Any = "all", **others: Any) -> Report:
    """Run `treatment` on the targets of `model` and return the report under the name of a control."""
    return treat_model(model, table_of(model, targets), treatment, action=name, method=name, **others)


def with_norm_of(stack: Tensor, matrices: Tensor) -> Tensor:
    """Return `matrices` (count, out, in), each with the Frobenius norm of that in `stack`."""
    norm = torch.linalg.matrix_norm(stack, keepdim=True)
    return matrices * (norm / torch.linalg.matrix_norm(matrices, keepdim=True))


def rescale(
    model: nn.Module, *, iterations: int = ITERATIONS, normalize: str = NORMALIZE, **others: Any
) -> Report:
    """Scale every target of `model` to the Frobenius norm that `fire` would give it, in place.

    iterations, normalize: settings of "newton_schulz", whose result has that norm.
    """

    def treat(stack: Tensor, group: list[Target]) -> Treated:
        goal = polar(stack, "newton_schulz", iterations=iterations, normalize=normalize).factor
        return Treated(with_norm_of(goal * official_scales(group, stack), stack))

    return control(model, treat, "rescale", **others)


def keep_norm(
    model: nn.Module,
    *,
    solver: str = "exact",
    iterations: int = ITERATIONS,
    normalize: str = NORMALIZE,
    **others: Any,
) -> Report:
    """Replace every target W of `model` by its polar factor, scaled to the Frobenius norm of W, in place.

    solver, iterations, normalize: as in `fire`, but for the default "exact".
    """

    def treat(stack: Tensor, group: list[Target]) -> Treated:
        factor, *figures = polar(stack, solver, iterations=iterations, normalize=normalize)
        return Treated(with_norm_of(stack, factor), None, *figures)

    return control(model, treat, "keep_norm", **others)


def random_orthogonal(model: nn.Module, *, generator: torch.Generator | None = None, **others: Any) -> Report:
    """Replace every target of `model` by a random orthogonal matrix with the official scale of `fire`, in place.

    Each matrix is drawn on the CPU from the Haar measure (QR of a Gaussian matrix, with positive diagonal of R). Its
    seed depends on the target's name, so device and number of processes do not matter.

    generator: CPU generator, from which one number is drawn; None is the global one.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))

    def draw(target: Target) -> Tensor:
        stream = torch.Generator().manual_seed(derive(seed, "random_orthogonal", target.name))
        shape = sorted(target.shape, reverse=True)
        return torch.randn(shape, generator=stream, dtype=torch.float64, device="cpu")

    def treat(stack: Tensor, group: list[Target]) -> Treated:
        q, r = torch.linalg.qr(torch.stack([draw(target) for target in group]))
        q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        factor = (q if stack.shape[-2] >= stack.shape[-1] else q.mT).to(stack)
        scale = official_scales(group, stack)
        return Treated(factor * scale, scale)

    return control(model, treat, "random_orthogonal", **others)


@register
@dataclass
class Rescale(Projection):
    """Calls `rescale`: FIRE's norms, old directions, FIRE's cost. If it does as well, the norms explain FIRE's gain."""

    iterations: int = ITERATIONS
    normalize: str = NORMALIZE

    name = "rescale"
    summary = "control: the norm that FIRE would give, old directions kept"
    source = "control of this suite"
    function = rescale


@register
@dataclass
class KeepNorm(Projection):
    """Calls `keep_norm`: FIRE's directions with the old norms. If it does as well as FIRE, the norms do not matter.

    The directions are those of `fire_exact`; solver=newton_schulz takes those of `fire`. Cost: that of FIRE.
    """

    solver: str = "exact"
    iterations: int = ITERATIONS
    normalize: str = NORMALIZE

    name = "keep_norm"
    summary = "control: FIRE's directions, the norm of every weight kept"
    source = "control of this suite"
    function = keep_norm


@register
@dataclass
class RandomOrthogonal(Projection):
    """Calls `random_orthogonal`: FIRE's scale. If it does as well as FIRE, the old directions do not matter.

    Cost: one QR decomposition per target.
    """

    name = "random_orthogonal"
    summary = "control: random orthogonal matrix at FIRE's scale, nothing kept"
    source = "control of this suite; Saxe et al. 2014 (orthogonal initialisation)"
    function = random_orthogonal

    def project(self, net: nn.Module, state: State, **settings: Any) -> Report:
        return random_orthogonal(net, generator=state.generator, **settings)
