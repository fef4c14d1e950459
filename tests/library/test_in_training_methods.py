"""AdamO, spectral regularisation, weight clipping, Hare & Tortoise and UPGD: what no recorded numbers show."""

import copy

import pytest
import tiny_nets
import torch
from torch import nn

from fire_core import State, UserError, attach, reset_optimizer_state
from fire_core.methods import create
from fire_core.methods.method import find_weights
from fire_core.methods.spectral import first_vector, largest_singular_value
from fire_core.methods.upgd import PerturbedDescent
from fire_core.methods.weight_clipping import clip_weights


def linear(values, bias=None) -> nn.Sequential:
    return nn.Sequential(tiny_nets.linear(values, bias))


def state_of(net: nn.Module) -> State:
    return tiny_nets.state_of(net, torch.optim.SGD(net.parameters(), lr=0.5))


def test_adamo_by_hand():
    """W = diag(2, 1): the gradient is 4 * 2 * (4 - 1) = 24 at the 2, and 0 at the 1. With rate 0.5 and coefficient
    0.01 the step is 0.12, taken from the weights before the optimizer's own step, which moves both by 1."""
    net = linear([[2.0, 0.0], [0.0, 1.0]])
    state, method = state_of(net), create("adamo", coefficient=0.01)
    method.before_step(state)
    net[0].weight.data += torch.eye(2)
    method.after_step(state)
    torch.testing.assert_close(net[0].weight.data, torch.tensor([[2.88, 0.0], [0.0, 2.0]]))


def test_adamo_takes_the_rate_of_each_weights_own_group():
    body, head, bare = (linear([[3.0]]) for _ in range(3))
    state = state_of(nn.Sequential(body, head, bare))
    groups = [{"params": body.parameters(), "lr": 0.0}, {"params": head.parameters(), "lr": 0.1}]
    method, state.optimizers["net"] = create("adamo", coefficient=0.01), torch.optim.SGD(groups)
    method.before_step(state), method.after_step(state)
    moved = [part[0].weight.item() for part in (body, head, bare)]
    assert moved == pytest.approx([3.0, 3.0 - 0.1 * 0.01 * 4 * 3 * (9 - 1), 3.0])
    with pytest.raises(UserError, match=r"give attach\(\) the optimizer"):
        method.before_step(State({"net": body}, phase=1))


def test_a_weight_of_zeros_keeps_the_vector_of_the_power_iteration():
    matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    sigma, left = largest_singular_value(0 * matrix, first_vector("a", matrix, 100))
    assert sigma == 0 and largest_singular_value(matrix, left)[0] > 0.99 * torch.linalg.matrix_norm(matrix, 2)


def test_weight_clipping_leaves_frozen_weights_and_norms_and_knows_transposed_ones():
    """Four inputs: s = 1/2, so factor 3 clips to 1.5, the bias too. A kernel of 1 x 4 inputs has the same s."""
    net = nn.Sequential(nn.Linear(4, 1), nn.Conv2d(1, 1, 2), nn.LayerNorm(4))
    for layer in net:
        nn.init.constant_(layer.weight, 7.0), nn.init.constant_(layer.bias, -9.0)
    net[1].requires_grad_(False)
    method, state = create("weight_clipping", factor=3.0), state_of(net)
    method.after_step(state)
    assert net[0].weight.tolist() == [[1.5] * 4] and net[0].bias.tolist() == [-1.5]
    assert (net[1].weight == 7.0).all() and (net[2].weight == 7.0).all() and (net[2].bias == -9.0).all()
    upwards = nn.ConvTranspose2d(8, 4, 2)  # torch draws from 1 / sqrt(4 outputs * 4 taps)
    before = upwards.weight.clone()
    clip_weights(upwards, 1.0001, find_weights(upwards, "all"))
    assert torch.equal(upwards.weight, before) and upwards.weight.abs().max() > 0.2


