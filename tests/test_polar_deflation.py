"""The two iterations behind `exact`, and the last singular values that are set in one stroke."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fire_core.solvers import exact as polar_exact
from fire_core.solvers.exact import (
    DROWNED,
    FURTHER_POLYNOMIAL,
    LIFT,
    SETTLE,
    SINGLE_MARGIN,
    SQUARE_POLYNOMIAL,
    _deflate,
    _largest,
    _probes,
    solve_exact,
)
from fire_core.solvers.kernels import lower_gram
from fire_core.solvers.polar import polar
from tests.polar_cases import deviation, gaussian, oracle, relative_error, spread, with_spectrum

PATHS = pytest.mark.parametrize("rational", [True, False], ids=["cpu", "gpu"])


def bulk(columns: int, last: list[float]) -> Tensor:
    """Singular values at random within 0.8 % of 1, but for the `last` ones."""
    near = 1 + 0.008 * (2 * torch.rand(columns - len(last), generator=torch.Generator().manual_seed(3)) - 1)
    return torch.cat([near.double(), torch.tensor(last, dtype=torch.float64)])


def deflate(
    iterate: Tensor, original: Tensor, suspect: float = 0.01, room: int = 16
) -> tuple[Tensor, Tensor]:
    work = iterate.unsqueeze(0).clone()
    away = lower_gram(work, torch.empty(1, work.shape[2], work.shape[2]))
    away.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    smallest = _deflate(work, away, room, original.unsqueeze(0), torch.tensor([suspect]))
    return work[0], smallest[0]


@pytest.mark.parametrize("shape", [(40, 40), (96, 80), (192, 192)])
def test_unfinished_singular_values_become_one_and_the_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = with_spectrum(*shape, bulk(shape[1], [0.7, 0.3, 0.05, 0.002]))
    done, _ = deflate(matrix, matrix)
    assert torch.linalg.svdvals(done.double())[-4:].min() > 0.99
    assert torch.linalg.svdvals(done.double())[:-4].max() < 1.009
    assert relative_error(oracle(done).float(), matrix) <= 2e-5


def test_nothing_changes_where_nothing_is_unfinished() -> None:
    matrix = with_spectrum(64, 64, bulk(64, []))
    done, smallest = deflate(matrix, matrix)
    torch.testing.assert_close(done, matrix, rtol=0, atol=2e-6)
    assert smallest == torch.inf


def test_a_crowd_of_directions_is_not_turned() -> None:
    """Forty values from 0.7 to 0.95 do not fit into a room of 16: none may be set at the cost of its vectors."""
    values = torch.cat([torch.ones(24), torch.linspace(0.95, 0.7, 40)])
    matrix = with_spectrum(64, 64, values)
    done, _ = deflate(matrix, matrix)
    assert relative_error(oracle(done).float(), matrix) <= 2e-5


@pytest.mark.parametrize("smallest", [2e-7, 1e-6, 3e-5])
def test_the_condition_is_told_to_three_digits(smallest: float) -> None:
    """The original has a singular value that float32 steps drown; the iterate has lifted it."""
    original = with_spectrum(
        128, 128, torch.cat([spread(127, 3), torch.tensor([smallest], dtype=torch.float64)])
    )
    left, singular, right = torch.linalg.svd(original.double())
    lifted = torch.where(singular > 5e-4, torch.ones(()), 1e4 * singular)
    _, told = deflate(((left * lifted) @ right).float(), original, suspect=1.0)
    # the largest value comes from power iteration, the rounding of `original` moved the smallest
    assert told == pytest.approx(float(singular[-1] / singular[0]), rel=0.02)


def test_a_drowned_direction_counts_as_lost() -> None:
    matrix = with_spectrum(64, 64, bulk(64, [DROWNED / 3]))
    assert deflate(matrix, matrix)[1] < SINGLE_MARGIN


@PATHS
@pytest.mark.parametrize("shape", [(16, 16), (64, 64), (200, 180), (192, 192), (300, 100), (90, 3)])
@pytest.mark.parametrize("decades", [0.0, 1.0, 3.0, 4.5])
def test_exact_on_both_iterations(rational: bool, shape: tuple[int, int], decades: float) -> None:
    matrices = torch.stack([with_spectrum(*shape, spread(shape[1], decades), seed) for seed in (1, 2)])
    solved = solve_exact(matrices, 1e-8, rational)
    assert deviation(solved.factor).max() <= 1e-8
    assert relative_error(solved.factor, matrices).max() <= 1e-5 + 2e-7 * 10**decades
    assert not solved.completed.any()
    assert (solved.iterations > 0).all()


@PATHS
@pytest.mark.parametrize("rank", [1, 20, 63])
def test_lost_rank_is_seen_on_both_iterations(rational: bool, rank: int) -> None:
    lost = gaussian(64, rank, seed=1) @ gaussian(rank, 64, seed=2)
    whole = gaussian(64, 64, seed=3)
    solved = solve_exact(torch.stack([whole, lost]), 1e-8, rational)
    assert solved.completed.tolist() == [False, True]
    assert deviation(solved.factor).max() <= 1e-8


@PATHS
def test_rank_is_decided_as_float64_decides_it(rational: bool) -> None:
    """Smallest singular values around the machine epsilon, from either side."""
    for factor, whole in ((0.5, False), (0.8, False), (2.0, True), (20.0, True)):
        smallest = factor * torch.finfo(torch.float32).eps
        left, right = oracle(gaussian(64, 64, seed=1)), oracle(gaussian(64, 64, seed=2))
        values = torch.cat([torch.ones(40), torch.full((23,), 1e-2), torch.tensor([smallest])]).double()
        matrix = ((left * values) @ right).float()
        singular = torch.linalg.svdvals(matrix.double())
        kept = bool(singular[-1] > torch.finfo(torch.float32).eps * singular[0])
        assert kept == whole, "rounding moved the example across the line: choose another"
        assert bool(solve_exact(matrix.unsqueeze(0), 1e-8, rational).completed) != kept


def test_both_passes_together_do_not_lift_rounding_to_one() -> None:
    """The slope at zero is the product of the first coefficients: 1e-7 of rounding must stay well below 1."""
    for first, again in (
        ((LIFT, LIFT, SETTLE), (SETTLE,)),
        ((LIFT, SETTLE), (LIFT, SETTLE)),
        (SQUARE_POLYNOMIAL, FURTHER_POLYNOMIAL),
    ):
        assert math.prod(step[0] for step in (*first, *again)) < 1e6


@pytest.mark.parametrize("shape", [(192, 192), (400, 192)])
def test_an_even_spread_over_four_decades_takes_four_steps(shape: tuple[int, int]) -> None:
    """Two lifts, one that settles and one that finishes; what is tall is not tried in the Gram form first."""
    solved = solve_exact(with_spectrum(*shape, spread(192, 4.0)).unsqueeze(0), 1e-8, rational=True)
    assert solved.iterations.item() == 4
    assert deviation(solved.factor) <= 1e-8


@PATHS
@pytest.mark.parametrize("shape", [(64, 64), (96, 64), (300, 100), (1500, 60)])
@pytest.mark.parametrize("times_eps", [0.0, 0.3, 0.75, 1.5, 5.0])
def test_rank_of_plateaus_is_decided_as_float64_decides_it(
    rational: bool, shape: tuple[int, int], times_eps: float
) -> None:
    """One large value, all others at 2e-6 but the last: nearly all of it takes both passes."""
    values = torch.full((shape[1],), 2e-6, dtype=torch.float64)
    values[0], values[-1] = 1.0, times_eps * torch.finfo(torch.float32).eps
    matrix = with_spectrum(*shape, values)
    lost = torch.linalg.svdvals(matrix.double())
    solved = solve_exact(matrix.unsqueeze(0), 1e-8, rational)
    assert bool(solved.completed) == bool(lost[-1] <= torch.finfo(torch.float32).eps * lost[0])


def test_the_largest_value_is_found_where_the_rows_sum_to_nothing() -> None:
    matrix = gaussian(64, 64)
    matrix[-1] = -(matrix[:-1].sum(0) + matrix[0])
    assert float(_largest(matrix.unsqueeze(0))) == pytest.approx(
        float(torch.linalg.matrix_norm(matrix, 2)), rel=0.05
    )


def test_sparse_matrices_of_full_rank_need_no_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polar_exact, "polar_by_svd", None)
    for seed, smallest in enumerate((1e-4, 1e-5, 1e-6)):
        values = 0.1 + 0.9 * torch.rand(100, generator=torch.Generator().manual_seed(seed))
        values[-1] = smallest
        order = torch.randperm(100, generator=torch.Generator().manual_seed(seed))
        result = polar(torch.diag(values)[order])
        torch.testing.assert_close(result.factor, torch.eye(100)[order], rtol=0, atol=1e-5 + 2e-7 / smallest)


def test_spectra_that_fall_off_evenly_need_no_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to a condition of 1e6, beyond what `_deflate` holds in its small room."""
    monkeypatch.setattr(polar_exact, "polar_by_svd", None)
    matrix = with_spectrum(192, 192, spread(192, 6.0))
    assert polar(matrix).residual <= 1e-8


def test_the_default_device_of_the_caller_does_not_matter() -> None:
    matrix = with_spectrum(64, 64, spread(64, 4.0))
    _probes.cache_clear()
    with torch.device("meta"):
        factor = polar(matrix).factor
    torch.testing.assert_close(factor, polar(matrix).factor, rtol=0, atol=0)


def test_a_million_rows_are_measured_right() -> None:
    result = polar(gaussian(10**6, 1))
    assert result.residual <= 1e-10 and not result.completed
