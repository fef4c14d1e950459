"""What must hold of the polar factor for any matrix: hypothesis draws shape, condition, scale and kind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fire_core.solvers.polar import polar
from tests.polar_cases import deviation, gaussian, oracle, relative_error, spread, with_spectrum

DRAWS = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def matrices(draw: st.DrawFn, decades: float = 3.0) -> Tensor:
    """Any shape up to 60 x 60, condition number up to 10^decades."""
    rows, columns = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    singular = spread(min(rows, columns), draw(st.floats(0, decades)))
    return with_spectrum(rows, columns, singular, seed=draw(st.integers(0, 10**6)))


@DRAWS
@given(matrices())
def test_a_power_of_two_changes_no_bit_of_newton_schulz(matrix: Tensor) -> None:
    first = polar(matrix, "newton_schulz").factor
    assert torch.equal(polar(matrix * 2.0**12, "newton_schulz").factor, first)


@DRAWS
@given(matrices())
def test_minus_the_matrix_gives_minus_the_factor(matrix: Tensor) -> None:
    torch.testing.assert_close(polar(-matrix).factor, -polar(matrix).factor, rtol=0, atol=2e-3)


@DRAWS
@given(matrices())
def test_the_transpose_gives_the_transpose(matrix: Tensor) -> None:
    torch.testing.assert_close(polar(matrix.mT).factor, polar(matrix).factor.mT, rtol=0, atol=2e-3)


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
def test_ten_thousand_matrices_up_to_condition_1e8(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes 1..300, condition up to 1e8, six kinds of spectrum; prints what was reached, `pytest -s`."""
    generator = torch.Generator().manual_seed(7)
    worst: dict[str, list[float]] = {}
    for number in range(10_000):
        kind, matrix, condition = _draw(number, generator)
        result = polar(matrix)
        assert result.factor.isfinite().all(), (kind, matrix.shape, condition)
        assert result.residual <= 1e-8 * max(1.0, min(matrix.shape) / 768), (kind, matrix.shape, condition)
        error = float("nan") if result.completed else float(relative_error(result.factor, matrix))
        if condition <= 1e5:  # float32 rounding of the input alone moves the factor by about eps * condition
            assert error <= 1e-5 + 2e-7 * condition, (kind, matrix.shape, condition, error)
        row = worst.setdefault(f"{kind}, condition to {_decade(condition)}", [0, 0.0, 0.0, 0])
        row[0] += 1
        row[1] = max(row[1], float(result.residual))
        row[2] = max(row[2], 0.0 if error != error else error)
        row[3] += int(result.completed)
    with capsys.disabled():
        print("\nkind, condition: matrices, worst DfI, worst relative error, rank completed")
        for name in sorted(worst):
            count, residual, error, completed = worst[name]
            print(f"{name}: {count}, {residual:.1e}, {error:.1e}, {completed}")


def _draw(number: int, generator: torch.Generator) -> tuple[str, Tensor, float]:
    """Matrix `number` of the long test with its kind and condition number."""
    uniform = torch.rand(4, generator=generator).tolist()
    # small sizes are cheap, so most are small: the square of a uniform number
    rows, columns = (1 + int(299 * share**2) for share in uniform[:2])
    size = min(rows, columns)
    decades = 8 * uniform[2]
    kind = ("gaussian", "logarithmic", "power", "one_small", "collapsed", "two_levels")[number % 6]
    if kind == "gaussian":
        matrix = torch.randn(rows, columns, generator=generator)
        singular = torch.linalg.svdvals(matrix.double())
        return kind, matrix, float(singular[0] / singular[-1])
    steps = torch.linspace(0, 1, size, dtype=torch.float64)
    exponent = {
        "logarithmic": steps,
        "power": (1 + steps * (size - 1)).log() / max(1.0, torch.tensor(float(size)).log().item()),
        "one_small": (steps == 1).double() if size > 1 else steps,
        "collapsed": (steps > 0.1).double(),
        "two_levels": (steps > 0.5).double(),
    }[kind]
    singular = 10 ** (-decades * exponent)
    basis = torch.randn(rows + columns, size, generator=generator, dtype=torch.float64)
    left, right = torch.linalg.qr(basis[:rows])[0], torch.linalg.qr(basis[rows:])[0]
    return kind, ((left * singular) @ right.mT).float(), float(singular[0] / singular[-1])


def _decade(condition: float) -> str:
    return "1e4" if condition <= 1e4 else "1e6" if condition <= 1e6 else "1e8 and more"
