"""The solvers `exact` and `fast`: nearest matrix with orthonormal columns, on batches of tall matrices.

On a CPU the iteration is rational (two steps bring singular values down to about 1e-3 of the largest next to 1);
on a GPU, where triangular solves are slow and products nearly free, it is polynomial. Matrices that are clearly
taller than wide are first reduced to a triangle by a Cholesky factor of X^T X. What `exact` adds to `fast`:

1. where more than a few singular values are unfinished, the iteration continues;
2. the last few are set to 1 in one stroke (`_deflate`), which also tells whether rank is lost;
3. the residual is measured, and what fails goes to the SVD in float64, with lost rank completed
   (`fire_core.solvers.completion`).

Step 3 is reached where sigma_min is below about 1.4e-7 sigma_max, or where more than an eighth of the singular values
are below about 2e-5 of it. It costs six times the published 10 iterations on a CPU (with completion more), and is the
price of an answer that does not hang on rounding noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fire_core.solvers.completion import polar_by_svd
from fire_core.solvers.kernels import (
    cholesky_in_blocks,
    frobenius_of_lower,
    lower_gram,
    mirror,
    polynomial_steps,
    quintic_step,
    rational_steps,
    residual,
    solve_right,
)
from fire_core.solvers.schedules import CUBIC, Step, finishing_quintic, quintic_schedule, rational_step

TALL = 1.5
"""From this ratio of sides on, the matrix is reduced to a triangle first."""
SINGLE_MARGIN = 1.4e-7
"""sigma_min / sigma_max above which a float32 matrix has full rank for sure; below it the SVD decides."""
DOUBLE_MARGIN = 1e-9
"""The same for float64 matrices."""
MIXED = 3e-4
"""Error ||A v - lambda v|| of a singular direction v beyond which it is not deflated: that would turn the result."""
DROWNED = 1e-4
"""Singular value of an iterate below which its left vector is mostly rounding: it was lifted 650 times at least."""
UNFINISHED = 2e-4
"""||X^T X - I||_F^2 per column that is usual where every singular value is within 1 % of 1."""

LIFT = rational_step(3e-3)  # lifts by 120, and brings everything from 0.003 on to at least 0.35
SETTLE = rational_step(0.35, centred=True)
FINISH = finishing_quintic(0.009)  # SETTLE leaves [0.35, 1] at 1 +- 0.009, this at 1 +- 5e-7
SQUARE_RATIONAL = (LIFT, SETTLE)  # singular values from 3e-3 of the bound on
SQUARE_POLYNOMIAL = quintic_schedule(1e-4, 1e-2)
FURTHER_POLYNOMIAL = quintic_schedule(5e-2, 1e-2)
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
        if solved is None:
            return _by_triangle(matrices, tolerance, rational)
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
        if solved is None:
            return _fast_pass(matrices, rational)
        _repair(solved, ~(solved.residual <= 1e-3), lambda index: _fast_pass(matrices[index], rational))
        return solved
    return _fast_pass(matrices, rational)


def _is_tall(matrices: Tensor) -> bool:
    return matrices.shape[1] >= TALL * matrices.shape[2]


def _repair(solved: Solved, wanted: Tensor, solver: Callable[[Tensor], Solved]) -> None:
    index = wanted.nonzero().flatten()
    if len(index):
        solved.put(index, solver(index))


def _solved(factor: Tensor, iterations: int, square: Tensor | None = None) -> Solved:
    count = torch.full((len(factor),), iterations, dtype=torch.int64, device=factor.device)
    return Solved(factor, residual(factor, square), count, torch.zeros_like(count, dtype=torch.bool))


def _square(matrices: Tensor, tolerance: float, rational: bool) -> Solved:
    """Nearly square matrices: iterate, continue where much is unfinished, deflate the rest, finish and check.

    All steps of a matrix together multiply by less than 1e6, so that the rounding errors of float32 (1e-7) do not grow to 1
    and lost rank stays visible.
    """
    columns = matrices.shape[2]
    work = matrices.clone()
    spare = torch.empty_like(work)
    square = work.new_empty(len(work), columns, columns)
    count = torch.full((len(work),), 1, dtype=torch.int64, device=work.device)  # the step that finishes
    twice = torch.zeros_like(count, dtype=torch.bool)
    if rational:
        far_below = rational_steps(work, (LIFT,), spare, square, normalize=True)
        twice = far_below > columns / 5
        _steps_at(twice, work, (LIFT,), spare, square)
        rational_steps(work, (SETTLE,), spare, square, normalize=False)
        count += 2 + twice.long()
    else:
        work.copy_(polynomial_steps(work / spectral_bound(work), SQUARE_POLYNOMIAL))
        count += len(SQUARE_POLYNOMIAL)
    # a spectrum that needs the second lift has more values on the way to 1
    room = min(columns, max(16, columns // (12 if rational and bool(twice.any()) else 16)))
    suspect = torch.where(twice, 0.08, 0.01)
    unfinished = residual(work, square)
    again = unfinished > room / 2
    if bool(again.any()):
        if rational:
            _steps_at(again & ~twice, work, (LIFT,), spare, square)
            _steps_at(again, work, (SETTLE,), spare, square)
            count += again.long() + (again & ~twice).long()
        else:
            work[again] = polynomial_steps(work[again] / 1.01, FURTHER_POLYNOMIAL)
            count += len(FURTHER_POLYNOMIAL) * again
        suspect.masked_fill_(again, 0.5)
        unfinished = residual(work, square)
    smallest = torch.full_like(suspect, torch.inf)
    crowded = (unfinished > room / 2).nonzero().flatten()
    if len(crowded):  # an eighth of the directions fits into a room of a quarter, at a higher price
        rest, away, about = (_at(each, crowded) for each in (work, square, matrices))
        smallest[crowded] = _deflate(rest, away, max(room, columns // 4), about, suspect[crowded])
        if rest is not work:
            work[crowded] = rest
        unfinished = residual(work, square)
    if bool((unfinished > UNFINISHED * columns).any()):
        smallest = torch.minimum(smallest, _deflate(work, square, room, matrices, suspect))
    lost = smallest < SINGLE_MARGIN
    factor = quintic_step(work, FINISH, spare, square) if rational else polynomial_steps(work, (FINISH,))
    solved = Solved(factor, residual(factor, square), count, torch.zeros_like(lost))
    del work, spare, square, factor  # room for the repairs
    for _ in range(4):
        nearly = (solved.residual > tolerance) & (solved.residual < 1) & ~lost
        _repair(solved, nearly, lambda index: _solved(polynomial_steps(solved.factor[index], (CUBIC,)), 1))
    _repair(solved, lost | ~(solved.residual <= tolerance), lambda index: _by_svd(matrices[index]))
    return solved


def _at(batch: Tensor, index: Tensor) -> Tensor:
    """`batch[index]`, without a copy where the index names every matrix."""
    return batch if len(index) == len(batch) else batch[index]


def _steps_at(wanted: Tensor, work: Tensor, steps: tuple[Step, ...], spare: Tensor, square: Tensor) -> None:
    """Take rational steps, in place, on the matrices of `work` that the mask (b,) selects."""
    index = wanted.nonzero().flatten()
    if len(index):
        rest = _at(work, index)
        rational_steps(rest, steps, spare[: len(index)], square[: len(index)], normalize=False)
        if rest is not work:
            work[index] = rest


def _deflate(work: Tensor, away: Tensor, room: int, matrices: Tensor, suspect: Tensor) -> Tensor:
    """Set the few singular values of `work` (b, m, n) that are not near 1 to 1, in place.

    `away`, X^T X - I below the diagonal, is small but for the unfinished directions, so that a few products with
    it and the eigenvectors of a `room` x `room` matrix give an orthonormal basis V of just those. With the QR
    factors Q R of X V and P the polar factor of R, the part X V V^T becomes Q P V^T. Directions that V does not
    hold cleanly are left to the polynomial steps that follow.

    Returns (b,), sigma_min / sigma_max of `matrices`, of which `work` is the iterate, where the smallest value of
    `work` is below `suspect` (b,), and infinity elsewhere. It comes from Q^T W V in float64, since float32 steps
    drown it, and is right to a twentieth; where even Q is drowned, 0 is returned.
    """
    mirror(away)
    basis = _probes(away.shape[2], room).to(away).expand(len(away), -1, -1)
    for _ in range(3):
        basis = torch.linalg.qr(torch.bmm(away, torch.bmm(away, basis))).Q
    image = torch.bmm(away, basis)
    distance, rotation = torch.linalg.eigh(torch.bmm(basis.mT, image))
    basis, image = torch.bmm(basis, rotation), torch.bmm(image, rotation)
    error = torch.linalg.vector_norm(image - basis * distance.unsqueeze(1), dim=1)
    # the finished ones are above -0.018; ascending, so that the chosen ones come first and R is block diagonal
    chosen = ((distance < -0.03) & (error < MIXED)).to(work.dtype).cumprod(dim=1).unsqueeze(1)
    part = torch.bmm(work, basis) * chosen
    left, triangle = torch.linalg.qr(part)
    left_vectors, singular, right_vectors = torch.linalg.svd(triangle + torch.diag_embed(1 - chosen[:, 0]))
    work.baddbmm_(torch.bmm(left, torch.bmm(left_vectors, right_vectors)) * chosen - part, basis.mT)
    smallest = torch.full_like(suspect, torch.inf)
    found = (singular[:, -1] < suspect).nonzero().flatten()
    for some in found.split(max(1, 2**18 // matrices[0].numel())) if len(found) else ():
        largest = _largest(matrices[some])
        right, inner = basis[some].double(), 0.0
        for q, w in zip(left[some].split(256, dim=1), matrices[some].split(256, dim=1), strict=True):
            inner = inner + q.double().mT @ (w.double() @ right)
        outside = torch.diag_embed((1 - chosen[some, 0]) * largest.unsqueeze(1))
        inner = inner * chosen[some].mT * chosen[some] + outside
        smallest[some] = torch.linalg.svdvals(inner)[:, -1].to(largest.dtype) / largest
    return smallest.masked_fill_(singular[:, -1] < DROWNED, 0.0)


@lru_cache
def _probes(columns: int, count: int) -> Tensor:
    """Fixed Gaussian directions (columns, count)."""
    return torch.randn(
        columns, count, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )


def _largest(matrices: Tensor) -> Tensor:
    """Largest singular values (b,) by block power iteration, up to a twentieth too small."""
    block = _probes(matrices.shape[2], min(8, matrices.shape[2])).to(matrices)
    for _ in range(6):
        block = torch.matmul(matrices.mT, torch.matmul(matrices, torch.linalg.qr(block).Q))
    return torch.linalg.matrix_norm(block, 2).sqrt()


def _smallest_of_triangles(triangles: Tensor) -> Tensor:
    """Smallest singular values (b,) of upper triangles by inverse iteration, roughly; NaN or 0 if it is 0."""
    block = (
        _probes(triangles.shape[2], min(8, triangles.shape[2])).to(triangles).expand(len(triangles), -1, -1)
    )
    for _ in range(3):
        block = torch.linalg.solve_triangular(triangles.mT, torch.linalg.qr(block).Q, upper=False)
        block = torch.linalg.solve_triangular(triangles, block, upper=True)
    return torch.linalg.vector_norm(block, dim=1).amax(dim=1).rsqrt()


def _fast_pass(matrices: Tensor, rational: bool) -> Solved:
    if rational:
        return _rational(matrices.clone(), SQUARE_RATIONAL)
    steps = quintic_schedule(3e-3, 1e-2)
    return _solved(polynomial_steps(matrices / spectral_bound(matrices), steps), len(steps))


def _tall_pass(matrices: Tensor, rational: bool) -> Solved | None:
    """X = (X L^-T) L^T with L L^T = X^T X, so polar(X) = X L^-T polar(L)^T: the iteration is on n x n.

    The short schedule converges only where sigma_min is at least 1/25 of the bound, and there forming X^T X
    costs no accuracy worth speaking of; elsewhere the result is far from orthogonal, or NaN. None where L shows that this
    holds for all of them.
    """
    gram = matrices.new_empty(len(matrices), matrices.shape[2], matrices.shape[2])
    inverses = cholesky_in_blocks(lower_gram(matrices, gram))
    diagonal = gram.diagonal(
        dim1=-2, dim2=-1
    )  # sigma_min is below its least entry, sigma_max above its largest
    if not bool((diagonal.amin(dim=1) > 0.02 * diagonal.amax(dim=1)).any()):
        return None
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
    """Ill-conditioned tall matrices: Householder QR, then the triangle as any square matrix.

    Where rank may be lost the QR is in float64: in float32 its rounding alone makes it look full.
    """
    basis, triangle = torch.linalg.qr(matrices)
    sure = _smallest_of_triangles(triangle) > 1e-5 * torch.linalg.matrix_norm(triangle)
    for i in (~sure).nonzero().flatten():
        basis[i], triangle[i] = torch.linalg.qr(matrices[i].double())
    inner = _square(triangle, tolerance, rational)
    solved = _solved(torch.bmm(basis, inner.factor), 0)
    solved.iterations += inner.iterations
    # the rule of completion looks at the whole matrix, not at its triangle
    unsure = inner.completed | ~(solved.residual <= tolerance)
    _repair(solved, unsure, lambda index: _by_svd(matrices[index]))
    return solved


def _by_double(matrices: Tensor, tolerance: float) -> Solved:
    """Float64 matrices: one long iteration, then SVD for those that it cannot vouch for."""
    solved = _rational(matrices.clone(), DOUBLE_RATIONAL)
    solved.factor = polynomial_steps(solved.factor, (CUBIC,))
    solved.residual = residual(solved.factor)
    sure = (solved.residual <= tolerance) & _full_rank(solved.factor, matrices, DOUBLE_MARGIN)
    _repair(solved, ~sure, lambda index: _by_svd(matrices[index]))
    return solved


def _by_svd(matrices: Tensor) -> Solved:
    factor, completed = polar_by_svd(matrices)
    solved = _solved(factor, 0)
    solved.completed = completed
    return solved


def _rational(work: Tensor, steps: tuple[Step, ...]) -> Solved:
    """Rational steps and the finishing quintic on `work`, which is overwritten."""
    spare = torch.empty_like(work)
    square = work.new_empty(len(work), work.shape[2], work.shape[2])
    rational_steps(work, steps, spare, square, normalize=True)
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
