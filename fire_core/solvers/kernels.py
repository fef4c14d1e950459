"""Symmetric products, Cholesky factors and triangular solves of batches of tall matrices (b, m, n), on a CPU in blocks.

Each needs at most half the operations of a product, which the library calls for them do not achieve on small matrices.
`rational_steps` and `quintic_step` are iterations that consist of them.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fire_core.solvers.schedules import Step

SMALL = 384
"""Columns up to which blocks are of 32 columns, and above which of 64."""
ROWS_OF_A_SUM = 2**12
"""Rows that one float32 sum of a residual adds up."""


def rational_steps(
    matrices: Tensor, steps: Iterable[Step], spare: Tensor, square: Tensor, *, normalize: bool
) -> Tensor:
    """Apply x -> x (a + b x^2) / (1 + c x^2) to the singular values of `matrices`, in place.

    Returns (b,): the sum of 1 / (1 + c x^2) over the singular values before the last step: about how many are small.

    With `normalize`, `matrices` are first divided by a bound on their spectral norm, the root of ||X^T X||_F, which is
    at most n^(1/4) times too large. `spare` (b, m, n) and `square` (b, n, n) are workspace.
    """
    for step, (a, b, c) in enumerate(steps):
        lower_gram(matrices, square)
        if normalize and step == 0:
            bound = frobenius_of_lower(square).sqrt_()
            matrices.div_(bound)
            square.div_(bound.square())
        square.mul_(c).diagonal(dim1=-2, dim2=-1).add_(1.0)
        inverses = cholesky_in_blocks(square)
        _solve_right_transposed(matrices, square, inverses, spare)
        solve_right(spare, square, inverses)
        inside = torch.linalg.vecdot(matrices.flatten(1), spare.flatten(1))
        matrices.mul_(b / c).add_(spare, alpha=a - b / c)
    return square.shape[2] - c * inside


def quintic_step(matrices: Tensor, step: Step, spare: Tensor, square: Tensor) -> Tensor:
    """Apply x -> x (a + b x^2 + c x^4) to the singular values of `matrices` and return `spare` with the result.

    `spare` (b, m, n) and `square` (b, n, n) are overwritten, `matrices` are not.
    """
    a, b, c = step
    lower_gram(matrices, square)
    mirror(square)
    product = spare[:, : matrices.shape[2]]  # (b, n, n) of workspace, used before `spare` receives the result
    lower_gram(square, product)
    mirror(product)
    square.mul_(b).add_(product, alpha=c)
    return torch.baddbmm(matrices, matrices, square, beta=a, out=spare)


def lower_gram(matrices: Tensor, out: Tensor) -> Tensor:
    """Write the lower triangle of X^T X into `out` (b, n, n), by block rows, and return `out`.

    Entries above the diagonal blocks are not written. Rows are summed in parts of ROWS_OF_A_SUM, because the error of one
    float32 sum over many rows would exceed the residuals that are measured.
    """
    first, *others = matrices.split(ROWS_OF_A_SUM, dim=1)
    for start, stop in _blocks(out):
        strip = out[:, start:stop, :stop]
        torch.bmm(first[:, :, start:stop].mT, first[:, :, :stop], out=strip)
        for rows in others:  # not baddbmm, which would add single products to the large sum
            strip += torch.bmm(rows[:, :, start:stop].mT, rows[:, :, :stop])
    return out


def mirror(lower: Tensor) -> None:
    """Copy the lower triangle of `lower` (b, n, n) to the upper, in place."""
    for start, stop in _blocks(lower):
        lower[:, :start, start:stop] = lower[:, start:stop, :start].mT


def cholesky_in_blocks(lower: Tensor) -> list[Tensor]:
    """Replace the lower triangle of positive definite `lower` (b, n, n) by its Cholesky factor, in place.

    Only the lower triangle is read. Returns the inverses of the factor's diagonal blocks, which the solves need, or an
    empty list where a device does not work in blocks. A matrix that is not positive definite gives NaN.
    """
    if not works_in_blocks(lower.device):
        factor, failed = torch.linalg.cholesky_ex(lower)
        lower.copy_(factor.masked_fill_((failed > 0).view(-1, 1, 1), torch.nan))
        return []
    inverses = []
    for start, stop in _blocks(lower):
        if start:
            panel = lower[:, start:, start:stop]
            panel.baddbmm_(lower[:, start:, :start], lower[:, start:stop, :start].mT, alpha=-1)
        diagonal, failed = torch.linalg.cholesky_ex(lower[:, start:stop, start:stop])
        diagonal.masked_fill_((failed > 0).view(-1, 1, 1), torch.nan)
        identity = torch.eye(stop - start, dtype=lower.dtype, device=lower.device).expand_as(diagonal)
        inverses.append(torch.linalg.solve_triangular(diagonal, identity, upper=False))
        lower[:, start:stop, start:stop] = diagonal
        if stop < lower.shape[-1]:
            lower[:, stop:, start:stop] = torch.bmm(lower[:, stop:, start:stop], inverses[-1].mT)
    return inverses


def _solve_right_transposed(matrices: Tensor, lower: Tensor, inverses: list[Tensor], out: Tensor) -> None:
    """Write X L^-T into `out`; `lower` and `inverses` as `cholesky_in_blocks` leaves them."""
    if not inverses:
        out.copy_(torch.linalg.solve_triangular(lower.mT, matrices, upper=True, left=False))
    for (start, stop), inverse in zip(_blocks(lower), inverses, strict=bool(inverses)):
        right = matrices[:, :, start:stop]
        if start:
            right = torch.baddbmm(right, out[:, :, :start], lower[:, start:stop, :start].mT, alpha=-1)
        torch.bmm(right, inverse.mT, out=out[:, :, start:stop])


def solve_right(matrices: Tensor, lower: Tensor, inverses: list[Tensor]) -> Tensor:
    """Replace X by X L^-1, in place, and return X; `lower` and `inverses` as `cholesky_in_blocks` leaves them."""
    if not inverses:
        return matrices.copy_(torch.linalg.solve_triangular(lower, matrices, upper=False, left=False))
    for (start, stop), inverse in zip(reversed(list(_blocks(lower))), reversed(inverses), strict=True):
        part = matrices[:, :, start:stop]
        if stop < lower.shape[-1]:
            part.baddbmm_(matrices[:, :, stop:], lower[:, stop:, start:stop], alpha=-1)
        part.copy_(torch.bmm(part, inverse))
    return matrices


def frobenius_of_lower(lower: Tensor) -> Tensor:
    """Return the Frobenius norms (b, 1, 1) of symmetric matrices, of which only the lower block rows are filled."""
    total = lower.new_zeros(len(lower))
    for start, stop in _blocks(lower):
        total += 2 * lower[:, start:stop, :start].square().sum(dim=(-2, -1))
        total += lower[:, start:stop, start:stop].square().sum(dim=(-2, -1))
    return total.sqrt_().view(-1, 1, 1)


def works_in_blocks(device: torch.device) -> bool:
    """Return whether blocks are faster than whole matrices. On a GPU every block would be a launch of its own."""
    return device.type == "cpu"


def _blocks(matrices: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of blocks of columns: on a CPU the sizes that are fastest with MKL on one AVX-512 core."""
    size = matrices.shape[-1]
    block = size if not works_in_blocks(matrices.device) else 32 if size <= SMALL else 64
    for start in range(0, size, block):
        yield start, min(start + block, size)
