"""The engine: treat every target matrix of a mapping of tensors, in stacks of one shape, and report what was done.

The engine knows names and tensors only, so it works on a model, on a checkpoint file, and on the share of one rank.
FIRE is its treatment `project`, with the settings `FireSettings`.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fire_core.errors import UserError, did_you_mean, unknown_word
from fire_core.report import Report, Row, Treated, figures_of, fill_in
from fire_core.solvers.polar import (
    ITERATIONS,
    STACK_BYTES,
    Normalize,
    Solver,
    check_solver,
    solve,
)
from fire_core.targets import Target, TargetTable, shorten
from fire_core.targets.walk import tied_to

Scale = Literal["official", "none", "initial"]
Degenerate = Literal["raise", "skip"]
Treatment = Callable[[Tensor, list[Target]], Treated]
"""A function of a stack of matrices (count, out, in), float32 or float64, and their targets; it does not change them."""


@dataclass(frozen=True)
class FireSettings:
    """All settings of `fire` except the choice of matrices. Wrong values raise UserError when the object is created.

    Args:
        solver: "newton_schulz" is the published algorithm, `iterations` cubic steps. It is *not* a projection to a
            tolerance: read `dfi_factor` in the report. "exact" is the orthogonal polar factor to `tolerance`. "quintic" is
            Muon's iteration, inexact by design: after about ten steps singular values lie in a band from 0.68 to 1.21, not
            at 1 (see `polar`).
        iterations: number of steps of newton_schulz and quintic; exact accepts the default only.
        normalize: the norm by which newton_schulz and quintic divide at the start, "frobenius" (published) or
            "spectral"; exact accepts the default only.
        scale: the number by which the orthogonal factor is multiplied. "official" is sqrt(out / in), divided by the
            number of taps for convolutions; "none" is 1; "initial" gives each matrix its Frobenius norm at
            initialisation.
        variance_factor: with scale="initial", the mean square of the result's entries as a multiple of that at
            initialisation; 1 is the initial norm itself.
        strength: the result is W + strength * (fire(W) - W); 1 is FIRE.
        degenerate: what to do with zero matrices and those below `min_norm`. "raise" names them before anything is
            changed; "skip" leaves them as they are, with the reason in the report. NaN and infinite weights always
            raise.
        min_norm: Frobenius norm below which a matrix counts as degenerate.
        tolerance: DfI that "exact" guarantees per matrix, times max(1, n / 768) where n is the smaller side.
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
        for name, allowed in (("scale", Scale), ("degenerate", Degenerate)):
            if getattr(self, name) not in get_args(allowed):
                raise unknown_word(name, getattr(self, name), allowed)
        for name, low, high, what in (
            ("strength", 0.0, 1.0, "a number from 0, which keeps the weights, to 1, which is FIRE"),
            ("variance_factor", math.ulp(0.0), sys.float_info.max, "a number above 0"),
            ("min_norm", 0.0, math.inf, "a number, 0 or above"),
        ):
            value = getattr(self, name)
            if not isinstance(value, Real) or not low <= float(value) <= high:
                raise UserError(f"{name}={value!r} must be {what}")
        if self.variance_factor != 1.0 and self.scale != "initial":
            raise UserError(
                f"variance_factor={self.variance_factor!r} has no effect with scale={self.scale!r}: choose scale='initial'"
            )

    @classmethod
    def of(cls, **settings: Any) -> FireSettings:
        """Return the settings given by name. Raises UserError for an unknown name, with the nearest known one."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise UserError(f"fire has no setting {name!r}{did_you_mean(name, [*known, 'targets'])}")
        return cls(**settings)


def project(
    stack: Tensor, group: list[Target], settings: FireSettings, initial: Mapping[str, Tensor] | None = None
) -> Treated:
    """Return FIRE's new values of a stack of matrices: the treatment of `fire`.

    Raises UserError where scale="initial" has no starting weights, or zero ones.
    """
    factor, residual, iterations, completed = solve(
        stack, settings.solver, settings.iterations, settings.normalize, settings.tolerance, measure=False
    )
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


def official_scales(group: list[Target], like: Tensor) -> Tensor:
    """Return the official scale of each target, shaped to multiply a stack (count, out, in)."""
    return torch.tensor([t.scale for t in group], dtype=like.dtype, device=like.device)[:, None, None]


def _initial_norms(group: list[Target], stack: Tensor, initial: Mapping[str, Tensor] | None) -> Tensor:
    """Return the Frobenius norms of the starting matrices, (count, 1, 1)."""
    if initial is None:
        raise UserError("scale='initial' needs the starting weights: give initial=, a copy of state_dict()")
    missing = [t.parameter for t in group if t.parameter not in initial]
    if missing:
        raise UserError(
            f"scale='initial': initial holds no {shorten(missing)}; it is named as in state_dict()"
        )
    norms = torch.linalg.matrix_norm(torch.stack([t.matrix(initial).to(stack) for t in group]), keepdim=True)
    usable = (norms.isfinite() & (norms > 0)).flatten().tolist()
    if not all(usable):
        bad = [t.name for t, good in zip(group, usable, strict=True) if not good]
        raise UserError(
            f"scale='initial': the starting weights of {shorten(bad)} are zero or not finite, and nothing was changed; "
            "exclude these matrices with targets"
        )
    return norms


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
    are finite in the type of the weights) before the first is written. Until then the new matrices are kept, in float32
    at least.

    Args:
        parameters: name -> tensor of any floating type.
        action, method: written into the rows and the report.
        degenerate, min_norm: see `FireSettings`. dry_run: write nothing.
        initial: starting weights by parameter name, for `Row.sfe_relative`.
    Raises: UserError for targets that cannot be treated (see degenerate), NaN and infinity in weights or results.
    """
    started = time.perf_counter()
    if initial is not None and not isinstance(initial, Mapping):
        raise UserError(
            f"initial is a {type(initial).__name__}: give the starting weights by parameter name, as state_dict() does"
        )
    with torch.no_grad():
        check_targets(table.included, parameters)
        _check_initial(table.included, parameters, initial or {})
        skipped = _degenerate(table.included, parameters, degenerate, min_norm)
        rows = {t.name: row_of(t, skipped.get(t.name, t.reason)) for t in table}
        results: list[tuple[list[Target], Tensor]] = []
        figures: list[tuple[list[Row], dict[str, Tensor]]] = []
        for group in _groups([t for t in table.included if t.name not in skipped], parameters):
            old = _stack(group, parameters)
            treated = treatment(old, group).as_stored(parameters[group[0].parameter].dtype)
            results.append((group, treated.matrices))
            for t in group:
                rows[t.name] = Row(t.name, t.parameter, t.shape, action, t.reason)
            figures.append(([rows[t.name] for t in group], _figures(group, old, treated, initial)))
        targets = [t for group, _ in results for t in group]
        peaks = _largest_entries([matrix for _, new in results for matrix in new])
        if bad := [t.name for t, peak in zip(targets, peaks, strict=True) if not peak < math.inf]:
            raise UserError(
                f"the treatment gave NaN, infinite or overflowing values for {shorten(bad)}: nothing was written"
            )
        if not dry_run:
            for group, new in results:
                for target, matrix in zip(group, new, strict=True):
                    target.write(parameters, matrix)
    fill_in(figures)
    changed = set() if dry_run else {t.parameter for group, _ in results for t in group}
    changed = tied_to(parameters, changed)
    return Report(
        list(rows.values()),
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
        differs = fetch([torch.ne(before[name], new).any() for name, new in after.items()])
        report.changed |= {name for name, different in zip(after, differs, strict=True) if different}
        rows = {t.name: row_of(t, "not changed" if t.included else t.reason) for t in table}
        figures = []
        for group in _groups([t for t in table.included if t.parameter in report.changed], after):
            for t in group:
                rows[t.name] = Row(t.name, t.parameter, t.shape, action, t.reason)
            old, new = _stack(group, before), _stack(group, after)
            figures.append(([rows[t.name] for t in group], _figures(group, old, Treated(new), initial)))
    fill_in(figures)
    report.rows.extend(rows.values())
    report.total = sum(p.numel() for p in after.values())


def row_of(target: Target, reason: str) -> Row:
    """Return the row of a target that is not treated."""
    action = "left out" if target.kind == "unclear" else "skipped"
    return Row(target.name, target.parameter, target.shape, action, reason)


def _figures(
    group: list[Target], old: Tensor, treated: Treated, initial: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Return `figures_of` a stack, with the distance to the starting weights where all of them are known."""
    known = initial is not None and all(t.parameter in initial for t in group)
    return figures_of(old, treated, _stack(group, initial) if known else None)  # type: ignore[arg-type]


def _degenerate(
    targets: list[Target], parameters: Mapping[str, Tensor], degenerate: Degenerate, min_norm: float
) -> dict[str, str]:
    """Return the names of degenerate targets with the reason to skip each, with one transfer per device.

    Raises UserError for NaN and infinite weights, and for degenerate matrices where degenerate="raise".
    """
    matrices = [_matrix(t, parameters) for t in targets]
    names, peaks = [t.name for t in targets], _largest_entries(matrices)
    if bad := [name for name, peak in zip(names, peaks, strict=True) if not peak < math.inf]:
        raise UserError(
            f"NaN or infinite values in {shorten(bad)}: nothing was changed; restore finite weights first"
        )
    small = {name: "all-zero matrix" for name, peak in zip(names, peaks, strict=True) if peak == 0.0}
    norms = fetch([torch.linalg.matrix_norm(m).double() for m in matrices]) if min_norm > 0.0 else []
    for name, norm in zip(names, norms):
        if norm < min_norm:
            small.setdefault(name, f"norm {norm:.3g} is below min_norm={min_norm:g}")
    if small and degenerate == "raise":
        raise UserError(
            f"{next(iter(small.values()))} in {shorten(list(small))}: such a matrix has no reliable nearest orthogonal "
            "matrix, and nothing was changed; set degenerate to 'skip' to leave such matrices as they are, or exclude "
            "them with targets"
        )
    return small


def _largest_entries(matrices: list[Tensor]) -> list[float]:
    """Return the largest absolute entry of each matrix; NaN and infinity survive."""
    ranges = [torch.aminmax(matrix) for matrix in matrices]
    return fetch([torch.maximum(high, -low).double() for low, high in ranges])


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
                f"parameter {t.parameter!r} was made under torch.inference_mode and cannot be changed outside: call this "
                "inside torch.inference_mode, or build the model outside"
            )


def _check_initial(
    targets: list[Target], parameters: Mapping[str, Tensor], initial: Mapping[str, Tensor]
) -> None:
    for name in {t.parameter for t in targets} & set(initial):
        if not isinstance(initial[name], Tensor):
            raise UserError(f"initial holds {initial[name]!r:.80} as {name!r}: give a tensor")
        if initial[name].shape != parameters[name].shape:
            raise UserError(
                f"initial holds {name!r} as {tuple(initial[name].shape)}, but it is {tuple(parameters[name].shape)} in the "
                "model: nothing was changed; give the starting weights of this model"
            )


def _stack(group: list[Target], parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the matrices of a group, (count, out, in)."""
    return torch.stack([_matrix(t, parameters) for t in group])


def _matrix(t: Target, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix (out, in) of a target, float32 or float64. Raises UserError if its shape is not the table's."""
    try:
        matrix = t.matrix(parameters)
    except IndexError:
        matrix = parameters[t.parameter]
    if tuple(matrix.shape) != tuple(t.shape):
        raise UserError(
            f"target {t.name!r} is {tuple(t.shape)} in the table and {tuple(matrix.shape)} in the model: make the "
            "table with find_targets(model)"
        )
    matrix = matrix.detach()
    return matrix if matrix.dtype == torch.float64 else matrix.float()


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
