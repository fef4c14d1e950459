"""The engine: treat every target matrix of a mapping of tensors, in stacks of one shape, and report what was done.

The engine knows names and tensors only, so it works on a model, on a checkpoint file, and on the share of one rank.
FIRE is its treatment `fire_core.projection.project`.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fire_core.errors import UserError
from fire_core.measure.metrics import relative_squared_error
from fire_core.report import Report, Row
from fire_core.solvers.kernels import deviation_of_gram, smaller_gram
from fire_core.solvers.polar import STACK_BYTES
from fire_core.targets import Target, TargetTable, shorten
from fire_core.targets.walk import tied_to

Degenerate = Literal["raise", "skip"]


class Treated(NamedTuple):
    """New values of a stack of matrices (count, out, in), with what the solver told of each, (count,).

    scale: (count, 1, 1), where `matrices` are scale times a factor whose residual, its DfI, was not measured.
    """

    matrices: Tensor
    scale: Tensor | None = None
    residual: Tensor | None = None
    iterations: Tensor | None = None
    completed: Tensor | None = None


Treatment = Callable[[Tensor, list[Target]], Treated]
"""A function of a stack of matrices (count, out, in), float32 or float64, and their targets; it does not change them."""


def treat_tensors(
    parameters: Mapping[str, Tensor],
    table: TargetTable,
    treatment: Treatment,
    *,
    action: str,
    method: str = "",
    degenerate: Degenerate = "raise",
    min_norm: float = 0.0,
    initial: Mapping[str, Tensor] | None = None,
    dry_run: bool = False,
) -> Report:
    """Run `treatment` on all included targets, write the results in place, and return the report.

    Targets of one shape, device and type are treated in stacks. All results are computed, measured, and checked (that they
    are finite in the type of the weights) before the first is written. Until then the new matrices are kept beside the old.

    Args:
        parameters: name -> tensor of any floating type.
        action, method: written into the rows and the report.
        degenerate, min_norm: see `fire_core.FireSettings`. dry_run: write nothing.
        initial: starting weights by parameter name, for `Row.sfe_relative`.
    Raises: UserError for targets that cannot be treated (see degenerate), NaN and infinity in weights or results.
    """
    started = time.perf_counter()
    with torch.no_grad():
        check_targets(table.included, parameters, initial)
        skipped = _degenerate(table.included, parameters, degenerate, min_norm)
        results: list[tuple[Target, Tensor]] = []
        figures: list[tuple[list[Target], dict[str, Tensor]]] = []
        for group in _groups([t for t in table.included if t.name not in skipped], parameters):
            old = _stack(group, parameters)
            treated = treatment(old, group)
            stored = treated.matrices.to(parameters[group[0].parameter].dtype)
            figures.append((group, _figures(group, old, stored.to(old.dtype), treated, initial)))
            results += zip(group, stored, strict=True)
        rows = rows_of(table, skipped, figures, action)
        treated_rows = [row for row in rows if row.action == action]
        if bad := [row.name for row in treated_rows if row.norm_after in (None, math.inf)]:
            raise UserError(f"NaN, infinite or overflowing values for {shorten(bad)}: nothing was written")
        for target, matrix in results if not dry_run else ():
            target.write(parameters, matrix)
    changed = tied_to(parameters, set() if dry_run else {t.parameter for t, _ in results})
    return Report(
        rows,
        changed,
        parameters=[parameters[name] for name in parameters if name in changed],
        seconds=time.perf_counter() - started,
        method=method,
        dry_run=dry_run,
        total=sum(p.numel() for p in parameters.values()),
    )


def measure_change(
    report: Report,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    table: TargetTable,
    *,
    action: str,
    initial: Mapping[str, Tensor] | None = None,
) -> None:
    """Add to an empty report the rows of a change made by other means, from the parameters before and after it.

    `Report.changed` then names every parameter that differs, biases and norm layers included.
    """
    with torch.no_grad():
        report.changed |= {name for name, new in after.items() if not torch.equal(before[name], new)}
        figures = []
        for group in _groups([t for t in table.included if t.parameter in report.changed], after):
            old, new = _stack(group, before), _stack(group, after)
            figures.append((group, _figures(group, old, new, Treated(new), initial)))
        same = {t.name: "not changed" for t in table.included}
        report.rows.extend(rows_of(table, same, figures, action))
    report.total = sum(p.numel() for p in after.values())


def rows_of(
    table: TargetTable,
    reasons: Mapping[str, str],
    figures: list[tuple[list[Target], dict[str, Tensor]]],
    action: str,
) -> list[Row]:
    """Return one row per target: with its figures, or the reason why it was left alone (by default the table's)."""
    alone = {t.name: "left out" if t.kind == "unclear" else "skipped" for t in table}
    rows = {
        t.name: Row(t.name, t.parameter, t.shape, alone[t.name], reasons.get(t.name, t.reason)) for t in table
    }
    kinds: dict[str, Any] = {"iterations": int, "completed": bool}
    for group, columns in figures:
        values = torch.stack([column.double() for column in columns.values()], dim=1).tolist()
        for t, numbers in zip(group, values, strict=True):
            known = {
                key: kinds.get(key, float)(value) for key, value in zip(columns, numbers) if value == value
            }
            rows[t.name] = Row(t.name, t.parameter, t.shape, action, t.reason, **known)
    return list(rows.values())


def _figures(
    group: list[Target], old: Tensor, new: Tensor, treated: Treated, initial: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Return the figures (count,) of a stack, by the names of the fields of `Row`.

    old, new: (count, out, in), before and after; new is rounded to the type of the weights, `treated` is not.
    """
    gram, residual = smaller_gram(new), treated.residual
    if treated.scale is not None:
        of_treated = gram if new is treated.matrices else smaller_gram(treated.matrices)
        residual = deviation_of_gram(of_treated / treated.scale.square())
    columns = {
        "dfi_before": deviation_of_gram(smaller_gram(old)),
        "dfi_after": deviation_of_gram(gram),
        "dfi_factor": residual,
        "sfe": (old - new).square().sum(dim=(-2, -1)),
        "norm_before": torch.linalg.matrix_norm(old),
        "norm_after": torch.linalg.matrix_norm(new),
        "iterations": treated.iterations,
        "completed": treated.completed,
    }
    if initial is not None and all(t.parameter in initial for t in group):
        columns["sfe_relative"] = relative_squared_error(old, new, _stack(group, initial).to(old))
    return {name: column for name, column in columns.items() if column is not None}


def _degenerate(
    targets: list[Target], parameters: Mapping[str, Tensor], degenerate: Degenerate, min_norm: float
) -> dict[str, str]:
    """Return the names of degenerate targets with the reason to skip each.

    Raises UserError for NaN and infinite weights, and for degenerate matrices where degenerate="raise".
    """
    # float64: squares of very small and very large weights stay in its range
    groups = list(_groups(targets, parameters))
    norms = [
        torch.linalg.vector_norm(_stack(group, parameters), dim=(1, 2), dtype=torch.float64)
        for group in groups
    ]
    values = torch.cat([norm.to(norms[0].device) for norm in norms]).tolist()
    known = {t.name: norm for t, norm in zip(chain(*groups), values, strict=True)}
    if bad := [name for name, norm in known.items() if not norm < math.inf]:
        raise UserError(f"NaN or infinite values in {shorten(bad)}: nothing was changed; restore the weights")
    small = {
        name: f"norm {norm:.3g} is below min_norm={min_norm:g}" if norm else "all-zero matrix"
        for name, norm in known.items()
        if norm == 0.0 or norm < min_norm
    }
    if small and degenerate == "raise":
        raise UserError(
            f"{next(iter(small.values()))} in {shorten(list(small))}: such a matrix has no reliable nearest orthogonal "
            "matrix, and nothing was changed; set degenerate to 'skip' to leave such matrices as they are, or exclude "
            "them with targets"
        )
    return small


def check_targets(
    targets: list[Target], parameters: Mapping[str, Tensor], initial: Mapping[str, Tensor] | None = None
) -> None:
    """Raise UserError for no targets, for parameters that are missing or cannot be written, and for a wrong `initial`."""
    if not targets:
        raise UserError("no target matrix is included: nothing to treat")
    if not isinstance(initial, Mapping | None):
        raise UserError(
            f"initial is a {type(initial).__name__}: give the starting weights by parameter name, as state_dict() does"
        )
    for name in {t.parameter: None for t in targets}:
        if name not in parameters:
            raise UserError(f"this model has no parameter {name!r}: make the table with find_targets(model)")
        parameter = parameters[name]
        if parameter.is_meta:
            raise UserError(f"parameter {name!r} is on the meta device: load its weights first")
        if parameter.is_inference() and not torch.is_inference_mode_enabled():
            raise UserError(
                f"parameter {name!r} was made under torch.inference_mode and cannot be changed outside: call this "
                "inside torch.inference_mode, or build the model outside"
            )
        start = (initial or {}).get(name, parameter)
        if getattr(start, "shape", None) != parameter.shape:
            raise UserError(
                f"initial holds {start!r:.80} as {name!r}, which is {tuple(parameter.shape)} in the model: nothing was "
                "changed; give the starting weights of this model"
            )


def _stack(group: list[Target], parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the matrices of a group, (count, out, in), float32 or float64.

    Raises UserError if the shape of one is not that in the table.
    """
    matrices = []
    for t in group:
        try:
            matrix = t.matrix(parameters)
        except IndexError:
            matrix = parameters[t.parameter]
        if tuple(matrix.shape) != tuple(t.shape):
            raise UserError(
                f"target {t.name!r} is {tuple(t.shape)} in the table and {tuple(matrix.shape)} in the model: make the "
                "table with find_targets(model)"
            )
        matrices.append(matrix)
    stack = torch.stack(matrices)
    return stack if stack.dtype == torch.float64 else stack.float()


def _groups(targets: list[Target], parameters: Mapping[str, Tensor]) -> Iterator[list[Target]]:
    """Yield groups of targets of one shape, device and type, of at most twice the stack of a solver, or a single matrix."""
    groups: dict[tuple[Any, ...], list[Target]] = defaultdict(list)
    for t in targets:
        p = parameters[t.parameter]
        groups[(t.shape, p.device, p.dtype)].append(t)
    for (shape, device, dtype), members in groups.items():
        size = shape[0] * shape[1] * (8 if dtype == torch.float64 else 4)
        count = max(1, 2 * STACK_BYTES.get(device.type, STACK_BYTES["cpu"]) // size)
        for start in range(0, len(members), count):
            yield members[start : start + count]
