"""SimBa networks, squashed Gaussian and normaliser against closed forms."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from fire_core import find_targets
from fire_core.methods.plasticity_injection import InjectedHead
from rl.sac.network import LOG_STD_MAX, LOG_STD_MIN, Actor, Critics, sample_action, truncated_he_normal_
from rl.sac.policy import RunningNormaliser


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_parameter_counts_of_the_published_networks():
    assert sum(p.numel() for p in Actor(51, 19).parameters()) == 143_782
    assert sum(p.numel() for p in Critics(51, 19).parameters()) == 8_478_722


def test_initialisation_orthogonal_ends_truncated_he_inside_zero_bias():
    critics, actor = Critics(11, 3, width=64, blocks=1), Actor(11, 3, width=128, blocks=2)
    torch.testing.assert_close(critics.head[-1].weight.norm(dim=-1), torch.ones(2, 1))
    rows = actor.head[-1].mean.weight, actor.head[-1].log_std.weight
    for matrix in (*critics.embed.weight.mT, actor.embed.weight.mT, *rows):
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(len(matrix)), atol=1e-5, rtol=0)
    inside = [truncated_he_normal_(torch.empty(600, 400))]
    inside += [layer.weight for block in actor.head[:2] for layer in (block.expand, block.contract)]
    inside += [critics.head[0].expand.weight[1], critics.head[0].contract.weight[1]]
    for weight in inside:
        deviation = math.sqrt(2 / weight.shape[1])
        assert weight.std().item() == pytest.approx(deviation, rel=0.02)
        assert 1.9 * deviation < weight.abs().max() <= 2 * deviation / 0.879625 + 1e-6
    assert all((p == 0).all() for name, p in critics.named_parameters() if name.endswith("bias"))
    assert not torch.equal(*critics.embed.weight)


def test_plain_networks_have_no_norm_and_are_the_usual_two_hidden_layers():
    critics = Critics(5, 2, width=8, blocks=1, norm="none")
    assert not any(getattr(module, "is_norm", False) for module in critics.modules())
    x, action = torch.randn(4, 5), torch.randn(4, 2)
    first, second, last = critics.embed, critics.head[1], critics.head[3]
    for k in range(2):
        features = torch.cat([x, action], dim=1)
        for layer in (first, second):
            features = linear(features, layer.weight[k], layer.bias[k]).relu()
        by_hand = linear(features, last.weight[k], last.bias[k]).squeeze(1)
        torch.testing.assert_close(critics(x, action)[k], by_hand)
    names = [type(layer).__name__ for layer in Actor(5, 2, 8, 2, norm="none").head]
    assert names == ["ReLU", "Linear", "ReLU", "Linear", "ReLU", "GaussianHead"]


def test_every_dense_kernel_is_a_target_and_each_critic_is_one_of_its_own():
    actor, critics = Actor(11, 3, 16, 1), Critics(11, 3, 16, 2)
    assert [t.shape for t in find_targets(actor).included] == [(16, 11), (64, 16), (16, 64), (3, 16), (3, 16)]
    inside = find_targets(critics).included
    assert len(inside) == 2 * 6
    assert {t.parameter for t in inside} == {n for n, p in critics.named_parameters() if p.ndim == 3}


def test_log_deviation_stays_in_its_range_and_starts_in_the_middle():
    actor = Actor(4, 2, 8, 1)
    _, log_std = actor(1e6 * torch.randn(50, 4))
    assert (log_std >= LOG_STD_MIN).all() and (log_std <= LOG_STD_MAX).all()
    with torch.no_grad():
        actor.head[-1].log_std.weight.zero_()
    assert torch.equal(actor(torch.ones(1, 4))[1], torch.full((1, 2), -4.0))


def test_log_density_is_finite_where_tanh_has_saturated():
    mean = torch.tensor([[40.0]], requires_grad=True)
    action, log_density = sample_action(mean, torch.zeros(1, 1), torch.zeros(1, 1))
    log_density.sum().backward()
    assert action.item() == 1.0
    # log N(0) - 2 (log 2 - 40): tanh'(u) is 4 exp(-2 u) out there.
    assert log_density.item() == pytest.approx(-0.5 * math.log(2 * math.pi) - math.log(4) + 80, rel=1e-6)
    assert mean.grad.item() == pytest.approx(2.0)


def test_normaliser_agrees_with_two_pass_statistics():
    offsets, deviations = [0.0, 1e5, 1e5, 0.0], [1.0, 3.0, 0.1, 0.1]
    data = np.random.default_rng(0).normal(offsets, deviations, size=(2000, 4))
    # The start, 1e-4 observations of mean 0 and variance 1, in closed form.
    weight = 1e-4 / (2000 + 1e-4)
    mean = (1 - weight) * data.mean(axis=0)
    variance = (1 - weight) * (data.var(axis=0) + data.mean(axis=0) ** 2 * weight) + weight
    expected = (data - mean) / np.sqrt(variance + 1e-8)
    for blocks in (data, np.split(data, 20)):  # one by one, or a hundred at once
        normaliser = RunningNormaliser(4)
        for block in blocks:
            normaliser.update(block)
        np.testing.assert_allclose(normaliser.mean, mean, rtol=1e-10)
        np.testing.assert_allclose(normaliser.variance, variance, rtol=1e-7)
        np.testing.assert_allclose(normaliser.normalise(data), expected, rtol=1e-3, atol=1e-5)


def test_both_output_layers_of_the_policy_are_its_head_after_injection_too():
    """So Muon trains neither, and `targets=no_head` leaves both out."""
    actor = Actor(4, 2, 8)
    for place in ("head.2", "head.new.2"):
        heads = {target.parameter for target in find_targets(actor, "head").included}
        assert heads == {f"{place}.mean.weight", f"{place}.log_std.weight"}
        actor.head = InjectedHead(actor.head, deepcopy(actor.head))
