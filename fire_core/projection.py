"""fire(model): move every weight matrix to the nearest orthogonal one, in place, and report what was done.

Han et al., "FIRE: Frobenius-Isometry Reinitialization", ICLR 2026, Eq. 4-5 and Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fire_core.distributed.gram_form import gram_projection
from fire_core.engine import Treated, Treatment, official_scales
from fire_core.errors import UserError
from fire_core.placement import apply_to_model, table_of, unwrap_with
from fire_core.report import Report
from fire_core.settings import Degenerate, FireSettings, Scale
from fire_core.solvers.polar import Normalize, Polar, Precision, Solver, polar
from fire_core.targets import Target

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def fire(
    model: nn.Module,
    *,
    targets: Any = "all",
    solver: Solver = FireSettings.solver,
    iterations: int = FireSettings.iterations,
    normalize: Normalize = FireSettings.normalize,
    scale: Scale = FireSettings.scale,
    variance_factor: float = FireSettings.variance_factor,
    strength: float = FireSettings.strength,
    degenerate: Degenerate = FireSettings.degenerate,
    min_norm: float = FireSettings.min_norm,
    tolerance: float = FireSettings.tolerance,
    precision: Precision = FireSettings.precision,
    stage_limit: float = FireSettings.stage_limit,
    initial: Mapping[str, Tensor] | None = None,
    dry_run: bool = False,
    group: ProcessGroup | None = None,
) -> Report:
    """Replace every target matrix W of `model` by scale * polar(W), in place.

    The result is deterministic and needs neither data nor gradients. Biases, normalisation layers, embeddings (unless
    tied to a Linear) and buffers stay as they are. If several processes share the model (FSDP2,
    DistributedDataParallel), every rank calls this function, and all of them treat the model together.

    The arguments that are not listed here are the fields of `FireSettings`, which describes them.

    Args:
        targets: the matrices to treat: a preset, a pattern, a list of these, a callable (see `find_targets`), or a
            TargetTable.
        initial: starting weights by parameter name. scale="initial" needs them; they also let the report give the
            distance moved relative to a full reset.
        dry_run: write nothing; the report says what would be done.
        group: process group whose ranks hold plain replicas of this model, to share the work among them.
    Returns: a Report with one row per target, skipped ones included.
    Raises: UserError for wrong settings, an empty target set, zero matrices (see degenerate), NaN or infinite weights.
    """
    settings = FireSettings(
        solver=solver,
        iterations=iterations,
        normalize=normalize,
        scale=scale,
        variance_factor=variance_factor,
        strength=strength,
        degenerate=degenerate,
        min_norm=min_norm,
        tolerance=tolerance,
        precision=precision,
        stage_limit=stage_limit,
    )
    _, initial = unwrap_with(model, initial)
    whole = settings.solver == "quintic" or settings.scale == "initial" or settings.min_norm > 0 or dry_run
    return apply_to_model(
        model,
        table_of(model, targets),
        treatment(settings, initial),
        gram=None if whole else partial(gram_projection, settings=settings),
        group=group,
        dry_run=dry_run,
        **engine_options(settings, initial),
    )


def project_(
    weight: Tensor,
    *,
    solver: Solver = "exact",
    iterations: int = FireSettings.iterations,
    normalize: Normalize = FireSettings.normalize,
    scale: float | None = None,
    tolerance: float = FireSettings.tolerance,
    precision: Precision = FireSettings.precision,
) -> Tensor:
    """Move one weight to the nearest orthogonal matrix, in place, and return it.

    It is called as `torch.nn.init.orthogonal_` is, which draws a random orthogonal matrix instead. Arguments that are not
    listed here are fields of `FireSettings`.

    Args:
        weight: (out, in), or (out, in, kernel...) with each spatial tap as a matrix of its own.
        scale: factor by which the orthogonal matrix is multiplied; None is the published sqrt(out / in) / taps.
        solver: as in `FireSettings`, but "exact" by default.
    Raises: UserError for a weight of fewer than two dimensions, and for zero, NaN or infinite matrices.
    """
    if weight.ndim < 2:
        raise UserError(
            f"a weight of shape {tuple(weight.shape)} holds no matrix: it needs at least two dimensions"
        )
    settings = FireSettings(
        solver=solver, iterations=iterations, normalize=normalize, tolerance=tolerance, precision=precision
    )
    with torch.no_grad():
        taps = weight.flatten(2).movedim(2, 0) if weight.ndim > 2 else weight[None]
        rows, columns = taps.shape[1:]
        result = _polar(taps, settings).factor
        result = result * ((rows / columns) ** 0.5 / len(taps) if scale is None else scale)
        weight.copy_((result.movedim(0, 2) if weight.ndim > 2 else result[0]).reshape(weight.shape))
    return weight


def _polar(stack: Tensor, settings: FireSettings) -> Polar:
    return polar(
        stack,
        settings.solver,
        iterations=settings.iterations,
        normalize=settings.normalize,
        tolerance=settings.tolerance,
        precision=settings.precision,
        measure=False,
    )


def treatment(settings: FireSettings, initial: Mapping[str, Tensor] | None = None) -> Treatment:
    """Return the function that `fire` applies to each stack of matrices (`fire_core.engine.Treatment`).

    Raises UserError if `initial` is no mapping, or is missing with scale="initial".
    """
    if initial is not None and not isinstance(initial, Mapping):
        raise UserError(
            f"initial is a {type(initial).__name__}: give the starting weights by parameter name, as state_dict() does"
        )
    if settings.scale == "initial" and initial is None:
        raise UserError("scale='initial' needs the starting weights: give initial=, a copy of state_dict()")

    def project(stack: Tensor, group: list[Target]) -> Treated:
        factor, residual, iterations, completed = _polar(stack, settings)
        scale: Tensor | None = None
        if settings.scale == "official":
            scale = official_scales(group, stack)
        elif settings.scale == "initial":
            goal = _initial_norms(group, stack, initial) * settings.variance_factor**0.5
            scale = goal / torch.linalg.matrix_norm(factor, keepdim=True)
        if settings.strength == 1.0 and scale is not None:
            return Treated(factor.mul_(scale), None, iterations, completed, residual, scale)
        goal = factor if scale is None else factor * scale
        new = goal if settings.strength == 1.0 else torch.lerp(stack, goal, settings.strength)
        return Treated(new, factor, iterations, completed, residual)

    return project


def engine_options(settings: FireSettings, initial: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Return the options of `fire_core.engine.apply` that follow from the settings."""
    return {
        "action": "projected",
        "method": "fire",
        "degenerate": settings.degenerate,
        "min_norm": settings.min_norm,
        "stage_limit": settings.stage_limit,
        "initial": initial,
    }


def _initial_norms(group: list[Target], stack: Tensor, initial: Mapping[str, Tensor] | None) -> Tensor:
    """Return the Frobenius norms of the starting matrices, (count, 1, 1). Raises UserError if one is missing."""
    missing = [t.parameter for t in group if initial is None or t.parameter not in initial]
    if missing or initial is None:
        raise UserError(
            f"scale='initial': initial holds no {', '.join(missing[:5])}; it is named as in state_dict()"
        )
    start = torch.stack([t.matrix(initial).to(stack) for t in group])
    return torch.linalg.matrix_norm(start, keepdim=True)
