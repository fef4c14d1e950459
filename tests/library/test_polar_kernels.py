"""Schedules, kernels, both iterations behind `exact`, the path that GPUs take, precision settings, compilation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fire_core.solvers import exact as polar_exact
from fire_core.solvers import kernels
from fire_core.solvers.exact import FURTHER_POLYNOMIAL, LIFT, SETTLE, SQUARE_POLYNOMIAL, solve_exact
from fire_core.solvers.kernels import (
    cholesky_in_blocks,
    full_precision,
    lower_gram,
    polynomial_steps,
    quintic_step,
    rational_steps,
    solve_right,
)
from fire_core.solvers.polar import polar
from fire_core.solvers.schedules import (
    CUBIC,
    polynomial_value,
    quintic_schedule,
    rational_step,
    rational_value,
)
from tests.polar_cases import deviation, gaussian, relative_error, spread, with_spectrum


@pytest.mark.parametrize(
    "lower, tolerance, most_steps",
    [(0.3, 1e-2, 2), (0.04, 1e-2, 4), (3e-3, 1e-2, 6), (1e-3, 1e-2, 7), (1e-4, 1e-2, 8), (1e-7, 1e-2, 13)],
)
def test_quintic_schedules_bring_the_interval_to_one(lower: float, tolerance: float, most_steps: int) -> None:
    steps = quintic_schedule(lower, tolerance)
    values = np.geomspace(lower, 1, 20001)
    for step in steps:
        values = polynomial_value(values, step)
        assert values.max() < 2.1  # the next step is bounded there
    assert abs(values - 1).max() <= tolerance
    assert len(steps) <= most_steps


def test_quintics_are_minimax() -> None:
    """The first error touches its extreme four times with alternating sign (Chebyshev's criterion)."""
    step = quintic_schedule(0.1, 0.5)[0]
    values = polynomial_value(np.linspace(0.1, 1, 100001), step) - 1
    extreme = abs(values).max()
    signs = np.sign(values[abs(values) > extreme * (1 - 1e-6)])
    assert np.count_nonzero(np.diff(signs)) == 3


def test_the_schedules_of_the_solver_cover_what_their_comments_say() -> None:
    for steps, lower in (((polar_exact.LIFT, polar_exact.SETTLE), 3e-3), (polar_exact.DOUBLE_RATIONAL, 2e-9)):
        values = np.geomspace(lower, 1, 200001)
        for step in steps:
            values = rational_value(values, step)
        assert abs(polynomial_value(values, polar_exact.FINISH) - 1).max() <= 1e-6
    values = np.geomspace(0.04, 1, 200001)
    for step in polar_exact.TRIANGLE_RATIONAL:
        values = rational_value(values, step)
    assert abs(polynomial_value(values, CUBIC) - 1).max() <= 1e-6


@pytest.mark.parametrize("shape", [(40, 40), (90, 70)])
def test_steps_act_on_singular_values_as_their_functions(shape: tuple[int, int]) -> None:
    matrix = with_spectrum(*shape, spread(shape[1], 1.5)).double()[None]
    left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    spare, square = torch.empty_like(matrix), matrix.new_empty(1, shape[1], shape[1])
    rational = rational_step(0.03)
    work = matrix.clone()
    rational_steps(work, (rational,), spare, square, normalize=False)
    torch.testing.assert_close(work, left @ torch.diag_embed(rational_value(singular, rational)) @ right)
    quintic = quintic_schedule(0.1, 1e-2)[0]
    expected = left @ torch.diag_embed(polynomial_value(singular, quintic)) @ right
    torch.testing.assert_close(quintic_step(matrix.clone(), quintic, spare, square), expected)
    torch.testing.assert_close(polynomial_steps(matrix, (quintic,)), expected)


def test_a_matrix_that_is_not_positive_definite_gives_nan_not_an_exception() -> None:
    work = torch.diag(torch.tensor([1.0, -1.0]))[None].clone()
    assert cholesky_in_blocks(work)[0].isnan().any()


@pytest.mark.parametrize("shape", [(64, 64), (200, 130), (300, 80), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_matrices_as_on_a_gpu_give_what_blocks_give(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel, and the solver with the branches of a GPU, against the blocks of a CPU."""
    matrices = gaussian(3, *shape).to(dtype)

    def run() -> list[torch.Tensor]:
        gram = matrices.new_empty(3, shape[1], shape[1])
        lower_gram(matrices, gram).diagonal(dim1=-2, dim2=-1).add_(1.0)
        norm = kernels.frobenius_of_lower(gram)
        inverses = cholesky_in_blocks(gram)
        step = (rational_step(0.03),)
        stepped, spare = matrices / 30, torch.empty_like(matrices)
        rational_steps(stepped, step, spare, gram.clone(), normalize=True)
        right = solve_right(matrices.clone(), gram, inverses)
        return [norm, gram.tril(), right, stepped, solve_exact(matrices, 1e-8, rational=False).factor]

    blocks = run()
    monkeypatch.setattr(kernels, "works_in_blocks", lambda device: False)
    for whole, expected in zip(run(), blocks, strict=True):
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=2e-5)
    broken = torch.diag(torch.tensor([1.0, -1.0]))[None].clone()
    assert cholesky_in_blocks(broken) == [] and broken.isnan().any()


@pytest.mark.parametrize("solver", ["newton_schulz", "exact"])
def test_global_precision_settings_change_no_bit_and_are_put_back(solver: str) -> None:
    matrices = gaussian(2, 64, 64)
    expected = polar(matrices, solver).factor
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            factor = polar(matrices, solver).factor
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
    assert factor.dtype == torch.float32
    assert torch.equal(factor, expected)


@pytest.mark.parametrize("ambient", ["highest", "high"])
def test_precision_is_full_inside_and_put_back_after_an_error(ambient: str) -> None:
    torch.set_float32_matmul_precision(ambient)
    try:
        before = kernels._settings()
        with pytest.raises(ZeroDivisionError), full_precision(torch.device("cpu")):
            assert not torch.backends.cuda.matmul.allow_tf32  # reading it raises where the switches disagree
            assert torch.get_float32_matmul_precision() == "highest"
            _ = 1 / 0
        assert kernels._settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("steps", [(CUBIC,) * 10, quintic_schedule(1e-3, 1e-2)])
def test_the_fixed_step_kernel_compiles_without_a_graph_break(steps: tuple) -> None:
    matrices = gaussian(3, 24, 16) / 10
    compiled = torch.compile(lambda x: polynomial_steps(x, steps), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(matrices), polynomial_steps(matrices, steps))


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