def test_the_tortoise_has_running_statistics_of_its_own_and_the_counts_of_the_hare():
    net = nn.BatchNorm1d(1)
    state, method = state_of(net), create("hare_tortoise", momentum=0.5, period=100)
    for mean in (0.0, 4.0):
        net.running_mean.fill_(mean), net.num_batches_tracked.add_(1)
        method.after_step(state)
    method.before_evaluation(state)
    assert net.running_mean.item() == 2.0 and net.num_batches_tracked.item() == 2
    method.after_evaluation(state)
    assert net.running_mean.item() == 4.0
    half, method = linear([[1.0]]).bfloat16(), create("hare_tortoise")
    for value in (1.0, 2.0):  # a step of .001 is below the precision of bfloat16
        half[0].weight.data.fill_(value)
        method.after_step(state_of(half))
    assert method.tortoise["net"]["0.weight"].item() == pytest.approx(1.001)


def test_the_tortoise_starts_again_where_a_layer_is_replaced_or_added():
    net = nn.Sequential(linear([[1.0]]), linear([[1.0]]))
    state, method = state_of(net), create("hare_tortoise", momentum=0.5)
    method.after_step(state)
    for change in (lambda: net.__setitem__(1, nn.Linear(1, 3)), lambda: net.append(nn.Linear(3, 3))):
        change()
        trained = [p.clone() for p in net.parameters()]
        method.before_evaluation(state), method.after_evaluation(state), method.after_step(state)
        assert method.tortoise["net"].keys() == net.state_dict().keys()
        assert all(torch.equal(a, b) for a, b in zip(trained, net.parameters(), strict=True))


PLAIN = {"decay": 0.9, "weight_decay": 0.1, "adaptive": False}


def test_no_noise_of_upgd_comes_twice_though_the_state_is_cleared():
    weight, steps = nn.Parameter(torch.zeros(4)), []
    upgd = PerturbedDescent([weight], lr=1.0, sigma=1.0, **PLAIN)
    for _ in range(2):
        weight.data.zero_()
        weight.grad = torch.zeros(4)
        upgd.step()
        steps.append(weight.detach().clone())
        reset_optimizer_state({"net": upgd}, "clear")
    assert not torch.isclose(*steps).any()


def test_upgd_by_the_corrected_maximum():
    """Weights 2 and -1 with gradients -1 and -1 have the utilities 2 and -1, so U is sigmoid(1) and sigmoid(-1/2)."""
    w = nn.Parameter(torch.tensor([2.0, -1.0]))
    w.grad = torch.tensor([-1.0, -1.0])
    PerturbedDescent([w], lr=0.5, maximum="corrected", sigma=0.0, **PLAIN).step()
    free = 1 - torch.sigmoid(torch.tensor([1.0, -0.5]))
    torch.testing.assert_close(w.data, torch.tensor([1.9, -0.95]) + 0.5 * free)


def test_upgd_has_the_rate_and_epsilon_of_the_run_times_its_factor():
    net = linear([[1.0]])
    default = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-5)
    treatment = attach(create("upgd", rate_factor=3.0), net, default)
    assert treatment.optimizer is default
    treatment.boundary(1)
    (group,) = treatment.optimizer.param_groups
    assert (group["lr"], group["rate_factor"], group["eps"]) == (pytest.approx(3e-2), 3.0, 1e-5)


@pytest.mark.parametrize("name", ["upgd", "muon"])
def test_an_optimizer_with_two_learning_rates_is_not_replaced_by_one_with_one(name):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.001}]
    adam = torch.optim.Adam(groups, lr=0.01)
    treatment = attach(name, net, adam)
    with pytest.raises(UserError, match=r"groups of yours have 0\.001, 0\.01"):
        treatment.boundary(1)
    assert treatment.optimizer is adam
    adam.param_groups[1]["lr"] = 0.01
    treatment.boundary(1)
    assert treatment.optimizer is not adam


def test_upgd_in_bfloat16_goes_on_as_if_it_had_not_stopped():
    def build(net):
        return create("upgd").build(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def utility_after_a_step(net, optimizer):
        net[0].weight.grad = torch.full_like(net[0].weight, 0.37)
        optimizer.step()
        return optimizer.state[net[0].weight]["utility"]

    net = linear([[2.0, -1.0]]).bfloat16()
    optimizer = build(net)
    utility_after_a_step(net, optimizer)
    resumed = build(again := copy.deepcopy(net))
    resumed.load_state_dict(optimizer.state_dict())
    assert torch.equal(utility_after_a_step(net, optimizer), utility_after_a_step(again, resumed))
