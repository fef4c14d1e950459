"""The nearest (semi-)orthogonal matrix of every matrix of a batch: the projection behind FIRE.

For W (m, n) with the singular value decomposition U S V^T, the nearest matrix with orthonormal columns
(m >= n) or rows (m < n) in the Frobenius norm is U V^T (orthogonal Procrustes; FIRE, Eq. 4 and 5).
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fire_core.errors import UserError, unknown_word
from fire_core.solvers.exact import Solved, solve_exact
from fire_core.solvers.kernels import full_precision, polynomial_steps, residual
from fire_core.solvers.schedules import CUBIC, MUON_QUINTIC

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
    measure: bool = True,
) -> Polar:
    """Return the nearest (semi-)orthogonal matrix of each matrix of `matrices` (..., m, n), or an approximation to it.

    Wide matrices get orthonormal rows, tall ones orthonormal columns. Smaller types are first converted to float32;
    float64 stays. The input is not changed, and no gradient flows. Products are full float32 whatever
    `torch.set_float32_matmul_precision` says, and under autocast. The scale of the input does not matter: matrices with
    very large or small entries (1e30, 1e-30) are first divided by a power of two.

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

    Memory beside the result: about 4 times the larger of STACK_BYTES and the largest matrix. A matrix that needs the
    float64 SVD takes up to 20 times its own size.

    Args:
        matrices: (..., m, n).
        solver: "newton_schulz", "quintic" or "exact".
        iterations: number of steps of newton_schulz and quintic.
        normalize: the norm by which newton_schulz and quintic divide at the start. "frobenius" is published;
            "spectral", the largest singular value, saves 5 or 6 steps at 512 columns.
        tolerance: largest residual of exact; the error above is for the default. A larger tolerance saves repairs of
            single matrices, but no passes over all of them. One that the type cannot reach (1e-14 in float32) sends
            every matrix to the SVD, and `residual` contains what was reached.
        measure: False saves the residual of newton_schulz and quintic, which is then NaN.
    Returns: Polar(factor, residual, iterations, completed).
    Raises: UserError for zero or non-finite matrices (with the index in the batch) and for wrong settings.
    """
    check_solver(solver, iterations, normalize, tolerance)
    check_matrices(matrices)
    working = matrices.detach().to(torch.float64 if matrices.dtype == torch.float64 else torch.float32)
    working = working.reshape(-1, *matrices.shape[-2:])
    _check_values(working, matrices.shape[:-2])
    result = solve(working, solver, iterations, normalize, tolerance, measure)
    return Polar(
        result.factor.reshape(matrices.shape), *(part.reshape(matrices.shape[:-2]) for part in result[1:])
    )


@torch.no_grad()
def solve(
    matrices: Tensor, solver: str, iterations: int, normalize: str, tolerance: float, measure: bool
) -> Polar:
    """Return `polar` of matrices (b, m, n), float32 or float64, whose values and settings have been checked."""
    _, rows, columns = matrices.shape
    exact = solver == "exact"
    with full_precision(matrices.device):
        tall = matrices if rows >= columns else matrices.mT
        # the default allows at most 4e-10 per column, which is a relative error of 1e-5
        allowed = tolerance * max(1.0, min(rows, columns) / 768) * min(1.0, min(rows, columns) / 25)
        stacks = tall.split(_stack_length(tall, exact))
        result = None if len(tall) == len(stacks[0]) > 0 else _empty(tall)
        for number, stack in enumerate(stacks if len(tall) else ()):
            stack = _moderate(stack)
            if exact:
                solved = solve_exact(stack, allowed, rational=matrices.device.type == "cpu")
            else:
                norm = torch.linalg.matrix_norm(stack, 2 if normalize == "spectral" else "fro", keepdim=True)
                step = CUBIC if solver == "newton_schulz" else MUON_QUINTIC
                factor = polynomial_steps(stack / norm, (step,) * iterations)
                count = torch.full((len(factor),), iterations, dtype=torch.int64, device=factor.device)
                left = residual(factor) if measure else factor.new_full((len(factor),), torch.nan)
                solved = Solved(factor, left, count, torch.zeros_like(count, dtype=torch.bool))
            if result is not None:
                start = number * len(stacks[0])
                result.put(slice(start, start + len(stack)), solved)
                del solved  # frees its memory for the next stack
        result = solved if result is None else result
    factor = result.factor if rows >= columns else result.factor.mT
    return Polar(factor, result.residual, result.iterations, result.completed)


def _stack_length(tall: Tensor, exact: bool) -> int:
    """Return how many of the matrices (b, m, n) are solved at once."""
    limit = STACK_BYTES.get(tall.device.type, STACK_BYTES["cuda"])
    if exact or tall.device.type != "cpu":
        limit = 3 * limit // 4  # repairs need a little more than the four copies of the first pass
    else:
        limit //= 16  # polynomial steps are fastest where the stack fits into the processor's cache
    return max(1, limit // (tall.shape[1] * tall.shape[2] * tall.element_size()))


def _empty(tall: Tensor) -> Solved:
    """Return a result for (b, m, n) that is filled in stack by stack."""
    return Solved(
        torch.empty(tall.shape, dtype=tall.dtype, device=tall.device),
        tall.new_empty(len(tall)),
        torch.zeros(len(tall), dtype=torch.int64, device=tall.device),
        torch.zeros(len(tall), dtype=torch.bool, device=tall.device),
    )


def _moderate(matrices: Tensor) -> Tensor:
    """Return `matrices` (b, m, n), those with very large or small entries divided by powers of two, which is exact.

    All are divided, most of them by 1: a test of the values would make the device wait.
    """
    low, high = matrices.aminmax(dim=-1)
    largest = torch.maximum(high.amax(dim=-1), -low.amin(dim=-1)).view(-1, 1, 1)
    mantissa, _ = torch.frexp(largest)
    moderate = (largest >= 2.0**-20) & (largest <= 2.0**20)
    return matrices / torch.where(moderate, 1.0, largest / (2 * mantissa))


def check_solver(solver: str, iterations: int, normalize: str, tolerance: float) -> None:
    """Raise UserError for a setting that `polar` does not accept."""
    for name, value, allowed in (
        ("solver", solver, Solver),
        ("normalize", normalize, Normalize),
    ):
        if value not in get_args(allowed):
            raise unknown_word(name, value, allowed)
    if not isinstance(iterations, Integral) or isinstance(iterations, bool) or iterations < 1:
        raise UserError(f"iterations={iterations!r} must be a whole number, at least 1")
    for name, value, default in (
        ("iterations", iterations, ITERATIONS),
        ("normalize", normalize, "frobenius"),
    ):
        if solver == "exact" and value != default:
            raise UserError(
                f"{name}={value!r} has no effect with solver='exact': leave it out, or choose newton_schulz"
            )
    if not isinstance(tolerance, Real) or not tolerance > 0:
        raise UserError(f"tolerance={tolerance!r} must be a positive number")


def check_matrices(matrices: object, name: str = "matrices") -> None:
    """Raise UserError for anything but a dense, local tensor of real numbers with at least two dimensions and entries."""
    if not isinstance(matrices, Tensor):
        raise UserError(f"{name} is a {type(matrices).__name__}: give a torch tensor (..., m, n)")
    if matrices.layout is not torch.strided or matrices.is_nested:
        raise UserError(
            f"{name} is not dense (sparse or nested): convert it with to_dense() or stack its parts"
        )
    if matrices.is_meta:
        raise UserError(f"{name} is on the meta device and has no values: load them first")
    if type(matrices).__name__ == "DTensor":
        raise UserError(f"{name} is a DTensor: call fire(model), or give its full_tensor()")
    if not matrices.dtype.is_floating_point or matrices.dtype.itemsize < 2:
        raise UserError(f"{name} of type {matrices.dtype} cannot be projected: convert it to float32")
    if matrices.ndim < 2 or 0 in matrices.shape[-2:]:
        raise UserError(
            f"{name} of shape {tuple(matrices.shape)} holds no matrix: give (..., m, n) with m, n >= 1"
        )


def _check_values(working: Tensor, batch_shape: torch.Size) -> None:
    """Raise UserError for zero or non-finite matrices (b, m, n)."""
    if not len(working):
        return
    entries = working.flatten(1)
    largest = torch.maximum(entries.amax(dim=1), -entries.amin(dim=1))  # NaN and infinity survive
    bad = ~(largest.isfinite() & (largest > 0))
    if not bad.any():
        return
    index = int(bad.nonzero()[0])
    what = "zero" if largest[index] == 0 else "not finite"
    where = ""
    if batch_shape:
        position = torch.unravel_index(torch.tensor(index), batch_shape)
        where = f" {tuple(int(i) for i in position)} of the batch"
    raise UserError(
        f"matrix{where} is {what}, so it has no nearest orthogonal matrix: leave it out or repair it first"
    )
