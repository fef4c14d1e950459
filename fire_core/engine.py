"""Apply a treatment to every target matrix of a mapping of tensors, in stacks of one shape, and report what was done.

The engine knows names and tensors only, so it works on a model, on a checkpoint file, and on the share of one rank.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fire_core.errors import UserError, check_word
from fire_core.measure.metrics import (
    deviation_from_isometry,
    deviation_of_gram,
    relative_squared_error,
    smaller_gram,
    squared_frobenius_error,
)
from fire_core.report import Report, Row
from fire_core.settings import STAGE_LIMIT, Degenerate
from fire_core.targets import Target, TargetTable, shorten
from fire_core.targets.memory import sharing

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}


class Treated(NamedTuple):
    """New values of a stack of matrices (count, out, in), with the figures (count,) of the solver where it has any.

    factor: the orthogonal factor before scaling (count, out, in), if there is one. scale: (count, 1, 1), given instead
    of `factor` where `matrices` = scale * factor.
    """

    matrices: Tensor
    factor: Tensor | None = None
    iterations: Tensor | None = None
    completed: Tensor | None = None
    residual: Tensor | None = None
    scale: Tensor | None = None


Treatment = Callable[[Tensor, list[Target]], Treated]
"""A function of a stack of matrices (count, out, in), float32 or float64, and their targets; it does not change them."""


def apply(
    parameters: Mapping[str, Tensor],
    table: TargetTable,
    treatment: Treatment,
    *,
    action: str,
    method: str = "",
    degenerate: Degenerate = "raise",
    min_norm: float = 0.0,
    initial: Mapping[str, Tensor] | None = None,
    stage_limit: float = STAGE_LIMIT,
    dry_run: bool = False,
) -> Report:
    """Run `treatment` on all included targets, write the results in place, and return the report.

    Targets of one shape, device and type are treated in stacks of at most CHUNK_BYTES. Every target is checked before
    the first one is treated, and every result (its shape, and that it is finite) before it is written. Up to
    `stage_limit` bytes of targets, at 4 bytes a weight, all results are computed before the first is written; above
    it, each stack is written at once, and an error names the targets that were changed before it.

    Args:
        parameters: name -> tensor of any floating type.
        action, method: written into the rows and the report.
        degenerate, min_norm: see `FireSettings`. dry_run: write nothing.
        initial: starting weights by parameter name, for `Row.sfe_relative`.
    Raises: UserError for targets that cannot be treated (see degenerate), NaN and infinity in weights or results.
    """
    started = time.perf_counter()
    with torch.no_grad():
        check_targets(table.included, parameters)
        staged = dry_run or sum(4 * t.shape[0] * t.shape[1] for t in table.included) <= stage_limit
        groups = list(_groups(table.included, parameters))
        kept = {i: _stack(group, parameters) for i, group in enumerate(groups)} if staged else {}
        loaded = (kept[i] if staged else _stack(group, parameters) for i, group in enumerate(groups))
        skipped = _degenerate(groups, loaded, degenerate, min_norm)
        chosen = [t for t in table.included if t.name not in skipped]
        rows = {
            t.name: Row(t.name, t.parameter, t.shape, "skipped", skipped.get(t.name, t.reason)) for t in table
        }
        stacks: list[tuple[list[Target], Tensor]] = []
        measurements: list[Callable[[], None]] = []
        written: list[str] = []
        for i, everyone in enumerate(groups):
            group = [t for t in everyone if t.name not in skipped]
            if not group:
                continue
            try:
                old = kept.pop(i) if staged and len(group) == len(everyone) else _stack(group, parameters)
                treated = treatment(old, group)
                _check_shape(group, old, treated.matrices)
                if not staged:
                    _check_finite([(group, treated.matrices)])
                    _write([(group, treated.matrices)], parameters)
            except Exception as error:
                if written:
                    raise UserError(
                        f"{type(error).__name__}: {error}; changed before that: {shorten(written)}; reload these, or stage "
                        "the results with a higher stage_limit"
                    ) from error
                raise
            treated = _as_stored(treated, parameters[group[0].parameter].dtype)
            for t in group:
                rows[t.name] = Row(t.name, t.parameter, t.shape, action, t.reason)
            measure = partial(_measure, [rows[t.name] for t in group], group, old, treated, initial)
            if staged:
                stacks.append((group, treated.matrices))
                measurements.append(measure)
            else:
                written += [t.name for t in group]
                measure()
        _check_finite(stacks)
        if not dry_run:
            _write(stacks, parameters)
    changed = set() if dry_run else _with_aliases({t.parameter for t in chosen}, parameters)
    return Report(
        rows.values(),
        changed,
        parameters=[parameters[name] for name in parameters if name in changed],
        seconds=time.perf_counter() - started,
        method=method,
        dry_run=dry_run,
        measurements=measurements,
    )


def measure_change(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    table: TargetTable,
    *,
    action: str,
    method: str,
    seconds: float,
    initial: Mapping[str, Tensor] | None = None,
) -> Report:
    """Return the report of a change made by other means, from the parameters before and after it.

    `Report.changed` names every parameter that differs, biases and norm layers included.
    """
    with torch.no_grad():
        differs = fetch([torch.ne(before[name], new).any() for name, new in after.items()])
        changed = {name for name, different in zip(after, differs, strict=True) if different}
        rows = {}
        for t in table:
            reason = "not changed" if t.included else t.reason
            rows[t.name] = Row(t.name, t.parameter, t.shape, "skipped", reason)
        for group in _groups([t for t in table.included if t.parameter in changed], after):
            for t in group:
                rows[t.name] = Row(t.name, t.parameter, t.shape, action, t.reason)
            old, new = (
                torch.stack([_working(t.matrix(source)) for t in group]) for source in (before, after)
            )
            _measure([rows[t.name] for t in group], group, old, Treated(new), initial)
    parameters = [after[name] for name in after if name in changed]
    return Report(rows.values(), changed, parameters=parameters, seconds=seconds, method=method)


def _as_stored(treated: Treated, dtype: torch.dtype) -> Treated:
    """Return the result rounded to `dtype`; its `factor` keeps the values before rounding."""
    if treated.matrices.dtype == dtype:
        return treated
    if treated.scale is not None:
        treated = treated._replace(factor=treated.matrices / treated.scale, scale=None)
    return treated._replace(matrices=_working(treated.matrices.to(dtype)))


def _measure(
    rows: list[Row], group: list[Target], old: Tensor, treated: Treated, initial: Mapping[str, Tensor] | None
) -> None:
    """Fill in the report rows of one stack, with a single transfer of all figures from the device."""
    new = treated.matrices
    gram = smaller_gram(new)
    of_factor = None if treated.factor is None else deviation_from_isometry(treated.factor)
    if treated.scale is not None:
        of_factor = deviation_of_gram(gram / treated.scale.square())
    columns = {
        "dfi_before": deviation_from_isometry(old),
        "dfi_after": deviation_of_gram(gram),
        "dfi_factor": of_factor,
        "sfe": squared_frobenius_error(old, new),
        "norm_before": torch.linalg.matrix_norm(old),
        "norm_after": torch.linalg.matrix_norm(new),
        "iterations": treated.iterations,
        "completed": treated.completed,
        "residual": treated.residual,
    }
    if initial is not None and all(t.parameter in initial for t in group):
        columns["sfe_relative"] = relative_squared_error(old, new, _stack(group, initial).to(old))
    known = {name: column for name, column in columns.items() if column is not None}
    for row, figures in zip(
        rows, torch.stack([c.double() for c in known.values()], dim=1).tolist(), strict=True
    ):
        for name, value in zip(known, figures, strict=True):
            if value == value:  # NaN: not defined
                setattr(row, name, value)
        row.iterations = None if row.iterations is None else int(row.iterations)
        row.completed = None if row.completed is None else bool(row.completed)
        row.residual = row.dfi_factor if row.residual is None else row.residual


def _degenerate(
    groups: list[list[Target]], stacks: Iterable[Tensor], degenerate: Degenerate, min_norm: float
) -> dict[str, str]:
    """Return the names of degenerate targets with the reason to skip each, with one transfer per device.

    Raises UserError for NaN and infinite weights, and for degenerate matrices where degenerate="raise".
    """
    check_word("degenerate", degenerate, Degenerate)
    peaks: list[Tensor] = []
    norms: list[Tensor] = []
    for stack in stacks:
        peaks += _peaks(stack)
        if min_norm > 0.0:
            norms += torch.linalg.matrix_norm(stack).double()
    names = [t.name for group in groups for t in group]
    found = fetch([*peaks, *norms])
    bad = [name for name, peak in zip(names, found) if not peak < float("inf")]
    if bad:
        raise UserError(
            f"NaN or infinite values in {shorten(bad)}: nothing was changed; restore finite weights first"
        )
    small = {name: "all-zero matrix" for name, peak in zip(names, found) if peak == 0.0}
    for name, norm in zip(names, found[len(names) :]):
        if norm < min_norm:
            small.setdefault(name, f"norm {norm:.3g} is below min_norm={min_norm:g}")
    if small and degenerate == "raise":
        raise UserError(
            f"{next(iter(small.values()))} in {shorten(list(small))}: such a matrix has no reliable nearest orthogonal "
            "matrix, and nothing was changed; pass degenerate='skip' to leave such matrices as they are, or exclude "
            "them with targets"
        )
    return small


def _peaks(stack: Tensor) -> Tensor:
    """Return the largest absolute entry of each matrix, (count,) float64; NaN and infinity survive."""
    low, high = map(torch.stack, zip(*map(torch.aminmax, stack), strict=True))
    return torch.maximum(high, -low).double()


def check_targets(targets: list[Target], parameters: Mapping[str, Tensor]) -> None:
    """Raise UserError if there are no targets, or if a target's parameter is missing or cannot be written."""
    if not targets:
        raise UserError("no target matrix is included: nothing to treat")
    for t in targets:
        if t.parameter not in parameters:
            raise UserError(
                f"this model has no parameter {t.parameter!r}: make the table with find_targets(model)"
            )
        parameter = parameters[t.parameter]
        if parameter.is_meta:
            raise UserError(f"parameter {t.parameter!r} is on the meta device: load its weights first")
        if parameter.is_inference() and not torch.is_inference_mode_enabled():
            raise UserError(
                f"parameter {t.parameter!r} was made under torch.inference_mode and cannot be changed outside: "
                "call this inside torch.inference_mode, or build the model outside"
            )


