"""The solvers `exact` and `fast`: nearest matrix with orthonormal columns, on batches of tall matrices.

On a CPU the iteration is rational (three steps and a quintic reach singular values down to about 1e-4 of the
largest); on a GPU, where triangular solves are slow and products nearly free, it is polynomial. Matrices that
are clearly taller than wide are first reduced to a triangle by a Cholesky factor of X^T X. `exact` then
measures the residual and repairs only the matrices that fail, by ever surer means:

1. the iteration goes on from where it stopped (after a Householder QR for tall matrices);
2. the whole iteration in float64, which also decides whether a matrix has full rank;
3. SVD in float64, with lost rank completed (`fire_core.polar_svd`).

Steps 2 and 3 are reached only where sigma_min is below about 5e-7 sigma_max, or rank is lost. They cost ten times
the published 10 iterations on a CPU, and are the price of an answer that does not hang on rounding noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fire_core.polar_kernels import (
    cholesky_in_blocks,
    frobenius_of_lower,
    lower_gram,
    polynomial_steps,
    quintic_step,
    rational_steps,
    residual,
    solve_right,
)
from fire_core.polar_schedules import CUBIC, Step, finishing_quintic, quintic_schedule, rational_step
from fire_core.polar_svd import polar_by_svd, rank_threshold

TALL = 1.5
"""From this ratio of sides on, the matrix is reduced to a triangle first."""
SINGLE_MARGIN = 5e-7
"""sigma_min / sigma_max above which float32 products can tell full rank from rounding noise."""
DOUBLE_MARGIN = 1e-9
"""The same for float64 matrices; below it the SVD decides."""

LIFT = rational_step(3e-3)  # lifts by 120, and brings everything from 0.003 on to at least 0.35
SETTLE = rational_step(0.35, centred=True)
FINISH = finishing_quintic(0.009)  # SETTLE leaves [0.35, 1] at 1 +- 0.009, this at 1 +- 5e-7
SQUARE_RATIONAL = (LIFT, LIFT, SETTLE)  # singular values from 2.5e-5 of the bound on
FURTHER_RATIONAL = (LIFT, SETTLE)  # from 3e-3 on: what the first pass left
TRIANGLE_RATIONAL = (rational_step(0.04), rational_step(0.73, centred=True))  # from 0.04 on; a cubic finishes
DOUBLE_RATIONAL = (LIFT, LIFT, LIFT, LIFT, SETTLE)  # from 2e-9 on


@dataclass
class Solved:
    """Factors (b, m, n), their residuals (b,), steps spent (b,), and where rank was completed (b,)."""

    factor: Tensor
    residual: Tensor
    iterations: Tensor
    completed: Tensor

    def put(self, index: Tensor | slice, other: Solved) -> None:
        """Replace the matrices at `index` by those of `other`, adding the steps that it took."""
        self.factor[index] = other.factor
        self.residual[index] = other.residual
        self.iterations[index] += other.iterations
        self.completed[index] = other.completed


def solve_exact(matrices: Tensor, tolerance: float, rational: bool) -> Solved:
    """Polar factors of tall, finite, non-zero `matrices` (b, m, n) with residual at most `tolerance`.

    Largest entries must be within 2^-20 to 2^20. `rational` chooses the first passes: True on a CPU.
    """
    if matrices.dtype == torch.float64:
        return _by_double(matrices, tolerance)
    if _is_tall(matrices):
        solved = _tall_pass(matrices, rational)
        unsure = ~(solved.residual <= tolerance)
        _repair(solved, unsure, lambda index: _by_triangle(matrices[index], tolerance, rational))
        return solved
    return _square(matrices, tolerance, rational)


def solve_fast(matrices: Tensor, rational: bool) -> Solved:
    """Polar factors of tall, finite, non-zero `matrices` (b, m, n), but for their smallest singular values.

    Those below about 1e-3 of the spectral norm are only lifted, not brought to 1.
    """
    if _is_tall(matrices):
        solved = _tall_pass(matrices, rational)
        _repair(solved, ~(solved.residual <= 1e-3), lambda index: _fast_pass(matrices[index], rational))
        return solved
    return _fast_pass(matrices, rational)


def _is_tall(matrices: Tensor) -> bool:
    return matrices.shape[1] >= TALL * matrices.shape[2]


def _repair(solved: Solved, wanted: Tensor, solver) -> None:
    index = wanted.nonzero().flatten()
    if len(index):
        solved.put(index, solver(index))


def _solved(factor: Tensor, iterations: int, square: Tensor | None = None) -> Solved:
    count = torch.full((len(factor),), iterations, dtype=torch.int64, device=factor.device)
    return Solved(factor, residual(factor, square), count, torch.zeros_like(count, dtype=torch.bool))


def _square(matrices: Tensor, tolerance: float, rational: bool) -> Solved:
    """Nearly square matrices: a pass over all, and more for those that it leaves unfinished."""
    if rational:
        solved = _rational(matrices.clone(), SQUARE_RATIONAL, normalize=True)
    else:
        steps = (*quintic_schedule(1e-4, 1e-2), CUBIC)
        solved = _solved(polynomial_steps(matrices / spectral_bound(matrices), steps), len(steps))
    unsure = ~(solved.residual <= tolerance)
    _repair(
        solved,
        unsure,
        lambda index: _continue(matrices[index], solved.factor[index], tolerance, rational),
    )
    return solved


def _fast_pass(matrices: Tensor, rational: bool) -> Solved:
    if rational:
        return _rational(matrices.clone(), FURTHER_RATIONAL, normalize=True)
    steps = quintic_schedule(3e-3, 1e-2)
    return _solved(polynomial_steps(matrices / spectral_bound(matrices), steps), len(steps))


def _tall_pass(matrices: Tensor, rational: bool) -> Solved:
    """X = (X L^-T) L^T with L L^T = X^T X, so polar(X) = X L^-T polar(L)^T: the iteration is on n x n.

    The short schedule converges only where sigma_min is at least 1/25 of the bound, and there forming X^T X
    costs no accuracy worth speaking of; elsewhere the result is far from orthogonal, or NaN.
    """
    gram = matrices.new_empty(len(matrices), matrices.shape[2], matrices.shape[2])
    inverses = cholesky_in_blocks(lower_gram(matrices, gram))
    triangle = gram.tril()
    if rational:
        spare, square = torch.empty_like(gram), torch.empty_like(gram)
        rational_steps(triangle, TRIANGLE_RATIONAL, spare, square, normalize=True)
        steps: tuple[Step, ...] = (CUBIC,)
    else:
        triangle /= spectral_bound(triangle)
        steps = (*quintic_schedule(0.04, 1e-2), CUBIC)
    triangle = polynomial_steps(triangle, steps)
    factor = torch.bmm(matrices, solve_right(triangle, gram, inverses).mT)
    return _solved(factor, len(steps) + (len(TRIANGLE_RATIONAL) if rational else 0), gram)


def _by_triangle(matrices: Tensor, tolerance: float, rational: bool) -> Solved:
    """Ill-conditioned tall matrices: Householder QR, then the triangle as any square matrix."""
    basis, triangle = torch.linalg.qr(matrices)
    inner = _square(triangle, tolerance, rational)
    solved = _solved(torch.bmm(basis, inner.factor), 0)
    solved.iterations += inner.iterations
    # the rule of completion looks at the whole matrix, not at its triangle
    unsure = inner.completed | ~(solved.residual <= tolerance)
    _repair(solved, unsure, lambda index: _by_svd(matrices[index]))
    return solved


def _continue(matrices: Tensor, factor: Tensor, tolerance: float, rational: bool) -> Solved:
    """Second pass over nearly square matrices from where the first one stopped, then float64 for what is left."""
    if rational:
        solved = _rational(factor, FURTHER_RATIONAL, normalize=False)
    else:
        steps = (*quintic_schedule(1e-3, 1e-2), CUBIC)
        solved = _solved(polynomial_steps(factor / 1.01, steps), len(steps))
    sure = (solved.residual <= tolerance) & _full_rank(solved.factor, matrices, SINGLE_MARGIN)
    _repair(solved, ~sure, lambda index: _by_double(matrices[index], tolerance))
    return solved


def _by_double(matrices: Tensor, tolerance: float) -> Solved:
    """Float64 iteration, a few matrices at a time, then SVD for those that it cannot vouch for."""
    parts = []
    # float64 copies of a float32 stack take twice the room, so the stack is cut
    for piece in matrices.split(max(1, len(matrices) // 8)):
        double = piece.double()
        solved = _rational(double.clone(), DOUBLE_RATIONAL, normalize=True)
        solved.factor = polynomial_steps(solved.factor, (CUBIC,))
        solved.residual = residual(solved.factor)
        margin = max(rank_threshold(matrices.dtype), DOUBLE_MARGIN)
        sure = (solved.residual <= tolerance) & _full_rank(solved.factor, double, margin)
        _repair(
            solved, ~sure, lambda index, double=double, dtype=matrices.dtype: _by_svd(double[index], dtype)
        )
        solved.factor = solved.factor.to(matrices.dtype)
        parts.append(solved)
    fields = [torch.cat([getattr(part, name) for part in parts]) for name in Solved.__annotations__]
    result = Solved(*fields)
    if matrices.dtype != torch.float64:
        result.residual = residual(result.factor)
    return result


def _by_svd(matrices: Tensor, dtype: torch.dtype | None = None) -> Solved:
    factor, completed = polar_by_svd(matrices, dtype)
    solved = _solved(factor, 0)
    solved.completed = completed
    return solved


def _rational(work: Tensor, steps: tuple[Step, ...], *, normalize: bool) -> Solved:
    """Rational steps and the finishing quintic on `work`, which is overwritten."""
    spare = torch.empty_like(work)
    square = work.new_empty(len(work), work.shape[2], work.shape[2])
    rational_steps(work, steps, spare, square, normalize=normalize)
    return _solved(quintic_step(work, FINISH, spare, square), len(steps) + 1, square)


def spectral_bound(matrices: Tensor) -> Tensor:
    """Upper bound (b, 1, 1) on the spectral norms of `matrices` (b, m, n): ||X^T X||_F^(1/2), 0.2 % up."""
    gram = matrices.new_empty(len(matrices), matrices.shape[2], matrices.shape[2])
    return 1.002 * frobenius_of_lower(lower_gram(matrices, gram)).sqrt()


def _full_rank(factor: Tensor, matrices: Tensor, margin: float) -> Tensor:
    """Whether every singular value is above `margin` times the largest, (b,): factor^T X tells.

    It is symmetric, with the singular values of X as eigenvalues; a Cholesky factor of it shifted down exists
    if and only if all of them are larger than the shift. The largest comes from power iteration.
    """
    symmetric = torch.bmm(factor.mT, matrices)
    symmetric = (symmetric + symmetric.mT) / 2
    vector = symmetric.sum(dim=2, keepdim=True) + symmetric.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    for _ in range(12):
        vector = torch.bmm(symmetric, torch.nn.functional.normalize(vector, dim=1))
    largest = torch.linalg.vector_norm(vector, dim=1)
    symmetric.diagonal(dim1=-2, dim2=-1).sub_(margin * largest)
    return torch.linalg.cholesky_ex(symmetric)[1] == 0
