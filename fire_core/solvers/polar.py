"""The nearest (semi-)orthogonal matrix of every matrix of a batch: the projection behind FIRE.

For W (m, n) with the singular value decomposition U S V^T, the nearest matrix with orthonormal columns
(m >= n) or rows (m < n) in the Frobenius norm is U V^T (orthogonal Procrustes; FIRE, Eq. 4 and 5).
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fire_core.errors import UserError, check_word
from fire_core.solvers.exact import Solved, solve_exact, solve_fast
from fire_core.solvers.kernels import polynomial_steps, residual
from fire_core.solvers.precision import matmul_precision
from fire_core.solvers.schedules import CUBIC, MUON_QUINTIC, Step

Solver = Literal["newton_schulz", "exact", "fast", "quintic"]
Normalize = Literal["frobenius", "spectral"]
Precision = Literal["fp32", "tf32"]

STACK_BYTES = {"cpu": 8 * 2**20, "cuda": 128 * 2**20}
"""Matrices are solved in stacks of at most this size in bytes (one matrix, if larger)."""
CACHED_BYTES = 512 * 2**10
"""The same on a CPU for newton_schulz and quintic, so that a stack fits into the processor's cache."""


class Polar(NamedTuple):
    """Result of `polar`; the leading dimensions `...` are those of the input."""

    factor: Tensor
    """(..., m, n), float32 (float64 for float64 input)."""
    residual: Tensor
    """(...), `||Q^T Q - I||_F^2` of the factor on its smaller side (FIRE, Eq. 2)."""
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
    measure: bool = True,
) -> Polar:
    """Return the nearest (semi-)orthogonal matrix of each matrix of `matrices` (..., m, n), or an approximation to it.

    Wide matrices get orthonormal rows, tall ones orthonormal columns. Smaller types are first converted to float32;
    float64 stays. The input is not changed, and no gradient flows. The scale of the input does not matter: matrices
    with very large or small entries (1e30, 1e-30) are first divided by a power of two.

    "newton_schulz" is the published algorithm (FIRE, section 3): X = W / `||W||`, then `iterations` steps
    X <- 1.5 X - 0.5 X X^T X. It equals the formula up to rounding, and on a CPU a matrix gives the same bits alone or
    in a batch. It guarantees *nothing* about the residual: 10 steps leave the small singular values of a square matrix
    well below 1. Lost rank stays lost.

    "quintic" is the algorithm of Muon (Jordan et al. 2024): X = W / `||W||`, then `iterations` steps
    X <- 3.4445 X - 4.7750 X X^T X + 2.0315 (X X^T)^2 X, in float32 at least. Muon takes 5. It is *inexact by design*:
    after 5 steps, singular values that were above about 1.5e-3 of the norm lie between 0.68 and 1.21, and more steps
    bring them no closer to 1. Smaller ones need more steps to get there.

    "exact" is the orthogonal polar factor U V^T. It guarantees residual <= `tolerance` for every finite, non-zero input
    whose smaller side is 25 to 768, whatever its condition; for other sizes the bound is in proportion to the side
    (float32 itself reaches about 1e-9 at 768). The relative error of the factor is at most 1e-5 plus 2e-7 times the
    condition number in float32, as for any float32 method. Singular values below the machine epsilon times the largest
    count as lost rank, which `completed` reports. Of all factors that are then equally near to W, the result is the one
    nearest to the rectangular identity (see `fire_core.solvers.completion`).

    "fast" is one pass without repair. Singular values above about 1e-2 of the largest end within 2e-4 of 1, on a CPU
    usually within 1e-6. Smaller ones grow but may stay below 1, and lost rank stays lost.

    Memory beside the result: about 4 times the larger of STACK_BYTES and the largest matrix. A matrix that needs the
    float64 SVD takes up to 20 times its own size.

    Args:
        matrices: (..., m, n).
        solver: "newton_schulz", "quintic", "exact" or "fast".
        iterations: number of steps of newton_schulz and quintic.
        normalize: the norm by which newton_schulz and quintic divide at the start. "frobenius" is published;
            "spectral", the largest singular value, saves 5 or 6 steps at 512 columns.
        tolerance: largest residual of exact; the error above is for the default. A larger tolerance saves repairs of
            single matrices, but no passes over all of them. One that the type cannot reach (1e-14 in float32) sends
            every matrix to the SVD, and `residual` contains what was reached.
        precision: "fp32" computes in full float32 whatever `torch.set_float32_matmul_precision` says, and under
            autocast. "tf32" lets CUDA multiply in TF32: expect a relative error of about 2e-3 and a residual (measured
            in TF32 too) no better than 1e-4. The solver exact and CPUs ignore it.
        measure: False saves the residual of newton_schulz and quintic, which is then NaN.
    Returns: Polar(factor, residual, iterations, completed).
    Raises: UserError for zero or non-finite matrices (with the index in the batch) and for wrong settings.
    """
    check_solver(solver, iterations, normalize, tolerance, precision)
    _check_matrices(matrices)
    batch_shape, (rows, columns) = matrices.shape[:-2], matrices.shape[-2:]
    with torch.no_grad(), matmul_precision(matrices.device, "fp32" if solver == "exact" else precision):
        working = matrices.detach().to(torch.float64 if matrices.dtype == torch.float64 else torch.float32)
        working = working.reshape(-1, rows, columns)
        moderate = _check_values(working, batch_shape)
        tall = working if rows >= columns else working.mT
        rational = matrices.device.type == "cpu"
        # the default allows at most 4e-10 per column, which is a relative error of 1e-5
        allowed = tolerance * max(1.0, min(rows, columns) / 768) * min(1.0, min(rows, columns) / 25)

        def solve(stack: Tensor) -> Solved:
            stack = stack if moderate else _moderate(stack)
            if solver == "exact":
                return solve_exact(stack, allowed, rational)
            if solver == "fast":
                return solve_fast(stack, rational)
            step = CUBIC if solver == "newton_schulz" else MUON_QUINTIC
            return _published(stack, step, iterations, normalize, measure)

        repairs = solver in ("exact", "fast")
        solved = _in_stacks(tall, solve, _stack_length(tall, repairs))
    factor = solved.factor if rows >= columns else solved.factor.mT
    parts = (solved.residual, solved.iterations, solved.completed)
    return Polar(factor.reshape(matrices.shape), *(part.reshape(batch_shape) for part in parts))


