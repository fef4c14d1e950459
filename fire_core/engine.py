"""The engine: treat every target matrix of a model, or of a mapping of tensors, and report what was done.

Matrices of one shape are treated in stacks. FIRE is the treatment `fire_core.projection.project`.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fire_core.errors import UserError
from fire_core.measure.metrics import relative_squared_error
from fire_core.report import Report, Row
from fire_core.solvers.polar import STACK_BYTES, deviations
from fire_core.targets import Target, TargetTable, check_module, find_targets, list_targets, shorten
from fire_core.targets.model_targets import identity, inside
from fire_core.wrapped_models import is_sharded, replicas_in, reshard, unwrap_with

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


def treat_model(
    model: nn.Module,
    table: TargetTable,
    treatment: Treatment,
    *,
    group: "torch.distributed.ProcessGroup | None" = None,
    **options: Any,
) -> Report:
    """Run `treatment` on every included target of `model`, in place, and return the report.

    A model with DTensor parameters (FSDP2, tensor parallel) or with DistributedDataParallel in it is treated by all its
    ranks together, and so is one with a process `group` given. Every rank calls this function, the ranks divide the
    work, and all of them end with the same weights or the same error.

    Args:
        table: what `table_of` returns.
        treatment: (stack (count, out, in) of matrices, their targets) -> `fire_core.engine.Treated`.
        options: those of `fire_core.engine.treat_tensors`, with its errors; `action` is required.
    """
    inner = inside(model)[0]
    if options.get("initial") is not None:
        options["initial"] = unwrap_with(model, options["initial"])[1]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        reshard(inner)
        replicas = replicas_in(model)
        if replicas or group is not None or is_sharded(inner.parameters()):
            from fire_core.distributed import share_out

            group = replicas[0].process_group if replicas and group is None else group
            return share_out(dict(inner.named_parameters()), table, treatment, group=group, **options)
    return treat_tensors(dict(inner.named_parameters()), table, treatment, **options)


def table_of(model: nn.Module, targets: Any, example: Any = None) -> TargetTable:
    """Return the table of the module inside `model` under this rule, or the given table, with the names of that module."""
    check_module(model)
    inner, prefix = inside(model)
    if prefix and isinstance(targets, list) and all(isinstance(target, Target) for target in targets):
        names, keys = dict(inner.named_parameters()), ("name", "parameter", "module")
        targets = type(targets)(
            t
            if t.parameter in names
            else replace(t, **{key: getattr(t, key).removeprefix(prefix) for key in keys})
            for t in targets
        )
    return targets if isinstance(targets, TargetTable) else find_targets(inner, targets, example=example)


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

    All results are computed, measured, and checked (that they are finite in the type of the weights) before the first is
    written. Until then the new matrices are kept beside the old.

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
        for group, old in _stacks([t for t in table.included if t.name not in skipped], parameters):
            treated = treatment(old, group)
            stored = treated.matrices.to(parameters[group[0].parameter].dtype)
            figures.append((group, _figures(group, old, stored.to(old.dtype), treated, initial)))
            results += zip(group, stored, strict=True)
        rows = rows_of(table, skipped, figures, action)
        bad = [row.name for row in rows if row.action == action and row.norm_after in (None, 0.0, math.inf)]
        if bad:
            raise UserError(f"NaN, overflowing or vanishing values for {shorten(bad)}: nothing was written")
        for target, matrix in results if not dry_run else ():
            target.write(parameters, matrix)
        torch.clear_autocast_cache()  # of the old weights
    written = {identity(parameters[t.parameter]) for t, _ in results if not dry_run}
    changed = {name for name, tensor in parameters.items() if identity(tensor) in written}  # with tied ones
    return Report(
        rows,
        changed,
        parameters=[parameters[name] for name in parameters if name in changed],
        seconds=time.perf_counter() - started,
        method=method,
        dry_run=dry_run,
        total=sum(p.numel() for p in parameters.values()),
    )


@contextmanager
def observe(
    model: nn.Module, *, action: str, method: str, initial: Mapping[str, Tensor] | None = None
) -> Iterator[Report]:
    """Yield an empty report, and fill it in when the `with` block ends: compare all parameters before and after it.

    `Report.changed` then names all parameters that differ, biases and norms too. Without matrices, it has no rows.

    Args:
        action, method: written into the rows and the report.
        initial: starting weights by parameter name, for `Row.sfe_relative`.
    Raises: UserError for a sharded model, and for new parameters in place of old ones, which no optimizer would train.
    """
    model, initial = unwrap_with(model, initial)
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    if is_sharded(parameters.values()):
        can = "fire, fire_exact, interpolate, rescale, keep_norm and random_orthogonal can"
        wrong = f"{method or action} changes whole parameters and cannot see them in a sharded model; {can}"
        raise UserError(f"{wrong}: use one of these, or change the weights before fully_shard")
    table, report = list_targets(model), Report(method=method)
    table = table if table.included else TargetTable()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    started = time.perf_counter()
    yield report
    report.seconds = time.perf_counter() - started
    if other := [n for n, p in model.named_parameters() if parameters.get(n, p) is not p]:
        raise UserError(f"{method or action} made {shorten(other)} anew, which nothing trains: use copy_")
    with torch.no_grad():
        report.changed |= {name for name, p in parameters.items() if not torch.equal(before[name], p)}
        written = [t for t in table.included if t.parameter in report.changed]
        changed = [t for t in written if not torch.equal(t.matrix(before), t.matrix(parameters))]
        figures = [
            (group, _figures(group, matrices_of(group, before, new), new, Treated(new), initial))
            for group, new in _stacks(changed, parameters)
        ]
    report.rows += rows_of(table, {t.name: "not changed" for t in table.included}, figures, action)
    report.parameters = [p for name, p in parameters.items() if name in report.changed]
    report.total = sum(p.numel() for p in parameters.values())


def rows_of(
    table: TargetTable,
    reasons: Mapping[str, str],
    figures: list[tuple[list[Target], dict[str, Tensor]]],
    action: str,
) -> list[Row]:
    """Return one row per target: with its figures, or the reason why it was left alone (by default the table's)."""
    rows = {}
    for t in table:
        alone = "left out" if t.kind == "unclear" else "skipped"
        rows[t.name] = Row(t.name, t.parameter, t.shape, alone, reasons.get(t.name, t.reason))
    kinds: dict[str, Any] = {"iterations": int, "completed": bool}
    for group, columns in figures:
        values = torch.stack([column.double() for column in columns.values()], dim=1).tolist()
        for t, numbers in zip(group, values, strict=True):
            known = {key: kinds.get(key, float)(x) for key, x in zip(columns, numbers) if x == x}
            rows[t.name] = Row(t.name, t.parameter, t.shape, action, t.reason, **known)
    return list(rows.values())


def _figures(
    group: list[Target], old: Tensor, new: Tensor, treated: Treated, initial: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Return the figures (count,) of a stack before and after, by the names of the fields of `Row`; `new` is rounded."""
    own = new is treated.matrices  # not rounded
    dfi, residual = deviations(new, treated.scale if own else None), treated.residual
    if treated.scale is not None:
        residual = (dfi if own else deviations(treated.matrices, treated.scale))[1]
    columns = {
        "dfi_before": deviations(old)[0],
        "dfi_after": dfi[0],
        "dfi_factor": residual,
        "sfe": (old - new).square().sum(dim=(-2, -1)),
        "norm_before": torch.linalg.matrix_norm(old),
        "norm_after": torch.linalg.matrix_norm(new),
        "iterations": treated.iterations,
        "completed": treated.completed,
    }
    if initial is not None and all(t.parameter in initial for t in group):
        columns["sfe_relative"] = relative_squared_error(old, new, matrices_of(group, initial, old))
    return {name: column for name, column in columns.items() if column is not None}


def check_targets(
    targets: list[Target], parameters: Mapping[str, Tensor], initial: Mapping[str, Tensor] | None = None
) -> None:
    """Raise UserError for no targets, for parameters that are missing or cannot be written, and for a wrong `initial`."""
    if not targets:
        raise UserError("no target matrix is included: nothing to treat")
    for name in dict.fromkeys(t.parameter for t in targets):
        if name not in parameters:
            raise UserError(f"this model has no parameter {name!r}: make the table with find_targets(model)")
        parameter = parameters[name]
        if parameter.is_meta:
            raise UserError(f"parameter {name!r} is on the meta device: load its weights first")
        if parameter.is_inference() and not torch.is_inference_mode_enabled():
            wrong = f"parameter {name!r} was made under torch.inference_mode and cannot be changed outside"
            raise UserError(f"{wrong}: call this inside torch.inference_mode, or build the model outside")
        start = (initial or {}).get(name, parameter)
        if getattr(start, "shape", None) != parameter.shape:
            wrong = f"initial holds {start!r:.80} as {name!r}, which is {tuple(parameter.shape)} in the model"
            raise UserError(f"{wrong}: this net was not changed; give the starting weights of this model")


def _degenerate(
    targets: list[Target], parameters: Mapping[str, Tensor], degenerate: Degenerate, min_norm: float
) -> dict[str, str]:
    """Return the names of degenerate targets with the reason to skip each, or raise UserError; always for NaN."""
    names, norms = [], []
    for group, stack in _stacks(targets, parameters):
        names += [t.name for t in group]
        # float64: squares of very small and very large weights stay in its range
        norms.append(torch.linalg.vector_norm(stack, dim=(1, 2), dtype=torch.float64))
    values = torch.cat([norm.to(norms[0].device) for norm in norms]).tolist()
    known = dict(zip(names, values, strict=True))
    if bad := [name for name, norm in known.items() if not norm < math.inf]:
        wrong = f"NaN or infinite values in {shorten(bad)}"
        raise UserError(f"{wrong}: this net was not changed; restore the weights")
    small = {
        name: f"norm {norm:.3g} is below min_norm={min_norm:g}" if norm else "all-zero matrix"
        for name, norm in known.items()
        if norm == 0.0 or norm < min_norm
    }
    if small and degenerate == "raise":
        wrong = f"{next(iter(small.values()))} in {shorten(list(small))}"
        why = "such a matrix has no reliable nearest orthogonal matrix, and this net was not changed"
        remedy = "set degenerate to 'skip' to leave such matrices as they are, or exclude them with targets"
        raise UserError(f"{wrong}: {why}; {remedy}")
    return small


def _stacks(targets: list[Target], parameters: Mapping[str, Tensor]) -> Iterator[tuple[list[Target], Tensor]]:
    """Yield targets of one shape, device and type with their matrices (count, out, in), float32 or float64.

    A stack is at most twice that of a solver, or one matrix. Raises UserError for a shape that is not that in the table.
    """
    groups: dict[tuple[Any, ...], list[Target]] = defaultdict(list)
    for t in targets:
        p = parameters[t.parameter]
        groups[(t.shape, p.device, p.dtype)].append(t)
    for (shape, device, dtype), members in groups.items():
        size = shape[0] * shape[1] * (8 if dtype == torch.float64 else 4)
        count = max(1, 2 * STACK_BYTES.get(device.type, STACK_BYTES["cpu"]) // size)
        for start in range(0, len(members), count):
            group, matrices = members[start : start + count], []
            for t in group:
                try:
                    matrices.append(t.matrix(parameters))
                except IndexError:
                    matrices.append(parameters[t.parameter])
                if (found := tuple(matrices[-1].shape)) != tuple(shape):
                    wrong = f"target {t.name!r} is {tuple(shape)} in the table and {found} in the model"
                    raise UserError(f"{wrong}: make the table with find_targets(model)")
            yield group, torch.stack(matrices).to(torch.float64 if dtype == torch.float64 else torch.float32)


def matrices_of(group: list[Target], source: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Return the matrices of a group in `source`, (count, out, in), of the type and on the device of `like`."""
    matrices = torch.stack([t.matrix(source) for t in group]).to(like)
    if matrices.shape != like.shape:
        own, start = tuple(like.shape[1:]), tuple(matrices.shape[1:])
        wrong = f"{group[0].name!r} is {own} in the model and {start} in initial"
        raise UserError(f"{wrong}: give the starting weights of this model")
    return matrices
