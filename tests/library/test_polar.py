"""The polar factor against float64 SVD and the published formula, and its behaviour on awkward input."""

from __future__ import annotations

import math

import pytest
import torch

from fire_core import UserError, fire, project_
from fire_core.solvers.polar import STACK_BYTES, polar
from tests.polar_cases import deviation, gaussian, published, relative_error, spread, with_spectrum

SHAPES = [(64, 64), (192, 192), (100, 70), (70, 100), (768, 64), (33, 500), (5, 5), (40, 1), (1, 40), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_is_the_svd_factor_of_gaussian_matrices(shape: tuple[int, int]) -> None:
    matrices = gaussian(6, *shape)
    result = polar(matrices)
    assert deviation(result.factor).max() <= 1e-8
    assert relative_error(result.factor, matrices).max() <= 1e-4
    assert not result.completed.any()
    assert result.factor.dtype == torch.float32 and result.factor.shape == matrices.shape


def test_exact_repairs_only_what_fails() -> None:
    good = gaussian(3, 48, 48)
    bad = with_spectrum(48, 48, spread(48, 6.3))
    alone = polar(good)
    together = polar(torch.cat([good, bad[None]]))
    assert torch.equal(together.factor[:3], alone.factor)
    assert together.iterations[3] > together.iterations[:3].max()
    assert deviation(together.factor[3]) <= 1e-8


@pytest.mark.parametrize("shape", [(64, 64), (40, 90), (90, 20), (1, 7)])
def test_float64_input_gives_float64_accuracy(shape: tuple[int, int]) -> None:
    matrix = gaussian(*shape).double()
    result = polar(matrix)
    assert result.factor.dtype == torch.float64
    assert relative_error(result.factor, matrix) <= 1e-11


@pytest.mark.parametrize("iterations", [1, 5, 10])
@pytest.mark.parametrize("shape", [(64, 64), (192, 64), (48, 160)])
def test_newton_schulz_is_the_published_formula(shape: tuple[int, int], iterations: int) -> None:
    matrices = gaussian(4, *shape)
    result = polar(matrices, "newton_schulz", iterations=iterations)
    for matrix, factor in zip(matrices, result.factor, strict=True):
        expected = published(matrix.double(), iterations)
        assert (factor - expected).norm() <= 1e-6 * expected.norm()
    assert (result.iterations == iterations).all()


def test_newton_schulz_acts_on_singular_values_alone() -> None:
    """Hand-worked: diag(3, 4) / 5 after one step is diag(0.6 * 1.32, 0.8 * 1.18)."""
    result = polar(torch.diag(torch.tensor([3.0, 4.0])), "newton_schulz", iterations=1)
    torch.testing.assert_close(result.factor, torch.diag(torch.tensor([0.792, 0.944])))
    assert math.isclose(float(result.residual), (1 - 0.792**2) ** 2 + (1 - 0.944**2) ** 2, rel_tol=1e-5)


def test_newton_schulz_spectral_divides_by_the_largest_singular_value() -> None:
    matrix = torch.diag(torch.tensor([2.0, 1.0]))
    factor = polar(matrix, "newton_schulz", iterations=1, normalize="spectral").factor
    torch.testing.assert_close(factor, torch.diag(torch.tensor([1.0, 0.6875])))


@pytest.mark.parametrize("shape", [(64, 64), (37, 20), (192, 192), (9, 3)])
def test_newton_schulz_gives_the_same_bits_alone_and_in_a_batch(shape: tuple[int, int]) -> None:
    matrices = gaussian(7, *shape)
    together = polar(matrices, "newton_schulz").factor
    for matrix, factor in zip(matrices, together, strict=True):
        assert torch.equal(polar(matrix, "newton_schulz").factor, factor)


@pytest.mark.parametrize("solver", ["newton_schulz", "exact"])
@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-38, 3e38])
def test_scale_of_the_input_does_not_matter(solver: str, scale: float) -> None:
    matrices = gaussian(2, 30, 20).clamp(-1, 1)
    expected = polar(matrices, solver).factor
    torch.testing.assert_close(polar(matrices * scale, solver).factor, expected, rtol=0, atol=1e-4)


def test_type_strides_and_scales_do_not_matter() -> None:
    kernel = gaussian(24, 16, 3, 3).requires_grad_()
    taps, before = kernel.permute(2, 3, 0, 1), kernel.detach().clone()
    result = polar(taps)
    assert torch.equal(result.factor, polar(taps.contiguous()).factor) and torch.equal(kernel, before)
    assert result.residual.shape == (3, 3) and not result.factor.requires_grad
    for dtype in (torch.bfloat16, torch.float16):
        factor = polar(taps.to(dtype)).factor
        assert factor.dtype == torch.float32 and torch.equal(factor, polar(taps.to(dtype).float()).factor)
    matrices = gaussian(3, 24, 24) * torch.tensor([1e30, 1.0, 1e-30]).view(3, 1, 1)
    assert relative_error(polar(matrices).factor, matrices).max() <= 1e-4


