"""The nearest (semi-)orthogonal matrix of every matrix of a batch: the projection behind FIRE.

For W (m, n) with the singular value decomposition U S V^T, the nearest matrix with orthonormal columns
(m >= n) or rows (m < n) in the Frobenius norm is U V^T (orthogonal Procrustes; FIRE, Eq. 4 and 5).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fire_core.errors import UserError, check_settings
from fire_core.solvers.kernels import ROWS_OF_A_SUM, SMALL, frobenius_of_lower, lower_gram
from fire_core.solvers.schedules import CUBIC, MUON_QUINTIC, Step

Solver = Literal["newton_schulz", "exact", "quintic"]
Normalize = Literal["frobenius", "spectral"]

ITERATIONS = 10
"""The published number of steps."""
STACK_BYTES = {"cpu": 8 * 2**20, "cuda": 128 * 2**20}
"""Memory of a stack of matrices that are solved at once (one matrix, if larger), by device."""


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
    iterations: int = ITERATIONS,
    normalize: str = "frobenius",
    tolerance: float = 1e-8,
) -> Polar:
    """Return the nearest (semi-)orthogonal matrix of each matrix of `matrices` (..., m, n), or an approximation to it.

    Wide matrices get orthonormal rows, tall ones orthonormal columns. Smaller types become float32; float64 stays.
    The input is not changed, and no gradient flows. Products are full float32, whatever `torch.set_float32_matmul_precision`
    says and under autocast. Matrices with very large or small entries (1e30, 1e-30) are first divided by a power of two.

    "newton_schulz" is the published algorithm (FIRE, section 3): X = W / `||W||`, then `iterations` steps
    X <- 1.5 X - 0.5 X X^T X, up to rounding. On a CPU a matrix gives the same bits alone or in a batch. It guarantees
    *nothing* about the residual: 10 steps leave small singular values of a square matrix well below 1, and lost rank lost.

    "quintic" is the algorithm of Muon (Jordan et al. 2024), 5 steps from W / `||W||` of X <- 3.4445 X - 4.7750 X X^T X
    + 2.0315 (X X^T)^2 X, in float32 at least. It is *inexact by design*: after 5 steps, singular values that were above
    about 1.5e-3 of the norm lie between 0.68 and 1.21. More steps bring the smaller ones there, and none closer to 1.

    "exact" is the orthogonal polar factor U V^T. It guarantees residual <= `tolerance` for every finite, non-zero input
    whose smaller side is 25 to 768, whatever its condition; for other sizes the bound is in proportion to the side. The
    relative error of the factor is at most 1e-5 plus 2e-7 times the condition number in float32. Singular values below the
    machine epsilon times the largest count as lost rank, which `completed` reports. Of all factors that are then equally
    near to W, the result is the one nearest to the rectangular identity (see `fire_core.solvers.completion`).

    Memory beside the result: about 4 times the larger of STACK_BYTES and the largest matrix; for a float64 SVD, up to 20.

    Args:
        matrices: (..., m, n). solver: "newton_schulz", "quintic" or "exact".
        iterations: number of steps of newton_schulz and quintic.
        normalize: the norm by which newton_schulz and quintic divide at the start. "frobenius" is published;
            "spectral", the largest singular value, saves 5 or 6 steps at 512 columns.
        tolerance: largest residual of exact. A larger one saves repairs of single matrices, but no passes over all of them.
            One that the type cannot reach (1e-14 in float32) sends every matrix to the SVD; `residual` has what was reached.
    Returns: Polar(factor, residual, iterations, completed).
    Raises: UserError for zero or non-finite matrices (with the index in the batch) and for wrong settings.
    """
    check_solver(solver, iterations, normalize, tolerance)
    check_matrices(matrices)
    batch = matrices.shape[:-2]
    working = matrices.detach().to(torch.float64 if matrices.dtype == torch.float64 else torch.float32)
    working = working.reshape(-1, *matrices.shape[-2:])
    largest = working.abs().amax(dim=(-2, -1))  # NaN and infinity survive
    bad = ~(largest.isfinite() & (largest > 0))
    if bad.any():
        index = int(bad.nonzero()[0])
        what = "zero" if largest[index] == 0 else "not finite"
        position = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), batch))
        where = f" {position} of the batch" if batch else ""
        raise UserError(f"matrix{where} is {what}, so it has no nearest orthogonal matrix: leave it out")
    factor, *figures = solve(working, solver, iterations, normalize, tolerance)
    return Polar(factor.reshape(matrices.shape), *(figure.reshape(batch) for figure in figures))


@torch.no_grad()
def solve(
    matrices: Tensor, solver: str, iterations: int, normalize: str, tolerance: float, measure: bool = True
) -> Polar:
    """Return `polar` of matrices (b, m, n), b >= 1, whose values and settings have been checked.

    measure: False saves the residuals of newton_schulz and quintic, which are NaN then.
    """
    _, rows, columns = matrices.shape
    exact, cpu = solver == "exact", matrices.device.type == "cpu"
    if exact:  # its module computes schedules, and builds on the functions below
        from fire_core.solvers.exact import solve_exact
    # the default allows at most 4e-10 per column, which is a relative error of 1e-5
    allowed = tolerance * max(1.0, min(rows, columns) / 768) * min(1.0, min(rows, columns) / 25)
    limit = STACK_BYTES.get(matrices.device.type, STACK_BYTES["cuda"])
    # polynomial steps are fastest where a stack fits into the processor's cache; the repairs of exact need a little more
    # than the four copies of its first pass
    limit = limit // 16 if cpu and not exact else 3 * limit // 4
    count = max(1, limit // (rows * columns * matrices.element_size()))
    tall = matrices if rows >= columns else matrices.mT
    factor = torch.empty(tall.shape, dtype=tall.dtype, device=tall.device)
    steps = torch.full((len(tall),), iterations, device=tall.device)
    result = Polar(factor, tall.new_full((len(tall),), torch.nan), steps, steps < 0)
    with full_precision(matrices.device):
        for start in range(0, len(tall), count):
            place = slice(start, start + count)
            # very large and small entries are divided by powers of two, which is exact; the others by 1, because a test of
            # the values would make the device wait
            largest = tall[place].abs().amax(dim=(-2, -1), keepdim=True)
            moderate = (largest >= 2.0**-20) & (largest <= 2.0**20)
            stack = tall[place] / torch.where(moderate, 1.0, largest / (2 * torch.frexp(largest).mantissa))
            if exact and count >= len(tall):
                result = solve_exact(stack, allowed, rational=cpu)
            elif exact:
                for whole, part in zip(result, solve_exact(stack, allowed, rational=cpu), strict=True):
                    whole[place] = part
            else:
                norm = torch.linalg.matrix_norm(stack, 2 if normalize == "spectral" else "fro", keepdim=True)
                step = CUBIC if solver == "newton_schulz" else MUON_QUINTIC
                result.factor[place] = polynomial_steps(stack / norm, (step,) * iterations)
                if measure:
                    result.residual[place] = residual(result.factor[place])
    return result if rows >= columns else result._replace(factor=result.factor.mT)


def polynomial_steps(matrices: Tensor, steps: Iterable[Step]) -> Tensor:
    """Apply x -> a x + b x^3 + c x^5 to the singular values of tall `matrices` (b, m, n), for each (a, b, c) in turn.

    Singular values must be at most 1 (below sqrt(3) for the cubic). The input is not changed. Extra memory: two tensors of
    the size of the input and two (b, n, n). It compiles with torch.compile(fullgraph=True).
    """
    for a, b, c in steps:
        gram = torch.bmm(matrices.mT, matrices)
        if c == 0.0:
            matrices = torch.baddbmm(matrices, matrices, gram, beta=a, alpha=b)
        else:
            update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            matrices = torch.baddbmm(matrices, matrices, update, beta=a)
    return matrices


def residual(factors: Tensor, square: Tensor | None = None) -> Tensor:
    """Return ||Q^T Q - I||_F^2 (b,) of `factors` (b, m, n); `square` (b, n, n) is optional workspace."""
    _, rows, columns = factors.shape
    if square is None:
        # a small product is faster as a whole than its triangle in blocks
        if columns <= SMALL and rows <= ROWS_OF_A_SUM:
            gram = torch.bmm(factors.mT, factors)
            gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
            return gram.square().sum(dim=(-2, -1))
        square = factors.new_empty(len(factors), columns, columns)
    lower_gram(factors, square).diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return frobenius_of_lower(square).square_().flatten()


def deviations(matrices: Tensor, scale: Tensor | None = None) -> list[Tensor]:
    """Return `||W^T W - I||_F^2` (...) of matrices (..., m, n) on their smaller side, and also of matrices / scale if given.

    One product, in full precision, serves both.
    """
    with full_precision(matrices.device):
        wide = matrices.shape[-2] < matrices.shape[-1]
        gram = matrices @ matrices.mT if wide else matrices.mT @ matrices
    grams = [gram] if scale is None else [gram, gram / scale.square()]
    for each in grams:
        each.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return [each.square().sum(dim=(-2, -1)) for each in grams]


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute float32 products in IEEE float32, with TF32 and autocast off.

    The caller's settings are restored at the end, also after an error. They are global to the process, so another
    thread sees the changed settings while the block runs.
    """
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set the newer switches alone
        older = "highest"
    newer = [backend.fp32_precision for backend in _backends]
    torch.set_float32_matmul_precision("highest")  # sets the switches of both generations, which must agree
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(older)
        for backend, precision in zip(_backends, newer, strict=True):
            backend.fp32_precision = precision


