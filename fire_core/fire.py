"""fire(model): move every weight matrix to the nearest orthogonal one, in place, and report what was done.

Han et al., "FIRE: Frobenius-Isometry Reinitialization", ICLR 2026, Eq. 4-5 and Algorithm 1.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fire_core.errors import UserError
from fire_core.metrics import deviation_from_isometry, squared_frobenius_error
from fire_core.polar import polar
from fire_core.precision import matmul_precision
from fire_core.report import Report, Row
from fire_core.settings import check_degenerate, check_settings
from fire_core.targets import Target, TargetTable, check_module, find_targets

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}


class Treated(NamedTuple):
    """Result of a treatment of a stack of matrices: new values, and of what went before the scaling, if anything did."""

    matrices: Tensor
    factor: Tensor | None = None
    iterations: Tensor | None = None
    completed: Tensor | None = None
    residual: Tensor | None = None


Treatment = Callable[[Tensor, list[Target]], Treated]


def fire(
    model: nn.Module,
    *,
    solver: str = "newton_schulz",
    iterations: int = 10,
    normalize: str = "frobenius",
    targets: Any = "all",
    scale: str = "official",
    strength: float = 1.0,
    degenerate: str = "raise",
    tolerance: float = 1e-8,
    precision: str = "fp32",
    initial: Mapping[str, Tensor] | None = None,
) -> Report:
    """Replace every target matrix W of `model` by scale * polar(W), in place; deterministic, no data, no gradient.

    Biases, normalisation layers, embeddings (unless tied to a Linear) and buffers stay as they are.

    Args:
        solver: "newton_schulz" is the published algorithm, `iterations` cubic steps: *not* a projection to a
            tolerance (read `dfi_factor` in the report). "exact" is the orthogonal polar factor to `tolerance`.
            "fast": closer than the published 10 iterations, in less time.
        normalize: "frobenius" (published) or "spectral", start of newton_schulz.
        targets: which matrices, see `fire_core.targets`: preset, pattern, list of them, callable, or a TargetTable.
        scale: "official": sqrt(out/in), divided by the number of taps for convolutions; "none": 1.
        strength: W + strength * (fire(W) - W); 1 is FIRE.
        degenerate: zero matrices: "raise" names them before anything is changed, "skip" leaves them, with the reason
            in the report. Non-finite matrices always raise.
        tolerance: DfI that "exact" guarantees per matrix, times max(1, n / 768) for n the smaller side.
        precision: "fp32", or "tf32" (see `polar`), whatever the weights are stored in.
        initial: starting weights by parameter name, only to report the distance moved relative to a full reset.
    Returns: a Report with one row a target, skipped ones included.
    Raises: UserError for an empty target set, a zero matrix (see degenerate), NaN or infinite weights.
    """
    settings: dict[str, Any] = {
        "solver": solver,
        "iterations": iterations,
        "normalize": normalize,
        "scale": scale,
        "strength": strength,
        "degenerate": degenerate,
        "tolerance": tolerance,
        "precision": precision,
        "initial": initial,
    }
    check_settings(**settings)
    check_module(model)
    table = targets if isinstance(targets, TargetTable) else find_targets(model, targets)
    if _is_sharded(model):
        from fire_core.distributed import project as project_shards

        return project_shards(model, targets=table, **settings)

    def project(stack: Tensor, group: list[Target]) -> Treated:
        result = polar(
            stack,
            solver,
            iterations=iterations,
            normalize=normalize,
            tolerance=tolerance,
            precision=precision,
        )
        goal = result.factor * scales(group, stack) if scale == "official" else result.factor
        new = goal if strength == 1.0 else torch.lerp(stack, goal, strength)
        return Treated(new, result.factor, result.iterations, result.completed, result.residual)

    return apply_to_targets(
        model, table, project, action="projected", degenerate=degenerate, initial=initial, method="fire"
    )


def apply_to_targets(
    model: nn.Module,
    table: TargetTable,
    treatment: Treatment,
    *,
    action: str,
    degenerate: str = "raise",
    initial: Mapping[str, Tensor] | None = None,
    method: str = "",
) -> Report:
    """Run `treatment` on all included targets, same shapes stacked in bounded chunks, and write the result back in place.

    Nothing is written before every target has been checked. The stack is float32 (float64 stays), (count, out, in).
    """
    if _is_sharded(model):
        from fire_core.distributed import apply_to_sharded_targets

        options: dict[str, Any] = {
            "action": action,
            "degenerate": degenerate,
            "initial": initial,
            "method": method,
        }
        return apply_to_sharded_targets(model, table, treatment, **options)
    started = time.perf_counter()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        skipped = _check(table, parameters, degenerate)
        chosen = [t for t in table if t.included and t.name not in skipped]
        rows: dict[str, Row] = {}
        for group in _chunks(chosen, parameters):
            rows |= _treat(group, parameters, treatment, action, initial)
    report = Report(method=method, changed={t.parameter for t in chosen})
    for t in table:
        reason = skipped.get(t.name, t.reason)
        report.rows.append(rows.get(t.name) or Row(t.name, t.parameter, t.shape, "skipped", reason))
    report.seconds = time.perf_counter() - started
    return report


@contextmanager
def observe(
    model: nn.Module,
    *,
    action: str,
    method: str,
    initial: Mapping[str, Tensor] | None = None,
    targets: Any = "all",
) -> Iterator[Report]:
    """Report of a change that the body makes by any other means: compares the targets before and after.

    `changed` lists every parameter whose values differ afterwards, matrix or not.
    """
    report = Report(method=method)
    try:
        table = find_targets(model, targets)
    except UserError:
        table = TargetTable()
    parameters = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    started = time.perf_counter()
    yield report
    report.seconds = time.perf_counter() - started
    with torch.no_grad():
        report.changed = {name for name, p in parameters.items() if not torch.equal(p, before[name])}
        touched = [t for t in table.included if t.parameter in report.changed]
        rows: dict[str, Row] = {}
        for group in _chunks(touched, parameters):
            old = torch.stack([_working(t.matrix(before)) for t in group])
            new = torch.stack([_working(t.matrix(parameters)) for t in group])
            rows |= _rows(group, old, Treated(new), action, initial)
    for t in table:
        reason = "not changed" if t.included else t.reason
        report.rows.append(rows.get(t.name) or Row(t.name, t.parameter, t.shape, "skipped", reason))


def _treat(
    group: list[Target],
    parameters: Mapping[str, Tensor],
    treatment: Treatment,
    action: str,
    initial: Mapping[str, Tensor] | None,
) -> dict[str, Row]:
    stack = torch.stack([_working(t.matrix(parameters)) for t in group])
    treated = treatment(stack, group)
    for target, new in zip(group, treated.matrices, strict=True):
        target.write(parameters, new)
    stored = treated.matrices.to(parameters[group[0].parameter].dtype)
    return _rows(group, stack, treated._replace(matrices=_working(stored)), action, initial)


def _rows(
    group: list[Target], old: Tensor, treated: Treated, action: str, initial: Mapping[str, Tensor] | None
) -> dict[str, Row]:
    """Report rows of one stack; all figures travel from the device in a single transfer."""
    new = treated.matrices
    unknown = torch.full_like(old[:, 0, 0], torch.nan)
    with matmul_precision(old.device, "fp32"):
        columns = [
            deviation_from_isometry(old),
            deviation_from_isometry(new),
            unknown if treated.factor is None else deviation_from_isometry(treated.factor),
            squared_frobenius_error(old, new),
            torch.linalg.matrix_norm(old),
            torch.linalg.matrix_norm(new),
            _initial_distance(group, old, initial),
            unknown if treated.iterations is None else treated.iterations,
            unknown if treated.completed is None else treated.completed,
            unknown if treated.residual is None else treated.residual,
        ]
    figures = torch.stack([c.double() for c in columns], dim=1).tolist()
    rows = {}
    for target, values in zip(group, figures, strict=True):
        before, after, factor, sfe, norm_before, norm_after, reset, steps, completed, residual = map(
            _number, values
        )
        rows[target.name] = Row(
            target.name,
            target.parameter,
            target.shape,
            action,
            target.reason,
            before,
            after,
            factor,
            sfe,
            sfe / reset if reset and sfe is not None else None,
            norm_before,
            norm_after,
            None if steps is None else int(steps),
            None if completed is None else bool(completed),
            residual,
        )
    return rows


def _initial_distance(group: list[Target], old: Tensor, initial: Mapping[str, Tensor] | None) -> Tensor:
    if initial is None or any(t.parameter not in initial for t in group):
        return torch.full_like(old[:, 0, 0], torch.nan)
    start = torch.stack([_working(t.matrix(initial)) for t in group]).to(old)
    return squared_frobenius_error(old, start)


def _check(table: TargetTable, parameters: Mapping[str, Tensor], degenerate: str) -> dict[str, str]:
    """Targets to leave alone and why; raises for what must not pass. One transfer a device in all."""
    check_degenerate(degenerate)
    included = table.included
    if not included:
        raise UserError("no target matrix is included: nothing to treat")
    check_names(included, parameters)
    peaks = _numbers([_fitting(t, parameters).abs().amax().double() for t in included])
    bad = [t.name for t, peak in zip(included, peaks, strict=True) if peak != peak or peak == float("inf")]
    if bad:
        raise UserError(
            f"NaN or infinite values in {_some(bad)}: nothing was changed; restore finite weights first"
        )
    zero = [t.name for t, peak in zip(included, peaks, strict=True) if peak == 0.0]
    if zero and degenerate == "raise":
        raise UserError(
            f"all-zero matrix in {_some(zero)}: it has no nearest orthogonal matrix and nothing was changed; "
            "pass degenerate='skip' to leave such matrices as they are, or exclude them with targets"
        )
    return dict.fromkeys(zero, "all-zero matrix")


def check_names(targets: list[Target], parameters: Mapping[str, Tensor]) -> None:
    """Raise UserError for a target whose parameter is not there, or holds no values that can be written."""
    for t in targets:
        if t.parameter not in parameters:
            raise UserError(f"target {t.name!r} is of another model: make the table with find_targets(model)")
        parameter = parameters[t.parameter]
        if parameter.is_meta:
            raise UserError(f"parameter {t.parameter!r} is on the meta device: load its weights first")
        if parameter.is_inference() and not torch.is_inference_mode_enabled():
            raise UserError(
                f"parameter {t.parameter!r} was made under torch.inference_mode and cannot be changed outside: "
                "call this inside torch.inference_mode, or build the model outside"
            )


def _fitting(target: Target, parameters: Mapping[str, Tensor]) -> Tensor:
    """The matrix, whose shape must be that of the table."""
    try:
        matrix = target.matrix(parameters)
    except IndexError:
        matrix = parameters[target.parameter]
    if tuple(matrix.shape) != tuple(target.shape):
        raise UserError(
            f"target {target.name!r} is {tuple(target.shape)} in the table and {tuple(matrix.shape)} in the model: "
            "make the table with find_targets(model)"
        )
    return matrix


def _numbers(scalars: list[Tensor]) -> list[float]:
    """Tensors of one entry each as floats, with one transfer a device."""
    places: dict[torch.device, list[int]] = defaultdict(list)
    for i, scalar in enumerate(scalars):
        places[scalar.device].append(i)
    found = [0.0] * len(scalars)
    for indices in places.values():
        for i, value in zip(indices, torch.stack([scalars[i] for i in indices]).tolist(), strict=True):
            found[i] = value
    return found


def _chunks(targets: list[Target], parameters: Mapping[str, Tensor]) -> Iterator[list[Target]]:
    """Same shape, device and dtype together, in the order of the table, at most CHUNK_BYTES (one matrix at least)."""
    groups: dict[tuple[Any, ...], list[Target]] = defaultdict(list)
    for t in targets:
        p = parameters[t.parameter]
        groups[(t.shape, p.device, p.dtype)].append(t)
    for (shape, device, dtype), members in groups.items():
        size = shape[0] * shape[1] * (8 if dtype == torch.float64 else 4)
        count = max(1, CHUNK_BYTES.get(device.type, 16 << 20) // size)
        for start in range(0, len(members), count):
            yield members[start : start + count]


def _is_sharded(model: nn.Module) -> bool:
    """DTensor parameters (FSDP2, tensor parallel), told by name: torch.distributed may be absent."""
    return any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())


def scales(group: list[Target], like: Tensor) -> Tensor:
    """The official scale of each target, to multiply a stack (count, out, in) with."""
    return torch.tensor([t.scale for t in group], dtype=like.dtype, device=like.device)[:, None, None]


def _working(matrix: Tensor) -> Tensor:
    return matrix.detach() if matrix.dtype == torch.float64 else matrix.detach().float()


def _number(value: float) -> float | None:
    return None if value != value else value


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
