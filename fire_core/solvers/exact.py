"""The solver `exact`: nearest matrix with orthonormal columns, on batches of tall matrices.

On a CPU the iteration is rational: two steps bring to about 1 every singular value above 3e-3 of a bound on the largest,
which is 3 times too large for Gaussian matrices of 768 columns. On a GPU, where triangular solves are slow and products
cheap, it is polynomial. Matrices that are clearly taller than wide are first reduced to a triangle, by a Cholesky factor of
X^T X. Where more than a few singular values are unfinished, the iteration continues. The last few are set to 1 directly
(`_deflate`), which also shows whether rank is lost. Matrices above the tolerance go to the SVD in float64, which completes
lost rank, and so do all that are given in float64.

The SVD is needed where sigma_min is below about 1.4e-7 sigma_max, or where more than an eighth of the singular values are
below about 2e-5 sigma_max. On a CPU it costs six times the published 10 iterations. Without it, rounding would decide.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from fire_core.solvers import kernels
from fire_core.solvers.completion import complete
from fire_core.solvers.polar import Polar, polynomial_steps, residual
from fire_core.solvers.schedules import CUBIC, Step, finishing_quintic, quintic_schedule, rational_step

TALL = 1.5
"""Matrices with at least this ratio of rows to columns are first reduced to a triangle."""
SINGLE_MARGIN = 1.4e-7
"""sigma_min / sigma_max above which a float32 matrix certainly has full rank; below it the SVD decides."""
MIXED = 3e-4
"""Largest error ||A v - lambda v|| of a direction v that is deflated; a larger one would rotate the result."""
DROWNED = 1e-4
"""Singular value of an iterate below which its left vector consists mostly of rounding errors."""
UNFINISHED = 2e-4
"""Residual per column that is usual if all singular values are within 1 % of 1; above it, `_deflate` runs."""

LIFT = rational_step(3e-3)  # multiplies small values by 120 and maps [0.003, 1] into [0.35, 1]
SETTLE = rational_step(0.35, centred=True)
FINISH = finishing_quintic(0.009)  # SETTLE maps [0.35, 1] to 1 +- 0.009, FINISH maps that to 1 +- 5e-7
SQUARE_POLYNOMIAL = quintic_schedule(1e-4, 1e-2)
FURTHER_POLYNOMIAL = quintic_schedule(5e-2, 1e-2)
TALL_POLYNOMIAL = quintic_schedule(0.04, 1e-2)
TRIANGLE_RATIONAL = (rational_step(0.04), rational_step(0.73, centred=True))  # above 0.04; a cubic follows


def solve_exact(matrices: Tensor, tolerance: float, rational: bool) -> Polar:
    """Compute the polar factors of tall, finite, non-zero `matrices` (b, m, n) with residual at most `tolerance`.

    The largest entry of each matrix must lie between 2^-20 and 2^20. A tolerance that the type cannot reach sends the
    matrices to the SVD. `rational` selects rational instead of polynomial steps for float32: True on a CPU.
    """
    if matrices.dtype == torch.float64:
        return polar_by_svd(matrices)
    if matrices.shape[1] < TALL * matrices.shape[2]:
        return _square(matrices, tolerance, rational)
    result = _tall_pass(matrices, rational)
    if result is None:
        return _by_triangle(matrices, tolerance, rational)
    unsure = ~(result.residual <= tolerance)
    _repair(result, unsure, lambda index: _by_triangle(matrices[index], tolerance, rational))
    return result


def _repair(result: Polar, wanted: Tensor, solver: Callable[[Tensor], Polar]) -> None:
    """Replace the matrices that the mask `wanted` (b,) selects by the result of `solver` for their indices."""
    index = wanted.nonzero().flatten()
    if len(index):
        better = solver(index)
        better.iterations.add_(result.iterations[index])
        for whole, part in zip(result, better, strict=True):
            whole[index] = part


def _solved(factor: Tensor, iterations: int, square: Tensor | None = None) -> Polar:
    """Return the result of factors (b, m, n) of full rank after so many steps; `square` is workspace."""
    count = torch.full((len(factor),), iterations, dtype=torch.int64, device=factor.device)
    return Polar(factor, residual(factor, square), count, count < 0)


def _square(matrices: Tensor, tolerance: float, rational: bool) -> Polar:
    """Solve nearly square matrices: iterate, continue where much is unfinished, deflate the rest, finish and check.

    All steps together multiply a singular value by less than 1e6: rounding errors (1e-7) stay below 1 and show lost rank.
    """
    columns = matrices.shape[2]
    work = matrices.clone()
    spare = torch.empty_like(work)
    square = work.new_empty(len(work), columns, columns)
    count = torch.full((len(work),), 1, dtype=torch.int64, device=work.device)  # the finishing step
    twice = torch.zeros_like(count, dtype=torch.bool)
    if rational:
        twice = kernels.rational_steps(work, (LIFT,), spare, square, normalize=True) > columns / 5
        _steps_at(twice, work, (LIFT,), spare, square)
        kernels.rational_steps(work, (SETTLE,), spare, square, normalize=False)
        count += 2 + twice.long()
    else:
        work.copy_(polynomial_steps(work / spectral_bound(work), SQUARE_POLYNOMIAL))
        count += len(SQUARE_POLYNOMIAL)
    # a spectrum that needed the second lift has more unfinished values
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
    if len(crowded):  # a basis of a quarter of the columns holds an eighth of the directions, but costs more
        rest, away, about = (_at(each, crowded) for each in (work, square, matrices))
        smallest[crowded] = _deflate(rest, away, max(room, columns // 4), about, suspect[crowded])
        if rest is not work:
            work[crowded] = rest
        unfinished = residual(work, square)
    if bool((unfinished > UNFINISHED * columns).any()):
        smallest = torch.minimum(smallest, _deflate(work, square, room, matrices, suspect))
    lost = smallest < SINGLE_MARGIN
    factor = (
        kernels.quintic_step(work, FINISH, spare, square) if rational else polynomial_steps(work, (FINISH,))
    )
    result = Polar(factor, residual(factor, square), count, torch.zeros_like(lost))
    del work, spare, square, factor  # free their memory for the repairs

    def one_more_step(index: Tensor) -> Polar:
        return _solved(polynomial_steps(result.factor[index], (CUBIC,)), 1)

    for _ in range(4):
        _repair(result, (result.residual > tolerance) & (result.residual < 1) & ~lost, one_more_step)
    _repair(result, lost | ~(result.residual <= tolerance), lambda index: polar_by_svd(matrices[index]))
    return result


def _at(batch: Tensor, index: Tensor) -> Tensor:
    """Return `batch[index]`, without a copy where the index names every matrix."""
    return batch if len(index) == len(batch) else batch[index]


def _steps_at(wanted: Tensor, work: Tensor, steps: tuple[Step, ...], spare: Tensor, square: Tensor) -> None:
    """Take rational steps, in place, on the matrices of `work` that the mask (b,) selects."""
    index = wanted.nonzero().flatten()
    if len(index):
        rest = _at(work, index)
        kernels.rational_steps(rest, steps, spare[: len(index)], square[: len(index)], normalize=False)
        if rest is not work:
            work[index] = rest


def _deflate(work: Tensor, away: Tensor, room: int, matrices: Tensor, suspect: Tensor) -> Tensor:
    """Set the few singular values of `work` (b, m, n) that are far from 1 to 1, in place.

    `away` holds X^T X - I below the diagonal. It is small except in the unfinished directions. A few products with it
    and the eigenvectors of a `room` x `room` matrix therefore give an orthonormal basis V of these directions. With
    the QR factors Q R of X V, and P the polar factor of R, the part X V V^T becomes Q P V^T. Directions that V does not
    represent accurately are left to the polynomial steps that follow.

    Returns (b,): sigma_min / sigma_max of `matrices`, from which `work` was computed, where the smallest singular value
    of `work` is below `suspect` (b,), and infinity elsewhere. The ratio is computed from Q^T W V in float64, because
    the float32 steps lose it, and is accurate to 5 %. It is 0 where Q itself consists of rounding errors.
    """
    kernels.mirror(away)
    basis = _probes(away.shape[2], room).to(away).expand(len(away), -1, -1)
    for _ in range(3):
        basis = torch.linalg.qr(torch.bmm(away, torch.bmm(away, basis))).Q
    image = torch.bmm(away, basis)
    distance, rotation = torch.linalg.eigh(torch.bmm(basis.mT, image))
    basis, image = torch.bmm(basis, rotation), torch.bmm(image, rotation)
    error = torch.linalg.vector_norm(image - basis * distance.unsqueeze(1), dim=1)
    # finished directions are above -0.018; eigenvalues ascend, so chosen ones come first and R is block diagonal
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
    """Return fixed Gaussian directions (columns, count)."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(columns, count, generator=draw, dtype=torch.float32, device="cpu")


