"""The two iterations behind `exact`, and the last singular values that are set in one stroke."""

from __future__ import annotations

import math

import pytest
import torch

from fire_core.solvers import exact as polar_exact
from fire_core.solvers.exact import FURTHER_POLYNOMIAL, LIFT, SETTLE, SQUARE_POLYNOMIAL, solve_exact
from fire_core.solvers.polar import polar
from tests.polar_cases import deviation, gaussian, relative_error, spread, with_spectrum

PATHS = pytest.mark.parametrize("rational", [True, False], ids=["cpu", "gpu"])


@PATHS
@pytest.mark.parametrize("shape", [(16, 16), (64, 64), (200, 180), (192, 192), (300, 100), (90, 3)])
@pytest.mark.parametrize("decades", [0.0, 1.0, 3.0, 4.5, 6.0])
def test_exact_on_both_iterations(rational: bool, shape: tuple[int, int], decades: float) -> None:
    matrices = torch.stack([with_spectrum(*shape, spread(shape[1], decades), seed) for seed in (1, 2)])
    solved = solve_exact(matrices, 1e-8, rational)
    assert deviation(solved.factor).max() <= 1e-8
    assert relative_error(solved.factor, matrices).max() <= 1e-5 + 2e-7 * 10**decades
    assert not solved.completed.any()
    assert (solved.iterations > 0).all()


@PATHS
def test_values_far_from_one_are_set_and_the_vectors_stay(rational: bool) -> None:
    """A few far ones among many near 1; a crowd that does not fit into a room of 16; rows that sum to nothing."""
    few = torch.cat([torch.linspace(0.99, 1.01, 60), torch.tensor([0.7, 0.3, 0.05, 0.002])])
    crowd = torch.cat([torch.ones(24), torch.linspace(0.95, 0.7, 40)])
    sums_to_nothing = gaussian(64, 64, seed=5)
    sums_to_nothing[-2] = -sums_to_nothing[:-2].sum(0) - sums_to_nothing[-1]
    for matrix in (with_spectrum(64, 64, few), with_spectrum(64, 64, crowd)):
        factor = solve_exact(matrix.unsqueeze(0), 1e-8, rational).factor[0]
        assert relative_error(factor, matrix) <= 2e-5 and deviation(factor) <= 1e-8
    assert deviation(solve_exact(sums_to_nothing.unsqueeze(0), 1e-8, rational).factor).max() <= 1e-8


@PATHS
@pytest.mark.parametrize("rank", [1, 20, 63])
def test_lost_rank_is_seen_on_both_iterations(rational: bool, rank: int) -> None:
    lost = gaussian(64, rank, seed=1) @ gaussian(rank, 64, seed=2)
    whole = gaussian(64, 64, seed=3)
    solved = solve_exact(torch.stack([whole, lost]), 1e-8, rational)
    assert solved.completed.tolist() == [False, True]
    assert deviation(solved.factor).max() <= 1e-8


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


def test_matrices_of_full_rank_need_no_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polar_exact, "polar_by_svd", None)
    for seed, smallest in enumerate((1e-4, 1e-5, 1e-6)):
        values = 0.1 + 0.9 * torch.rand(100, generator=torch.Generator().manual_seed(seed))
        values[-1] = smallest
        order = torch.randperm(100, generator=torch.Generator().manual_seed(seed))
        result = polar(torch.diag(values)[order])
        torch.testing.assert_close(result.factor, torch.eye(100)[order], rtol=0, atol=1e-5 + 2e-7 / smallest)
    # falling off evenly to 1e-6, beyond the few values that are set in one stroke
    assert polar(with_spectrum(192, 192, spread(192, 6.0))).residual <= 1e-8