@pytest.mark.parametrize("solver", ["newton_schulz", "exact"])
def test_residual_is_the_deviation_from_isometry_of_the_factor(solver: str) -> None:
    matrices = torch.stack([gaussian(48, 48), with_spectrum(48, 48, spread(48, 5))])
    result = polar(matrices, solver)
    torch.testing.assert_close(result.residual.double(), deviation(result.factor), rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize("solver", ["newton_schulz", "exact"])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf])
def test_zero_and_non_finite_matrices_are_named(solver: str, value: float) -> None:
    matrices = gaussian(2, 3, 8, 5)
    matrices[1, 2] = 0.0
    matrices[1, 2, 4, 4] = value
    with pytest.raises(UserError, match=r"\(1, 2\) of the batch is (zero|not finite)"):
        polar(matrices, solver)


@pytest.mark.parametrize(
    "function, settings",
    [
        (polar, {"normalize": "nuclear"}),
        (polar, {"iterations": 0}),
        (polar, {"tolerance": math.nan}),
        (project_, {"scale": math.nan}),
        (project_, {"scale": 1e300}),
        (project_, {"scale": 1e6}),  # more than float16 holds
        (project_, {"iterations": 3}),
        (project_, {"solver": "newton"}),
    ],
)
def test_bad_settings_are_named_and_nothing_is_written(function, settings: dict) -> None:
    weight = gaussian(6, 4).half()
    before = weight.clone()
    with pytest.raises(UserError, match="float16" if 1e6 in settings.values() else next(iter(settings))):
        function(weight, **settings)
    assert torch.equal(weight, before)


def test_fire_writes_nothing_that_half_precision_cannot_hold() -> None:
    net = torch.nn.Linear(4, 6).half()
    before = net.weight.detach().clone()
    with pytest.raises(UserError, match="weight"):
        fire(net, scale="initial", initial={"weight": gaussian(6, 4).mul(1e6)})
    assert torch.equal(net.weight, before)


@pytest.mark.parametrize("function", [polar, project_, fire])
def test_what_is_no_matrix_is_one_clear_line(function) -> None:
    eye = torch.eye(3)
    for other in (
        torch.ones(3),
        torch.ones(2, 0, 3),
        torch.ones(3, 3, dtype=torch.int64),
        torch.ones(3, 3, dtype=torch.complex64),
        eye.to(torch.float8_e4m3fn),
        eye.to_sparse(),
        torch.nested.nested_tensor([eye, eye]),
        torch.ones(3, 3, device="meta"),
        eye.numpy(),
    ):
        with pytest.raises(UserError) as caught:
            function(other)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("solver", ["newton_schulz", "exact"])
def test_stacks_do_not_change_the_result(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = gaussian(5, 40, 24)
    whole = polar(matrices, solver)
    monkeypatch.setitem(STACK_BYTES, "cpu", 2 * 40 * 24 * 4)
    cut = polar(matrices, solver)
    assert torch.equal(whole.factor, cut.factor)
    assert torch.equal(whole.iterations, cut.iterations)


def test_quintic_is_the_formula_of_muon() -> None:
    """Against the step written out in float64, and hand-worked: diag(3, 4) / 5 after one step."""
    matrix = gaussian(48, 32)
    x = (matrix / matrix.norm()).double()
    for _ in range(5):
        gram = x.T @ x
        x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
    torch.testing.assert_close(polar(matrix, "quintic", iterations=5).factor.double(), x, rtol=0, atol=1e-5)
    factor = polar(torch.diag(torch.tensor([3.0, 4.0])), "quintic", iterations=1).factor
    worked = [3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5 for s in (0.6, 0.8)]
    torch.testing.assert_close(factor.diagonal(), torch.tensor(worked))


@pytest.mark.parametrize("iterations", [5, 10, 20])
def test_quintic_leaves_singular_values_in_a_band(iterations: int) -> None:
    singular = torch.linspace(1, 10, 48, dtype=torch.float64)  # the smallest is 2 % of the norm
    result = polar(with_spectrum(64, 48, singular), "quintic", iterations=iterations)
    left = torch.linalg.svdvals(result.factor)
    assert 0.68 < left.min() < 0.8 and 1.1 < left.max() < 1.21
    assert result.residual > 0.1


def test_a_loose_tolerance_is_kept_as_it_is() -> None:
    """Without repair the residual lies between the default and the bound that was asked for."""
    matrices = torch.stack([with_spectrum(128, 128, spread(128, 6.0), seed=seed) for seed in range(4)])
    loose, tight = polar(matrices, tolerance=1.0), polar(matrices)
    assert tight.residual.max() <= 1e-8 < loose.residual.max() <= 1.0