def _largest(matrices: Tensor) -> Tensor:
    """Return the largest singular values (b,) by block power iteration; they are up to 5 % too small."""
    block = _probes(matrices.shape[2], min(8, matrices.shape[2])).to(matrices)
    for _ in range(6):
        block = torch.matmul(matrices.mT, torch.matmul(matrices, torch.linalg.qr(block).Q))
    return torch.linalg.matrix_norm(block, 2).sqrt()


def _smallest_of_triangles(triangles: Tensor) -> Tensor:
    """Estimate the smallest singular values (b,) of upper triangles by inverse iteration; NaN or 0 where singular."""
    block = _probes(triangles.shape[2], min(8, triangles.shape[2])).to(triangles)
    block = block.expand(len(triangles), -1, -1)
    for _ in range(3):
        block = torch.linalg.solve_triangular(triangles.mT, torch.linalg.qr(block).Q, upper=False)
        block = torch.linalg.solve_triangular(triangles, block, upper=True)
    return torch.linalg.vector_norm(block, dim=1).amax(dim=1).rsqrt()


def _tall_pass(matrices: Tensor, rational: bool) -> Polar | None:
    """Solve well-conditioned tall matrices by an iteration on n x n, or return None if none is well-conditioned.

    With L L^T = X^T X, X = (X L^-T) L^T and polar(X) = X L^-T polar(L)^T. The short schedule converges only where
    sigma_min is at least 1/25 of the bound, and there X^T X loses hardly any accuracy; else the result is wrong or NaN.
    """
    gram = matrices.new_empty(len(matrices), matrices.shape[2], matrices.shape[2])
    inverses = kernels.cholesky_in_blocks(kernels.lower_gram(matrices, gram))
    # sigma_min is at most the smallest of these, sigma_max at least the largest
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    if not bool((diagonal.amin(dim=1) > 0.02 * diagonal.amax(dim=1)).any()):
        return None
    triangle = gram.tril()
    if rational:
        spare, square = torch.empty_like(gram), torch.empty_like(gram)
        kernels.rational_steps(triangle, TRIANGLE_RATIONAL, spare, square, normalize=True)
        steps: tuple[Step, ...] = (CUBIC,)
    else:
        triangle /= spectral_bound(triangle)
        steps = (*TALL_POLYNOMIAL, CUBIC)
    triangle = polynomial_steps(triangle, steps)
    factor = torch.bmm(matrices, kernels.solve_right(triangle, gram, inverses).mT)
    return _solved(factor, len(steps) + (len(TRIANGLE_RATIONAL) if rational else 0), gram)


