"""fire(model): move every weight matrix to the nearest orthogonal one, in place, and report what was done.

Han et al., "FIRE: Frobenius-Isometry Reinitialization", ICLR 2026, Eq. 4-5 and Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fire_core.engine import Degenerate, FireSettings, Scale, project
from fire_core.errors import UserError
from fire_core.report import Report
from fire_core.solvers.polar import ITERATIONS, Normalize, Solver, check_matrices, polar
from fire_core.targets.walk import overlaps_itself
from fire_core.wrapped_models import table_of, treat_model, unwrap_with

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def fire(
    model: nn.Module,
    *,
    targets: Any = "all",
    example: Any = None,
    initial: Mapping[str, Tensor] | None = None,
    dry_run: bool = False,
    group: ProcessGroup | None = None,
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
        initial: starting weights by parameter name. scale="initial" needs them; they also let the report give the
            distance moved relative to a full reset.
        dry_run: write nothing; the report says what would be done.
        group: process group whose ranks hold plain replicas of this model, to share the work among them.
        solver, iterations, normalize, scale, variance_factor, strength, degenerate, min_norm, tolerance: see
            `FireSettings`.
    Returns: a Report with one row per target, skipped ones included.
    Raises: UserError for wrong settings, an empty target set, zero matrices (see degenerate), NaN or infinite weights
        or results. Nothing is written then.
    """
    chosen = FireSettings(
        solver, iterations, normalize, scale, variance_factor, strength, degenerate, min_norm, tolerance
    )
    _, initial = unwrap_with(model, initial)
    return treat_model(
        model,
        table_of(model, targets, example),
        partial(project, settings=chosen, initial=initial),
        action="projected",
        method="fire",
        degenerate=degenerate,
        min_norm=min_norm,
        initial=initial,
        dry_run=dry_run,
        group=group,
    )


def project_(weight: Tensor, *, solver: str = "exact", scale: float | None = None, **settings: Any) -> Tensor:
    """Move one weight to the nearest orthogonal matrix, in place, and return it.

    It is called as `torch.nn.init.orthogonal_` is, which draws a random orthogonal matrix instead.

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
        factor = polar(taps, solver, **settings).factor
        scale = (rows / columns) ** 0.5 / len(taps) if scale is None else scale
        result = (factor * scale).to(weight.dtype)
        if not bool(result.isfinite().all()):
            raise UserError(
                f"scale={scale!r} makes values that {weight.dtype} cannot hold, and nothing was written: choose a finite, "
                "smaller one"
            )
        weight.copy_((result.movedim(0, 2) if weight.ndim > 2 else result[0]).reshape(weight.shape))
    return weight
