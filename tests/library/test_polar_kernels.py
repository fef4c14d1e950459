"""Schedules, kernels, the path that GPUs take, precision settings, compilation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fire_core.solvers import exact as polar_exact
from fire_core.solvers import kernels
from fire_core.solvers.exact import solve_exact
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
from tests.polar_cases import gaussian, spread, with_spectrum


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


def test_precision_is_put_back_after_an_error() -> None:
    before = kernels._settings()
    with pytest.raises(ZeroDivisionError), full_precision(torch.device("cpu")):
        assert kernels._settings()[0] in ("ieee", "highest")  # as torch says it from 2.9 on, and below
        _ = 1 / 0
    assert kernels._settings() == before


@pytest.mark.parametrize("steps", [(CUBIC,) * 10, quintic_schedule(1e-3, 1e-2)])
def test_the_fixed_step_kernel_compiles_without_a_graph_break(steps: tuple) -> None:
    matrices = gaussian(3, 24, 16) / 10
    compiled = torch.compile(lambda x: polynomial_steps(x, steps), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(matrices), polynomial_steps(matrices, steps))
