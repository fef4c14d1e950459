"""fire(model): move every weight matrix to the nearest orthogonal one, in place, and report what was done.

Han et al., "FIRE: Frobenius-Isometry Reinitialization", ICLR 2026, Eq. 4-5 and Algorithm 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fire_core.engine import Degenerate, Treated, matrices_of, table_of, treat_model
from fire_core.errors import UserError, check_settings, did_you_mean
from fire_core.report import Report
from fire_core.solvers.polar import ITERATIONS, Normalize, Solver, check_matrices, check_solver, polar, solve
from fire_core.targets import Target, shorten
from fire_core.targets.model_targets import overlaps_itself
from fire_core.wrapped_models import unwrap_with

Scale = Literal["official", "none", "initial"]


@dataclass(frozen=True)
class FireSettings:
    """All settings of `fire` except the choice of matrices. Wrong values raise UserError when the object is created.

    Args:
        solver: "newton_schulz" is the published algorithm, *not* a projection to a tolerance: read `dfi_factor` in the
            report. "exact" is the orthogonal polar factor to `tolerance`, "quintic" Muon's iteration (see `polar`).
        iterations, normalize, tolerance: see `polar`. exact accepts the defaults of the first two only.
        scale: of the orthogonal factor. "official" is sqrt(out / in), divided by the number of taps for convolutions;
            "none" is 1; "initial" gives each matrix its Frobenius norm at initialisation.
        variance_factor: with scale="initial", the mean square of the result's entries over that at initialisation.
        strength: the result is W + strength * (fire(W) - W); 1 is FIRE.
        degenerate: what to do with matrices that are zero or have a Frobenius norm below `min_norm`. "raise" names them
            before anything is changed; "skip" leaves them, with the reason in the report. NaN and infinity always raise.
    """

    solver: Solver = "newton_schulz"
    iterations: int = ITERATIONS
    normalize: Normalize = "frobenius"
    scale: Scale = "official"
    variance_factor: float = 1.0
    strength: float = 1.0
    degenerate: Degenerate = "raise"
    min_norm: float = 0.0
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        check_solver(self.solver, self.iterations, self.normalize, self.tolerance)
        check_settings(self, scale=" ".join(get_args(Scale)), degenerate=" ".join(get_args(Degenerate)))
        check_settings(self, strength="[0, 1]", variance_factor="(0, inf)", min_norm="[0, inf)")
        if self.variance_factor != 1.0 and self.scale != "initial":
            wrong = f"variance_factor={self.variance_factor!r} has no effect with scale={self.scale!r}"
            raise UserError(f"{wrong}: choose scale='initial'")

    @classmethod
    def of(cls, **settings: Any) -> "FireSettings":
        """Return the settings given by name. Raises UserError for an unknown name, with the nearest known one."""
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in settings if name not in known]:
            advice = did_you_mean(unknown[0], [*known, "targets"])
            raise UserError(f"fire has no setting {unknown[0]!r}{advice}")
        return cls(**settings)


def project(
    stack: Tensor, group: list[Target], settings: FireSettings, initial: Mapping[str, Tensor] | None = None
) -> Treated:
    """Return FIRE's new values of a stack; raise UserError where scale="initial" has no starting weights, or zero ones."""
    measured = settings.solver == "exact" or settings.strength < 1.0
    new, residual, iterations, completed = solve(
        stack, settings.solver, settings.iterations, settings.normalize, settings.tolerance, measured
    )
    scale = torch.ones_like(stack[:, :1, :1])
    if settings.scale == "official":
        scale = official_scales(group, stack)
    elif settings.scale == "initial":
        goal = _initial_norms(group, stack, initial) * settings.variance_factor**0.5
        scale = goal / torch.linalg.matrix_norm(new, keepdim=True)
    new = new.mul_(scale)
    if settings.strength < 1.0:
        new = torch.lerp(stack, new, settings.strength)
    return Treated(new, None if measured else scale, residual if measured else None, iterations, completed)


def official_scales(group: list[Target], like: Tensor) -> Tensor:
    """Return the official scale of each target, shaped to multiply a stack (count, out, in)."""
    return torch.tensor([t.scale for t in group], dtype=like.dtype, device=like.device)[:, None, None]