def _by_triangle(matrices: Tensor, tolerance: float, rational: bool) -> Polar:
    """Solve ill-conditioned tall matrices: Householder QR, then the triangle as any square matrix.

    Where rank may be lost, the QR is computed in float64: rounding in float32 would make the rank look full.
    """
    basis, triangle = torch.linalg.qr(matrices)
    sure = _smallest_of_triangles(triangle) > 1e-5 * torch.linalg.matrix_norm(triangle)
    for i in (~sure).nonzero().flatten():
        basis[i], triangle[i] = torch.linalg.qr(matrices[i].double())
    inner = _square(triangle, tolerance, rational)
    factor = torch.bmm(basis, inner.factor)
    result = Polar(factor, residual(factor), inner.iterations, torch.zeros_like(inner.completed))
    # completion needs the whole matrix: the factor nearest to the identity does not follow from the triangle
    unsure = inner.completed | ~(result.residual <= tolerance)
    _repair(result, unsure, lambda index: polar_by_svd(matrices[index]))
    return result


def polar_by_svd(matrices: Tensor) -> Polar:
    """Solve tall, finite, non-zero matrices by SVD in float64, which completes lost rank.

    Singular values up to the machine epsilon of the type of `matrices`, times the largest, count as lost.
    """
    factors, completed = [], []
    for matrix in matrices:
        left, singular, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        rank = int((singular > torch.finfo(matrix.dtype).eps * singular[0]).sum())
        completed.append(rank < len(right))
        factor = complete(left[:, :rank], right[:rank].mT) if completed[-1] else left @ right
        factors.append(factor.to(matrices.dtype))
    lost = torch.tensor(completed, device=matrices.device)
    return _solved(torch.stack(factors), 0)._replace(completed=lost)


def spectral_bound(matrices: Tensor) -> Tensor:
    """Return an upper bound (b, 1, 1) on the spectral norms of `matrices` (b, m, n): 1.002 ||X^T X||_F^(1/2)."""
    gram = matrices.new_empty(len(matrices), matrices.shape[2], matrices.shape[2])
    return 1.002 * kernels.frobenius_of_lower(kernels.lower_gram(matrices, gram)).sqrt()
