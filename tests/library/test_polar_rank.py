"""Lost rank: completed by a rule that depends on the matrix alone, and named in the result."""

from __future__ import annotations

import pytest
import torch

from fire_core.solvers.completion import complete
from fire_core.solvers.polar import polar
from tests.polar_cases import deviation, gaussian, oracle


def of_rank(rows: int, columns: int, rank: int, seed: int = 0) -> torch.Tensor:
    return gaussian(rows, rank, seed=seed) @ gaussian(rank, columns, seed=seed + 1)


@pytest.mark.parametrize(
    "rows, columns, rank",
    [(30, 30, 1), (64, 64, 6), (64, 64, 63), (192, 192, 20), (200, 40, 7), (12, 90, 3), (3, 2, 1)],
)
def test_lost_rank_is_completed_and_named(rows: int, columns: int, rank: int) -> None:
    matrix = of_rank(rows, columns, rank)
    result = polar(matrix)
    assert result.completed
    assert deviation(result.factor) <= 1e-8
    # nearest: <Q, W> is the sum of the singular values, which no orthogonal matrix exceeds
    total = torch.linalg.svdvals(matrix.double()).sum()
    assert (result.factor.double() * matrix).sum() >= total * (1 - 1e-6)


def test_a_diagonal_matrix_with_zeros_becomes_the_identity() -> None:
    result = polar(torch.diag(torch.tensor([3.0, -2.0, 0.0, 0.0])))
    torch.testing.assert_close(result.factor, torch.diag(torch.tensor([1.0, -1.0, 1.0, 1.0])))


def test_the_completion_is_the_nearest_to_the_identity() -> None:
    """No other completion of the same matrix lies nearer to the identity: 200 random ones are farther."""
    matrix = of_rank(20, 12, 5)
    factor = polar(matrix).factor.double()
    left, singular, right = torch.linalg.svd(matrix.double(), full_matrices=True)
    rank = int((singular > 1e-5 * singular[0]).sum())
    identity = torch.eye(20, 12, dtype=torch.float64)
    distance = (factor - identity).norm()
    for seed in range(200):
        between = oracle(gaussian(20 - rank, 12 - rank, seed=seed))
        other = left[:, :rank] @ right[:rank] + left[:, rank:] @ between @ right[rank:]
        assert deviation(other) < 1e-20
        assert distance <= (other - identity).norm() + 1e-6


def test_the_completion_does_not_depend_on_the_basis_of_the_null_space() -> None:
    left, _, right = torch.linalg.svd(gaussian(15, 9).double(), full_matrices=False)
    rotation = oracle(gaussian(4, 4, seed=3))
    plain = complete(left[:, :4], right[:4].mT)
    rotated = complete(left[:, :4] @ rotation, right[:4].mT @ rotation)
    torch.testing.assert_close(plain, rotated, rtol=0, atol=1e-12)


def test_completion_where_the_identity_has_nothing_to_offer() -> None:
    """W = e1 e2^T: between the null spaces e2 -> e1 the identity is zero, so the second reference decides."""
    matrix = torch.zeros(2, 2)
    matrix[0, 1] = 5.0
    factor = polar(matrix).factor
    assert factor[0, 1] == 1.0
    assert factor[1, 0].abs() == 1.0
    assert torch.equal(factor, polar(matrix).factor)


def test_newton_schulz_leaves_lost_rank_lost() -> None:
    factor = polar(of_rank(20, 20, 3), "newton_schulz", iterations=15).factor
    assert int((torch.linalg.svdvals(factor) > 1e-2).sum()) == 3
