"""What must hold of the polar factor for any matrix: hypothesis draws shape, condition, scale and kind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fire_core.solvers.polar import polar
from tests.polar_cases import deviation, gaussian, oracle, relative_error, with_spectrum

DRAWS = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def matrices(draw: st.DrawFn, decades: float = 3.0, most: int = 60) -> Tensor:
    """Any shape up to most x most, condition number up to 10^decades: one small value, an even spread, one large."""
    rows, columns = draw(st.integers(1, most)), draw(st.integers(1, most))
    steps = torch.linspace(0, 1, min(rows, columns), dtype=torch.float64)
    singular = 10 ** (-draw(st.floats(0, decades)) * steps ** draw(st.sampled_from([100.0, 1.0, 0.01])))
    return with_spectrum(rows, columns, singular, seed=draw(st.integers(0, 10**6)))


@DRAWS
@given(matrices(), st.integers(0, 10**6))
def test_rotations_pass_through(matrix: Tensor, seed: int) -> None:
    """polar(A W B) = A polar(W) B for orthogonal A and B."""
    left = oracle(gaussian(len(matrix), len(matrix), seed=seed)).float()
    right = oracle(gaussian(matrix.shape[1], matrix.shape[1], seed=seed + 1)).float()
    expected = left @ polar(matrix).factor @ right
    torch.testing.assert_close(polar(left @ matrix @ right).factor, expected, rtol=0, atol=2e-3)


@DRAWS
@given(matrices(decades=6.0), st.integers(0, 10**6))
def test_no_random_orthogonal_matrix_is_nearer(matrix: Tensor, seed: int) -> None:
    distance = (polar(matrix).factor.double() - matrix).norm()
    for other in oracle(gaussian(20, *matrix.shape, seed=seed)):
        assert distance <= (other - matrix).norm() * (1 + 1e-6) + 1e-6


@DRAWS
@given(matrices(decades=12.0))
def test_the_residual_is_below_the_tolerance(matrix: Tensor) -> None:
    result = polar(matrix)
    assert result.residual <= 1e-8
    assert deviation(result.factor) <= 1e-8


@DRAWS
@given(st.integers(1, 12), st.integers(1, 12), st.data(), st.sampled_from(["newton_schulz", "exact"]))
def test_finite_entries_never_give_nan(rows: int, columns: int, data: st.DataObject, solver: str) -> None:
    entry = st.one_of(st.just(0.0), st.floats(-(2.0**127), 2.0**127, width=32))
    entries = data.draw(st.lists(entry, min_size=rows * columns, max_size=rows * columns).filter(any))
    result = polar(torch.tensor(entries).view(rows, columns), solver)
    assert result.factor.isfinite().all()
    if solver == "exact":
        assert result.residual <= 1e-8


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, deadline=None, derandomize=True)
@given(matrices(decades=8.0, most=300))
def test_ten_thousand_matrices_up_to_condition_1e8(matrix: Tensor) -> None:
    result, singular = polar(matrix), torch.linalg.svdvals(matrix.double())
    condition = float(singular[0] / singular[-1])
    assert result.factor.isfinite().all() and result.residual <= 1e-8
    if condition <= 1e5:  # float32 rounding of the input alone moves the factor by about eps * condition
        assert relative_error(result.factor, matrix) <= 1e-5 + 2e-7 * condition and not result.completed