def _published(matrices: Tensor, step: Step, iterations: int, normalize: str, measure: bool) -> Solved:
    """Repeat one step, starting from each matrix divided by its Frobenius or spectral norm."""
    norm = torch.linalg.matrix_norm(matrices, 2 if normalize == "spectral" else "fro", keepdim=True)
    factor = polynomial_steps(matrices / norm, (step,) * iterations)
    count = torch.full((len(factor),), iterations, dtype=torch.int64, device=factor.device)
    left = residual(factor) if measure else factor.new_full((len(factor),), torch.nan)
    return Solved(factor, left, count, torch.zeros_like(count, dtype=torch.bool))


def _stack_length(tall: Tensor, repairs: bool) -> int:
    """Return how many of the matrices (b, m, n) are solved at once."""
    if tall.device.type == "cpu" and not repairs:
        limit = CACHED_BYTES
    else:  # repairs need a little more than the four copies of the first pass
        limit = 3 * STACK_BYTES.get(tall.device.type, STACK_BYTES["cuda"]) // 4
    return max(1, limit // (tall.shape[1] * tall.shape[2] * tall.element_size()))


def _in_stacks(tall: Tensor, solve: Callable[[Tensor], Solved], length: int) -> Solved:
    """Run `solve` on (b, m, n) in stacks of `length` and return the joined results."""
    if len(tall) <= length and len(tall) > 0:
        return solve(tall)
    result = Solved(
        torch.empty(tall.shape, dtype=tall.dtype, device=tall.device),
        tall.new_empty(len(tall)),
        torch.zeros(len(tall), dtype=torch.int64, device=tall.device),
        torch.zeros(len(tall), dtype=torch.bool, device=tall.device),
    )
    for start in range(0, len(tall), length):
        result.put(slice(start, start + length), solve(tall[start : start + length]))
    return result


def _moderate(matrices: Tensor) -> Tensor:
    """Return `matrices` (b, m, n) divided by powers of two, which is exact; largest entries are then near 1."""
    largest = matrices.abs().amax(dim=(-2, -1), keepdim=True)
    mantissa, _ = torch.frexp(largest)
    return matrices / (largest / (2 * mantissa))


def check_solver(solver: str, iterations: int, normalize: str, tolerance: float, precision: str) -> None:
    """Raise UserError for a setting that `polar` does not accept."""
    check_word("solver", solver, Solver)
    check_word("normalize", normalize, Normalize)
    check_word("precision", precision, Precision)
    if not isinstance(iterations, Integral) or isinstance(iterations, bool) or iterations < 1:
        raise UserError(f"iterations={iterations!r} must be a whole number, at least 1")
    if not isinstance(tolerance, Real) or not tolerance > 0:
        raise UserError(f"tolerance={tolerance!r} must be a positive number")


def _check_matrices(matrices: Tensor) -> None:
    if matrices.ndim < 2 or 0 in matrices.shape[-2:]:
        raise UserError(f"matrices of shape {tuple(matrices.shape)}: need (..., m, n) with m, n >= 1")
    if not matrices.dtype.is_floating_point:
        raise UserError(f"matrices of type {matrices.dtype} cannot be projected: convert them to float32")


def _check_values(working: Tensor, batch_shape: torch.Size) -> bool:
    """Raise UserError for zero or non-finite matrices; return whether all largest entries lie in [2^-20, 2^20]."""
    if not len(working):
        return True
    entries = working.flatten(1)
    largest = torch.maximum(entries.amax(dim=1), -entries.amin(dim=1))  # NaN and infinity survive
    bad = ~(largest.isfinite() & (largest > 0))
    immoderate = (largest < 2.0**-20) | (largest > 2.0**20)
    any_bad, any_immoderate = torch.stack([bad.any(), immoderate.any()]).tolist()
    if not any_bad:
        return not any_immoderate
    index = int(bad.nonzero()[0])
    what = "zero" if largest[index] == 0 else "not finite"
    where = ""
    if batch_shape:
        position = torch.unravel_index(torch.tensor(index), batch_shape)
        where = f" {tuple(int(i) for i in position)} of the batch"
    raise UserError(
        f"matrix{where} is {what}, so it has no nearest orthogonal matrix: leave it out or repair it first"
    )