def _stack(group: list[Target], parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the matrices of a group, (count, out, in). Raises UserError if a shape differs from the table's."""
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
        matrices.append(_working(matrix))
    return torch.stack(matrices)


def _check_shape(group: list[Target], old: Tensor, new: Tensor) -> None:
    if new.shape != old.shape:
        raise UserError(
            f"the treatment made {tuple(new.shape)} of a stack {tuple(old.shape)} ({shorten([t.name for t in group])}): "
            "nothing was written; it must keep the shape"
        )


def _check_finite(stacks: list[tuple[list[Target], Tensor]]) -> None:
    """Raise UserError for results with NaN or infinity, with one transfer per device."""
    targets = [t for group, _ in stacks for t in group]
    peaks = fetch([peak for _, new in stacks for peak in _peaks(new)])
    bad = [t.name for t, peak in zip(targets, peaks, strict=True) if not peak < float("inf")]
    if bad:
        raise UserError(
            f"the treatment gave NaN or infinite values for {shorten(bad)}: they were not written"
        )


def _write(stacks: list[tuple[list[Target], Tensor]], parameters: Mapping[str, Tensor]) -> None:
    for group, new in stacks:
        for target, matrix in zip(group, new, strict=True):
            target.write(parameters, matrix)


def _with_aliases(changed: set[str], parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the names in `changed` and those of all parameters that share memory with them."""
    shared = sharing(parameters)
    return changed.union(*(shared.get(name, ()) for name in changed))


def fetch(scalars: list[Tensor]) -> list[Any]:
    """Return the values of tensors of one entry each as Python numbers, with one transfer per device."""
    places: dict[torch.device, list[int]] = defaultdict(list)
    for i, scalar in enumerate(scalars):
        places[scalar.device].append(i)
    found: list[Any] = [None] * len(scalars)
    for indices in places.values():
        for i, value in zip(indices, torch.stack([scalars[i] for i in indices]).tolist(), strict=True):
            found[i] = value
    return found


def _groups(targets: list[Target], parameters: Mapping[str, Tensor]) -> Iterator[list[Target]]:
    """Yield groups of targets of one shape, device and type, of at most CHUNK_BYTES or a single matrix."""
    groups: dict[tuple[Any, ...], list[Target]] = defaultdict(list)
    for t in targets:
        p = parameters[t.parameter]
        groups[(t.shape, p.device, p.dtype)].append(t)
    for (shape, device, dtype), members in groups.items():
        size = shape[0] * shape[1] * (8 if dtype == torch.float64 else 4)
        count = max(1, CHUNK_BYTES.get(device.type, 16 << 20) // size)
        for start in range(0, len(members), count):
            yield members[start : start + count]


def official_scales(group: list[Target], like: Tensor) -> Tensor:
    """Return the official scale of each target, shaped to multiply a stack (count, out, in)."""
    return torch.tensor([t.scale for t in group], dtype=like.dtype, device=like.device)[:, None, None]


def _working(matrix: Tensor) -> Tensor:
    return matrix.detach() if matrix.dtype == torch.float64 else matrix.detach().float()