def _initial_norms(group: list[Target], stack: Tensor, initial: Mapping[str, Tensor] | None) -> Tensor:
    """Return the Frobenius norms of the starting matrices, (count, 1, 1)."""
    known = initial or {}
    if missing := [t.parameter for t in group if t.parameter not in known]:
        wrong = f"scale='initial' needs the starting weights of {shorten(missing)}"
        raise UserError(f"{wrong}: give initial=, a copy of state_dict()")
    norms = torch.linalg.matrix_norm(matrices_of(group, known, stack), keepdim=True)
    if bad := [t.name for t, norm in zip(group, norms.flatten().tolist()) if not 0 < norm < math.inf]:
        wrong = f"scale='initial': the starting weights of {shorten(bad)} are zero or not finite"
        raise UserError(f"{wrong}, and this net was not changed; exclude these matrices with targets")
    return norms


def fire(
    model: nn.Module,
    *,
    targets: Any = "all",
    example: Any = None,
    initial: Mapping[str, Tensor] | None = None,
    dry_run: bool = False,
    group: "torch.distributed.ProcessGroup | None" = None,
    solver: Solver = "newton_schulz",
    iterations: int = ITERATIONS,
    normalize: Normalize = "frobenius",
    scale: Scale = "official",
    variance_factor: float = 1.0,
    strength: float = 1.0,
    degenerate: Degenerate = "raise",
    min_norm: float = 0.0,
    tolerance: float = 1e-8,
) -> Report:
    """Replace every target matrix W of `model` by scale * polar(W), in place.

    The result is deterministic and needs no gradients. Biases, normalisation layers, embeddings (unless tied to a
    Linear) and buffers stay as they are. If several processes share the model (FSDP2, DistributedDataParallel), every
    rank calls this function, and all of them treat the model together.

    Args:
        targets: the matrices to treat: a preset, a pattern, a list of these, a callable (see `find_targets`), or a
            TargetTable.
        example: a batch that shows how fused weights are cut (see `find_targets`). Its values do not matter.
        initial: starting weights by parameter name. For scale="initial", and `sfe_relative` in the report.
        dry_run: write nothing; the report says what would be done.
        group: process group whose ranks hold plain replicas of this model, to share the work among them.
        solver, iterations, normalize, scale, variance_factor, strength, degenerate, min_norm, tolerance: `FireSettings`.
    Returns: a Report with one row per target, skipped ones included.
    Raises: UserError for wrong settings, an empty target set, zero matrices (see degenerate), NaN or infinite weights
        or results. Nothing is written then.
    """
    chosen = FireSettings(
        solver, iterations, normalize, scale, variance_factor, strength, degenerate, min_norm, tolerance
    )
    initial = initial if initial is None else unwrap_with(model, initial)[1]
    table, treatment = table_of(model, targets, example), partial(project, settings=chosen, initial=initial)
    options: Any = {"degenerate": degenerate, "min_norm": min_norm, "initial": initial, "dry_run": dry_run}
    return treat_model(model, table, treatment, action="projected", method="fire", group=group, **options)


def project_(weight: Tensor, *, solver: str = "exact", scale: float | None = None, **settings: Any) -> Tensor:
    """Move one weight to the nearest orthogonal matrix, in place, and return it, as `nn.init.orthogonal_` draws one.

    Args:
        weight: (out, in), or (out, in, kernel...) with each spatial tap as a matrix of its own.
        scale: factor by which the orthogonal matrix is multiplied; None is the published sqrt(out / in) / taps.
        solver, settings: as in `polar`.
    Raises: UserError for what is not a dense weight of at least two dimensions, for zero, NaN or infinite matrices,
        and for a result that its type cannot hold. The weight is as before then.
    """
    check_matrices(weight, "weight")
    if weight.is_inference() and not torch.is_inference_mode_enabled():
        raise UserError("weight was made under torch.inference_mode and cannot be changed outside")
    if overlaps_itself(weight):
        raise UserError("several entries of weight share one place in memory: clone it first")
    with torch.no_grad():
        taps = weight.flatten(2).movedim(2, 0) if weight.ndim > 2 else weight[None]
        rows, columns = taps.shape[1:]
        scale = (rows / columns) ** 0.5 / len(taps) if scale is None else scale
        result = (polar(taps, solver, **settings).factor * scale).to(weight.dtype)
        if not bool(result.isfinite().all()):
            wrong = f"scale={scale!r} makes values that {weight.dtype} cannot hold"
            raise UserError(f"{wrong}: choose a smaller one (nothing was written)")
        weight.copy_((result.movedim(0, 2) if weight.ndim > 2 else result[0]).reshape(weight.shape))
    return weight
