"""The bounds of the paper's theorems, by hand and against nets that meet their premises."""

import math

import pytest
import torch

from fire_core.measure.bounds import (
    activity_bound,
    covariance_bounds,
    curvature_bound,
    deviation_up_to_scale,
    rank_bound,
)
from fire_core.measure.metrics import deviation_from_isometry, feature_rank, hessian_norm


def test_deviation_up_to_scale_is_the_smallest_over_all_multiples():
    torch.manual_seed(0)
    matrix = torch.randn(6, 4, dtype=torch.float64)
    multiples = torch.linspace(0.05, 1.0, 2000, dtype=torch.float64)[:, None, None] * matrix
    smallest = deviation_from_isometry(multiples).min()
    deviation = float(deviation_up_to_scale(matrix))
    assert deviation == pytest.approx(float(smallest), rel=1e-4)
    assert float(deviation_up_to_scale(7 * matrix.mT)) == pytest.approx(deviation, rel=1e-9)
    assert float(deviation_up_to_scale(3 * torch.eye(4, 6))) == 0.0


def test_covariance_bounds_by_hand():
    def numbers(*values):
        return [torch.tensor([[float(value)]]) for value in values]

    # layer 1: 16 * 1 / 2^2 * 3^2 * 1 / 3^2 * (3 - 2)^2; layer 2: 16 * 1 / 2^2 * (3 * 1)^2 * (1 / 3^2 + 1) * 1
    found = covariance_bounds(numbers(2, 1), numbers(3, 1), torch.ones(1, 1), numbers(2, 2), numbers(3, 3))
    assert found == pytest.approx([4.0, 40.0])


def test_curvature_bound_by_hand():
    # factors 1 + 2 and 1 + 3: one left out 4 + 3, both left out 1
    assert curvature_bound([4.0, 9.0], hessian=0.5, gradient=2.0) == pytest.approx(0.5 * 7 + 2 * 2 * 1)
    assert curvature_bound([4.0, 9.0], 0.5, 2.0, input_variance=4.0) == pytest.approx(4 * 3.5 + 2 * 4)


def test_curvature_bound_holds_for_a_linear_net_on_whitened_inputs():
    torch.manual_seed(0)
    inputs = math.sqrt(32) * torch.linalg.qr(torch.randn(32, 5))[0]
    weights = [torch.randn(5, 5).requires_grad_() for _ in range(2)]
    goal = torch.randn(32, 5)

    def errors():
        return inputs @ weights[0].mT @ weights[1].mT - goal

    stream = torch.Generator().manual_seed(0)
    measured = hessian_norm(lambda: errors().square().sum() / 64, weights, generator=stream)
    slope = float(errors().detach().norm(dim=1).max())
    bound = curvature_bound([float(deviation_from_isometry(w.detach())) for w in weights], 1.0, slope)
    assert 0.05 * bound < float(measured) <= bound


def test_rank_bound_by_hand_and_for_a_near_isometry():
    # epsilon 1/2: factor sqrt(3); eigenvalues 4 and 1: factor 2; so 0.5 * 40 / (0.5 * 2 * sqrt(3) + 0.5) = 8.96
    assert rank_bound(0.25, torch.tensor([4.0] * 20 + [1.0] * 20), delta=0.5) == 9
    assert rank_bound(1.0, torch.ones(3)) is None and rank_bound(0.5, torch.ones(0)) is None
    torch.manual_seed(0)
    weight = torch.linalg.qr(torch.randn(24, 16))[0].mT + 0.005 * torch.randn(16, 24)
    inputs = torch.randn(400, 24)
    bound = rank_bound(float(deviation_from_isometry(weight)), torch.ones(16), delta=0.01)
    assert 14 <= bound <= int(feature_rank(inputs @ weight.mT))


def test_activity_bound():
    assert activity_bound(0.25) == pytest.approx(3**0.5)
    assert activity_bound(1.0) is None and activity_bound(0.0) == 1.0
