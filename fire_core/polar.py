"""Nearest (semi-)orthogonal matrix of every matrix of a batch: the projection that FIRE is made of.

For W (m, n) with the singular value decomposition U S V^T, the nearest matrix with orthonormal columns
(m >= n) or rows (m < n) in the Frobenius norm is U V^T (orthogonal Procrustes; FIRE, Eq. 4 and 5).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fire_core.errors import UserError
from fire_core.polar_svd import polar_by_svd, rank_threshold

SOLVERS = ("newton_schulz", "exact", "fast")
NORMALIZATIONS = ("frobenius", "spectral")
PRECISIONS = ("fp32", "tf32")

CUBIC = (1.5, -0.5, 0.0)  # Newton-Schulz step, FIRE section 3
LONG_SCHEDULE = (  # minimax composition of 13 quintics for singular values in [1e-7, 1]
    (8.32172, -23.69427, 17.37255),
    (4.15255, -2.94408, 0.53750),
    (4.15255, -2.94408, 0.53750),
    (4.15246, -2.94406, 0.53750),
    (4.15216, -2.94398, 0.53751),
    (4.15094, -2.94367, 0.53755),
    (4.14584, -2.94235, 0.53773),
    (4.12487, -2.93695, 0.53848),
    (4.04073, -2.91578, 0.54180),
    (3.69697, -2.75463, 0.53688),
    (2.76162, -2.05174, 0.45811),
    (1.98596, -1.36573, 0.38477),
    (1.87357, -1.24671, 0.37315),
)


class Polar(NamedTuple):
    """What `polar` returns; the leading dimensions `...` are those of the input."""

    factor: Tensor
    """(..., m, n), float32 (float64 for float64 input)."""
    residual: Tensor
    """(...), ||Q^T Q - I||_F^2 of the factor on its smaller side (FIRE, Eq. 2)."""
    iterations: Tensor
    """(...), int64, matrix iterations spent on each matrix."""
    completed: Tensor
    """(...), bool, true where lost rank was completed by the deterministic rule."""


def polar(
    matrices: Tensor,
    solver: str = "exact",
    *,
    iterations: int = 10,
    normalize: str = "frobenius",
    tolerance: float = 1e-8,
    precision: str = "fp32",
) -> Polar:
    """Move each matrix of `matrices` (..., m, n) to the nearest (semi-)orthogonal one, or part of the way.

    Raises UserError for zero or non-finite matrices, with their index in the batch.
    """
    _check_arguments(matrices, solver, iterations, normalize, tolerance, precision)
    batch_shape, (rows, columns) = matrices.shape[:-2], matrices.shape[-2:]
    with torch.no_grad(), _full_precision(matrices.device, precision):
        working = matrices.detach().to(torch.float64 if matrices.dtype == torch.float64 else torch.float32)
        working = working.reshape(-1, rows, columns)
        _check_values(working, batch_shape)
        tall = working if rows >= columns else working.mT
        unit = unit_norm(tall, "frobenius")
        if solver == "newton_schulz":
            start = unit if normalize == "frobenius" else unit_norm(tall, "spectral")
            result = _fixed(start, (CUBIC,) * iterations)
        elif solver == "fast":
            result = _fixed(unit, LONG_SCHEDULE[-5:])
        else:
            result = _exact(unit, tolerance)
    factor = result.factor if rows >= columns else result.factor.mT
    return Polar(factor.reshape(matrices.shape), *(part.reshape(batch_shape) for part in result[1:]))


def unit_norm(matrices: Tensor, normalize: str) -> Tensor:
    """`matrices` (b, m, n) divided by their Frobenius or spectral norm, without overflow or underflow."""
    largest = matrices.abs().amax(dim=(-2, -1), keepdim=True)
    scaled = matrices / largest
    norms = torch.linalg.matrix_norm(scaled, 2 if normalize == "spectral" else "fro", keepdim=True)
    return scaled / norms


def fixed_steps(matrices: Tensor, coefficients: tuple[tuple[float, float, float], ...]) -> Tensor:
    """Apply x -> a x + b x^3 + c x^5 to the singular values of tall `matrices`, for each (a, b, c)."""
    for a, b, c in coefficients:
        gram = matrices.mT @ matrices
        update = b * gram + c * (gram @ gram) if c else b * gram
        matrices = a * matrices + matrices @ update
    return matrices


def residual_of(factors: Tensor) -> Tensor:
    """||Q^T Q - I||_F^2 of tall `factors` (b, m, n) -> (b,)."""
    gram = factors.mT @ factors
    gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return gram.square().sum(dim=(-2, -1))


def _fixed(start: Tensor, coefficients: tuple[tuple[float, float, float], ...]) -> Polar:
    factor = fixed_steps(start, coefficients)
    count = torch.full((len(start),), len(coefficients), dtype=torch.int64, device=start.device)
    return Polar(factor, residual_of(factor), count, torch.zeros_like(count, dtype=torch.bool))


def _exact(unit: Tensor, tolerance: float) -> Polar:
    if unit.dtype == torch.float64:  # the long schedule is built for float32's reach
        factor, completed = polar_by_svd(unit)
        return Polar(factor, residual_of(factor), torch.zeros_like(completed, dtype=torch.int64), completed)
    factor, residual, count, completed = _fixed(unit, (*LONG_SCHEDULE, CUBIC, CUBIC))
    stretch = torch.linalg.eigvalsh(factor.mT @ unit)  # singular values of unit, up to rounding
    unsure = (stretch[:, 0] <= 8 * rank_threshold(unit.dtype) * stretch[:, -1]) | ~(residual <= tolerance)
    for index in unsure.nonzero().flatten().tolist():
        factor[index], completed[index] = (part[0] for part in polar_by_svd(unit[index : index + 1]))
    return Polar(factor, residual_of(factor), count, completed)


def _check_arguments(
    matrices: Tensor, solver: str, iterations: int, normalize: str, tolerance: float, precision: str
) -> None:
    for name, value, allowed in (
        ("solver", solver, SOLVERS),
        ("normalize", normalize, NORMALIZATIONS),
        ("precision", precision, PRECISIONS),
    ):
        if value not in allowed:
            raise UserError(f"{name}={value!r} is unknown: choose one of {', '.join(allowed)}")
    if iterations < 1:
        raise UserError(f"iterations={iterations} must be at least 1")
    if not tolerance > 0:
        raise UserError(f"tolerance={tolerance} must be positive")
    if matrices.ndim < 2 or 0 in matrices.shape[-2:]:
        raise UserError(f"matrices of shape {tuple(matrices.shape)}: need (..., m, n) with m, n >= 1")
    if not matrices.dtype.is_floating_point:
        raise UserError(f"matrices of type {matrices.dtype} cannot be projected: convert them to float32")


def _check_values(working: Tensor, batch_shape: torch.Size) -> None:
    largest = working.abs().amax(dim=(-2, -1))  # NaN and infinity both survive the maximum
    bad = ~(largest.isfinite() & (largest > 0))
    if not bad.any():
        return
    index = int(bad.nonzero()[0])
    where = (
        tuple(int(i) for i in torch.unravel_index(torch.tensor(index), batch_shape)) if batch_shape else ()
    )
    what = "zero" if largest[index] == 0 else "not finite"
    raise UserError(
        f"matrix {where} of the batch is {what}: it has no nearest orthogonal matrix; "
        "leave it out or mend it first"
    )


@contextmanager
def _full_precision(device: torch.device, precision: str) -> Iterator[None]:
    setting = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = setting