# From torch 2.9 on, CUDA and the CPU have switches of their own. The older switch sets these, too.
_backends: list[Any] = [
    backend.matmul
    for backend in (torch.backends.cuda, torch.backends.mkldnn)
    if hasattr(getattr(backend, "matmul", None), "fp32_precision")
]


def check_solver(solver: str, iterations: int, normalize: str, tolerance: float) -> None:
    """Raise UserError for a setting that `polar` does not accept."""
    words = SimpleNamespace(solver=solver, normalize=normalize)
    check_settings(words, solver=" ".join(get_args(Solver)), normalize=" ".join(get_args(Normalize)))
    if not isinstance(iterations, Integral) or isinstance(iterations, bool) or iterations < 1:
        raise UserError(f"iterations={iterations!r} must be a whole number, at least 1")
    unused = {"tolerance": (tolerance, 1e-8)}
    if solver == "exact":
        unused = {"iterations": (iterations, ITERATIONS), "normalize": (normalize, "frobenius")}
    for name, (value, default) in unused.items():
        if value != default:
            raise UserError(f"{name}={value!r} has no effect with {solver=}: leave it out")
    if not isinstance(tolerance, Real) or not tolerance > 0:
        raise UserError(f"tolerance={tolerance!r} must be a positive number")


def check_matrices(matrices: object, name: str = "matrices") -> None:
    """Raise UserError for anything but a dense, local tensor of real numbers with at least two dimensions and entries."""
    if not isinstance(matrices, Tensor):
        raise UserError(f"{name} is a {type(matrices).__name__}: give a torch tensor (..., m, n)")
    if matrices.layout is not torch.strided or matrices.is_nested:
        raise UserError(f"{name} is not dense (sparse or nested): use to_dense(), or stack its parts")
    if matrices.is_meta:
        raise UserError(f"{name} is on the meta device and has no values: load them first")
    if type(matrices).__name__ == "DTensor":
        raise UserError(f"{name} is a DTensor: call fire(model), or give its full_tensor()")
    if not matrices.dtype.is_floating_point or matrices.dtype.itemsize < 2:
        raise UserError(f"{name} of type {matrices.dtype} cannot be projected: convert it to float32")
    if matrices.ndim < 2 or 0 in matrices.shape:
        raise UserError(f"{name} of shape {tuple(matrices.shape)} holds no matrix: give (..., m, n)")
