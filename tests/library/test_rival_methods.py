"""Rival methods against numbers worked out by hand on tiny nets."""

import copy
from contextlib import nullcontext

import pytest
import tiny_nets
import torch
from tiny_nets import Net, linear, train_step, untouched
from torch import nn
from torch.nn import functional

from fire_core import UserError, attach, find_targets, reset_optimizer_state
from fire_core.measure.dormancy import dormancy
from fire_core.measure.plasticity import curvature, plasticity
from fire_core.methods import create
from fire_core.methods.dash import shrink
from fire_core.methods.method import find_weights
from fire_core.methods.muon import MuonAdam
from fire_core.methods.spectral import first_vector, largest_singular_value
from fire_core.methods.upgd import PerturbedDescent
from fire_core.methods.weight_clipping import clip_weights
from fire_core.units import find_unit_layers, recycle


def tiny():
    """Hidden activations of `X` are [1, 2, 3] and [3, 0, 3]: means 2, 1, 3; outgoing weights 1, -4, 1/2."""
    hidden = linear([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [0.0, 0.0, 0.0])
    return nn.Sequential(hidden, nn.ReLU(), linear([[1.0, -4.0, 0.5]], [0.0]))


X = torch.tensor([[1.0, 2.0], [3.0, 0.0]])


def state_of(net, inputs=X, targets=None):
    adam, loss = torch.optim.Adam(net.parameters()), lambda output, t: (output * t).sum()
    return tiny_nets.state_of(net, adam, (inputs, targets), loss)


def test_dash_takes_convolutions_kernel_by_kernel_or_whole():
    net, weight = nn.Conv2d(2, 1, (1, 2), bias=False), torch.tensor([[[[3.0, 4.0]], [[0.0, 5.0]]]])
    for kernels, factors in ((True, [0.6, 1.0]), (False, [0.8, 0.8])):
        net.weight.data = weight.clone()
        descent = {"weight": torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])}
        shrink(net, descent, find_targets(net), floor=0.05, kernels=kernels)
        # all four weights at once: (3 + 5) / (sqrt(50) sqrt(2)) = 0.8
        torch.testing.assert_close(net.weight.data, weight * torch.tensor(factors).view(1, 2, 1, 1))


@pytest.mark.parametrize("name", "cbp cpr muon random_orthogonal snr spectral swr".split())  # noqa: SIM905
def test_default_types_and_devices_do_not_matter(name):
    ends = []
    for default, device in ((torch.float32, "cpu"), (torch.bfloat16, "meta")):
        net = tiny()
        treatment = attach(
            create(name, first_phase=0), net, torch.optim.Adam(net.parameters()), batches=lambda: [(X, None)]
        )
        torch.set_default_dtype(default)
        try:
            with torch.device(device):
                for _ in range(3):
                    train_step(treatment, net(X).square().sum())
                treatment.boundary(1)
        finally:
            torch.set_default_dtype(torch.float32)
        steps = [s["step"] for s in treatment.optimizer.state.values() if "step" in s]
        ends.append([*net.parameters(), *steps])
    assert all(map(torch.equal, *ends))


def test_dash_leaves_alone_what_is_not_its_own():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    net.unused = nn.Linear(2, 2)
    net.forward = lambda x: net[3](net[2](net[1](net[0](x))))
    state = state_of(net, targets=torch.ones(2, 1))
    statistics, random = [value.clone() for value in net.buffers()], torch.get_rng_state()
    for training in (True, False):
        net[1].train(training)
        with untouched(net.unused):
            assert create("dash").boundary(state).changed
        dormancy(net, [X])
        assert [module.training for module in net] == [True, training, True, True, True] and net.training
    assert all(map(torch.equal, net.buffers(), statistics)) and torch.equal(random, torch.get_rng_state())


def declared(weight, **declarations):
    """A module that holds this weight and says what it is."""
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    module.__dict__.update(declarations)
    return module


STACK = declared(torch.tensor([[[1.0, 1.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 1.0]]]), stacked_matrices=True)
# the gains of a norm layer that torch does not know
GAINS = declared(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), is_norm=True)
NORMED = nn.Sequential(linear([[1.0, 0.0], [0.0, 1.0]]), GAINS)
PENALTIES = [
    (linear([[1.0], [1.0]]), {"gram": "smaller"}, 1.0),
    (NORMED, {"norms": False}, 0.0),
    (NORMED, {}, 10.0),  # (4 - 1)^2 + (0 - 1)^2
    (STACK, {}, 12.0),  # [[1, 1], [1, 0]] for the first, [[3, 0], [0, 0]] for the second
]


@pytest.mark.parametrize("net, settings, expected", PENALTIES)
def test_parseval_by_hand(net, settings, expected):
    penalty = create("parseval", **{"coefficient": 1.0} | settings).penalty(state_of(net))
    assert penalty.item() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["adamo", "muon", "parseval", "spectral", "weight_clipping"])
def test_matrices_stored_as_in_out_are_treated_as_the_same_matrices(name):
    torch.manual_seed(0)
    weight, gradient = torch.randn(2, 2, 3, 2)
    nets = [declared(weight.clone(), stacked_matrices=True)]
    nets.append(declared(weight.mT.clone(), stacked_matrices="in_out"))
    for net, own in zip(nets, (gradient, gradient.mT), strict=True):
        method = create(name, first_phase=0, targets="all")
        train_step(attach(method, net, torch.optim.SGD(net.parameters(), lr=0.1)), (net.weight * own).sum())
    torch.testing.assert_close(nets[0].weight, nets[1].weight.mT)


def started(name, **settings):
    """The tiny net with a method, its state, and a function that makes steps."""
    net, method = tiny(), create(name, **settings)
    state = state_of(net)
    method.boundary(state)

    def steps(count, inputs=X):
        for _ in range(count):
            net.train()(inputs)
            method.after_step(state)

    return net, method, state, steps


def test_continual_backprop_by_hand():
    net, method, state, steps = started("cbp", replacement_rate=0.2, maturity=0, decay=0.5)
    steps(2)
    net.eval()(-X)
    method.after_step(state)
    memory = method.memory["net"]["0"]
    # mean |h| (2, 1, 3) times |w_out| (1, 4, .5) = (2, 4, 1.5); in each step 3 mature units are due 0.6
    assert method.counts["recycled"] == 1 and memory["age"].tolist() == [2, 2, 0]
    assert float(memory["due"]) == pytest.approx(0.6 + 0.6 - 1)
    torch.testing.assert_close(memory["utility"], torch.tensor([1.5, 3.0, 0.0]))
    assert net[2].weight.tolist() == [[1.0, -4.0, 0.0]]
    assert net[2].bias.item() == pytest.approx(0.5 * 3.0)  # takes over w_out * mean h of the unit that went
    assert net[0].weight[:2].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert (net[0].weight[2].abs() <= 2**-0.5).all() and not torch.equal(net[0].weight[2], torch.ones(2))
    # the young unit: (0.5 0.2 + 0.5 0.5 4) / (1 - 0.25) = 1.47, although its average of 1.1 is the smallest
    memory |= {"age": torch.tensor([99, 1, 99]), "utility": torch.tensor([1.6, 0.2, 9.0])}
    memory["due"] += 0.5
    measured = torch.tensor([[1.0, 0.5, 1.0], [0.0, 0.0, 0.0]])
    assert method.choose(net, method.layers["net"][0], memory, measured).tolist() == [0]
    with pytest.raises(UserError, match="no activations in 100 steps"):
        [method.after_step(state) for _ in range(100)]


def test_redo_recycles_the_dormant_unit_and_clears_its_moments():
    net = tiny()
    state = state_of(net)
    net(X).sum().backward()
    state.optimizers["net"].step()
    net.load_state_dict(state.initial["net"])
    create("redo", threshold=0.5).after_pass(state)
    assert net[2].weight.tolist() == [[1.0, 0.0, 0.5]]
    assert net[0].weight[0].tolist() == [1.0, 0.0] and net[0].weight[2].tolist() == [1.0, 1.0]
    assert not torch.equal(net[0].weight[1], torch.tensor([0.0, 1.0]))
    moments = state.optimizers["net"].state
    for key in ("exp_avg", "exp_avg_sq"):
        assert (moments[net[0].weight][key].abs().sum(dim=1) > 0).tolist() == [True, False, True]
        assert (moments[net[2].weight][key][0] > 0).tolist() == [True, False, True]
        assert (moments[net[0].bias][key] > 0).tolist() == [True, False, True]


def test_redo_by_steps_and_with_initial_weights():
    net = tiny()
    state = state_of(net)
    net[0].weight.data[1] = -1.0  # silent on X
    method = create("redo", threshold=0.0, every_steps=2, fresh="initial")
    method.after_step(state), method.after_pass(state)
    assert net[0].weight[1].tolist() == [-1.0, -1.0]
    before = net(X)
    method.after_step(state)
    assert net[0].weight[1].tolist() == [0.0, 1.0] and net[2].weight[0, 1] == 0.0
    assert torch.equal(net(X), before)  # a dead unit's replacement cannot be heard


def test_snr_thresholds_are_percentiles_of_a_units_own_silences():
    method, histogram = create("snr", percentile=0.8, longest=8), torch.zeros(3, 9, dtype=torch.int32)
    histogram[:2, 1:5] = torch.tensor([0, 5, 3, 2])  # 8 of 10 silences ended by age 3
    histogram[:, 0] = 99  # firing in consecutive steps is no silence
    for tau, new in (([5, 3, 4], [3, 6, 1]), ([8, 7, 8], [3, 3, 1])):
        assert method.new_threshold(histogram, torch.tensor(tau, dtype=torch.int32)).tolist() == new


def test_snr_over_eight_steps_by_hand():
    net, method, *_ = started("snr", percentile=0.5, update_every=4, longest=8)
    (layer,), memory, reset = method.layers["net"], method.memory["net"]["0"], []
    for step in range(8):
        fires = torch.tensor([True, False, step % 2 == 1])  # always, never, every second step
        reset += [found.tolist() for found in method.indices([method.choose(net, layer, memory, fires)])]
        if step == 3:
            assert memory["tau"].tolist() == [1, 1, 1]
    # the silent unit goes at the first update, then at every step until its own record (1, 1, 1, 4) doubles tau
    assert reset == [[], [], [], [1], [1, 2], [1], [1, 2], []] and memory["tau"].tolist() == [1, 2, 2]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch below 2.9")
@pytest.mark.parametrize("shape", [(6, 4), (8, 2, 3, 3), (40, 2, 3, 3), (3, 5, 4)], ids=str)
def test_muon_is_that_of_torch_on_each_matrix(shape):
    """Square, wide and tall kernels as one matrix (out, everything else), and a stack of matrices one by one."""
    torch.manual_seed(0)
    weight, stacked = nn.Parameter(torch.randn(shape)), len(shape) == 3
    matrices = (lambda tensor: tensor) if stacked else (lambda tensor: tensor.flatten(1)[None])
    start = matrices(weight.detach().clone())
    alone = [nn.Parameter(matrix.clone()) for matrix in start]
    group = {"params": [weight], "momentum": 0.9, "stacked": stacked, "transposed": False}
    ours = MuonAdam([group], {"lr": 0.1})
    theirs = torch.optim.Muon(alone, lr=0.1, momentum=0.9, weight_decay=0.0)
    for _ in range(3):
        weight.grad = torch.randn(shape)
        for parameter, gradient in zip(alone, matrices(weight.grad), strict=True):
            parameter.grad = gradient.clone()
        ours.step(), theirs.step()
    for matrix, first, after in zip(alone, start, matrices(weight), strict=True):
        moved = (matrix - first).norm()
        assert (after - matrix).norm() < 0.05 * moved  # bfloat16 inside rounds in another way


def test_muon_shares_out_the_parameters():
    body = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 4), nn.ReLU()
    net = nn.Sequential(*body, nn.Linear(4, 2))
    adam = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1.5e-4)
    torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 0.1)
    treatment = attach("muon", net, adam)
    start = treatment.state_dict()
    treatment.boundary(1)
    later = treatment.optimizer
    treatment.load_state_dict(start), treatment.boundary(1)
    both = treatment.optimizer
    assert both is not later  # whose momentum is of a later step
    treatment.boundary(2)
    assert both is treatment.optimizer
    muon, adam = both.param_groups
    assert list(map(id, muon["params"])) == [id(net[0].weight), id(net[3].weight)]
    assert {*map(id, adam["params"])} == {*map(id, net.parameters())} - {*map(id, muon["params"])}
    assert (muon["lr"], muon["initial_lr"], adam["initial_lr"]) == pytest.approx((1e-2, 1e-1, 1e-2))
    assert (adam["lr"], adam["betas"], adam["eps"], muon["rate_factor"]) == (1e-3, (0.9, 0.95), 1.5e-4, 10.0)
    net[5] = nn.Linear(4, 3)
    treatment.boundary(3)
    assert treatment.optimizer is not both


UNFIT = {
    "shares a parameter": lambda net: setattr(net.append(nn.Embedding(1, 3))[3], "weight", net[2].weight),
    "reparametrised": lambda net: nn.utils.parametrizations.weight_norm(net[2]),
    "frozen": lambda net: net[2].requires_grad_(False),
    "besides weight": lambda net: net[2].register_parameter("sigma", nn.Parameter(torch.ones(2, 3))),
}


@pytest.mark.parametrize("said", UNFIT)
def test_units_of_shared_noisy_reparametrised_and_frozen_weights_are_not_replaced(said):
    net = tiny()
    (layer,), _ = find_unit_layers(net, X)
    UNFIT[said](net)
    with pytest.raises(UserError, match=said):
        recycle(net, layer, torch.tensor([0]), generator=torch.Generator())
    if said != "shares a parameter":
        with pytest.raises(UserError, match=f"0 .*{said}"):
            create("redo", threshold=0.5).after_pass(state_of(net))


def squared(net, x, keep=None):
    """Calls its layers with keyword arguments; its units are squared."""
    hidden = torch.relu(net.first(input=x)).square()
    return net.second(input=hidden if keep is None else hidden * keep)


KEEP = torch.ones(3, dtype=torch.int64)
BATCHES = {"tensor": X, "mapping": {"x": X, "keep": KEEP}, "tuple": (X, KEEP), "list": [X, KEEP]}


@pytest.mark.parametrize("inputs", BATCHES.values(), ids=BATCHES)
def test_batches_may_be_mappings_tuples_and_lists(inputs):
    torch.manual_seed(0)
    net = Net(squared, first=nn.Linear(2, 3), second=nn.Linear(3, 2))
    (layer,), _ = find_unit_layers(net, inputs)
    assert (layer.incoming, layer.outgoing) == (("first",), (("second", 1),))
    hidden = torch.relu(net.first(X)).square().mean(dim=0)
    torch.testing.assert_close(dormancy(net, [inputs])["first"], (hidden / hidden.mean()).detach())
    assert plasticity(net, inputs) == pytest.approx(plasticity(net, X))
    draw = torch.Generator().manual_seed(0)
    assert curvature(net, inputs, torch.ones(2, 2), functional.mse_loss, generator=draw) > 0
    state = state_of(net, inputs, torch.ones(2, 2))
    assert create("dash").boundary(state).changed
    create("redo", threshold=10.0).after_pass(state)
    method = create("cbp", replacement_rate=1.0, maturity=0)
    method.boundary(state)
    net(X)
    method.after_step(state)
    assert method.counts["recycled"] == 3


def test_adamo_takes_the_rate_of_each_weights_own_group():
    """Of W = diag(2, 1), the gradient is 4 * 2 * (4 - 1) = 24 at the 2, and 0 at the 1. With rate 0.5 and coefficient
    0.01 the step is 0.12, taken from the weights before the optimizer's own step, which moves both by 1."""
    body, head, bare = (nn.Sequential(linear([[2.0, 0.0], [0.0, 1.0]])) for _ in range(3))
    state = tiny_nets.state_of(nn.Sequential(body, head, bare))
    groups = [{"params": body.parameters(), "lr": 0.0}, {"params": head.parameters(), "lr": 0.5}]
    method, state.optimizers["net"] = create("adamo", coefficient=0.01), torch.optim.SGD(groups)
    method.before_step(state)
    for part in (body, head, bare):
        part[0].weight.data += torch.eye(2)
    method.after_step(state)
    for part, first in ((body, 3.0), (head, 2.88), (bare, 3.0)):
        torch.testing.assert_close(part[0].weight.data, torch.diag(torch.tensor([first, 2.0])))
    with pytest.raises(UserError, match=r"give attach\(\) the optimizer"):
        attach("adamo", body)


def test_a_weight_of_zeros_keeps_the_vector_of_the_power_iteration():
    matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    sigma, left = largest_singular_value(0 * matrix, first_vector("a", matrix, 100))
    assert sigma == 0 and largest_singular_value(matrix, left)[0] > 0.99 * torch.linalg.matrix_norm(matrix, 2)


SOON = {"cbp": {"replacement_rate": 0.0}, "redo": {"every_steps": 1}, "regrama": {"every_steps": 1}}
SOON |= {"cpr": {}, "snr": {}}


@pytest.mark.parametrize("name", SOON)
def test_layers_are_found_again_where_a_boundary_freezes_or_replaces_some(name):
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    method = create(name, **SOON[name])
    treatment = attach(method, net, torch.optim.SGD(net.parameters(), lr=0.1), batches=lambda: [(X, None)])
    for phase, frozen in enumerate((False, True, False), start=1):
        net[0].requires_grad_(not frozen)
        net[4] = nn.Linear(3, 1)
        treatment.boundary(phase)
        with untouched(net[0]) if frozen else nullcontext():
            for _ in range(3):
                train_step(treatment, net(X).sum())
        assert [layer.name for layer in method.layers["net"]] == ["0", "2"][frozen:]
    if name == "cbp":  # the layer that was there all the time has its age, and its activations are seen
        assert [int(kept["age"].max()) for kept in method.memory["net"].values()] == [3, 9]
        net[2] = nn.Linear(3, 3)
        treatment.boundary(4)
        assert [int(kept["age"].max()) for kept in method.memory["net"].values()] == [3, 0]
    if name in ("cpr", "regrama"):
        treatment.optimizer.zero_grad()
        with pytest.raises(UserError, match="layer '0' has no gradient"):
            treatment.before_step()


def test_nap_knows_the_norm_of_a_layer_that_was_frozen_at_the_start():
    net = tiny()
    norm = net[0].requires_grad_(False).weight.norm()
    nets = {"net": net, "frozen": tiny().requires_grad_(False)}
    treatment = attach("nap", nets, {"net": torch.optim.SGD(net.parameters(), lr=0.1)})
    for phase in (1, 2):
        treatment.boundary(phase)
        train_step(treatment, net(X).sum())
        net[0].requires_grad_(True)
    torch.testing.assert_close(net[0].weight.norm(), norm)


def test_weight_clipping_leaves_frozen_weights_and_norms_and_knows_transposed_ones():
    """Four inputs: s = 1/2, so factor 3 clips to 1.5, the bias too. A kernel of 1 x 4 inputs has the same s."""
    net = nn.Sequential(nn.Linear(4, 1), nn.Conv2d(1, 1, 2), nn.LayerNorm(4))
    for layer in net:
        nn.init.constant_(layer.weight, 7.0), nn.init.constant_(layer.bias, -9.0)
    net[1].requires_grad_(False)
    method, state = create("weight_clipping", factor=3.0), tiny_nets.state_of(net)
    method.after_step(state)
    assert net[0].weight.tolist() == [[1.5] * 4] and net[0].bias.tolist() == [-1.5]
    assert (net[1].weight == 7.0).all() and (net[2].weight == 7.0).all() and (net[2].bias == -9.0).all()
    upwards = nn.ConvTranspose2d(8, 4, 2)  # torch draws from 1 / sqrt(4 outputs * 4 taps)
    before = upwards.weight.clone()
    clip_weights(upwards, 1.0001, find_weights(upwards, "all"))
    assert torch.equal(upwards.weight, before) and upwards.weight.abs().max() > 0.2


def test_the_tortoise_has_running_statistics_of_its_own_and_the_counts_of_the_hare():
    net = nn.BatchNorm1d(1)
    state, method = tiny_nets.state_of(net), create("hare_tortoise", momentum=0.5, period=100)
    for mean in (0.0, 4.0):
        net.running_mean.fill_(mean), net.num_batches_tracked.add_(1)
        method.after_step(state)
    method.before_evaluation(state)
    assert net.running_mean.item() == 2.0 and net.num_batches_tracked.item() == 2
    method.after_evaluation(state)
    assert net.running_mean.item() == 4.0
    half, method = nn.Sequential(linear([[1.0]])).bfloat16(), create("hare_tortoise")
    for value in (1.0, 2.0):  # a step of .001 is below the precision of bfloat16
        half[0].weight.data.fill_(value)
        method.after_step(tiny_nets.state_of(half))
    assert method.tortoise["net"]["0.weight"].item() == pytest.approx(1.001)


def test_the_tortoise_starts_again_where_a_layer_is_replaced_or_added():
    net = nn.Sequential(nn.Sequential(linear([[1.0]])), nn.Sequential(linear([[1.0]])))
    state, method = tiny_nets.state_of(net), create("hare_tortoise", momentum=0.5)
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


@pytest.mark.parametrize("name", ["upgd", "muon"])
def test_an_optimizer_with_two_learning_rates_is_not_replaced_by_one_with_one(name):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.001}]
    adam = torch.optim.Adam(groups, lr=0.01, eps=1e-5)
    with pytest.raises(UserError, match=r"yours have \[0\.001, 0\.01\]"):
        attach(create(name, rate_factor=3.0), net, adam)
    adam.param_groups[1]["lr"] = 0.01
    treatment = attach(create(name, rate_factor=3.0), net, adam)
    adam.param_groups[1]["maximize"] = True
    with pytest.raises(UserError, match="which minimises: negate the loss"):
        treatment.boundary(1)
    assert treatment.optimizer is adam
    adam.param_groups[1]["maximize"] = False
    treatment.boundary(1)
    first, last = treatment.optimizer.param_groups[0], treatment.optimizer.param_groups[-1]
    assert (first["lr"], first["rate_factor"], last["eps"]) == (pytest.approx(0.03), 3.0, 1e-5)
    assert treatment.optimizer._optimizer_step_post_hooks is adam._optimizer_step_post_hooks


def test_l2_er_keeps_the_inputs_of_training_steps_of_its_own_nets_alone():
    def body(inputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(inputs, 4), nn.ReLU(), nn.Linear(4, 2))

    nets = {"a": body(3), "b": body(5)}
    x = {name: torch.randn(6, net[0].in_features) for name, net in nets.items()}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
    method = create("l2_er", every_steps=3)
    treatment = attach(method, nets, optimizers, batches=lambda: iter([(x, None)]))
    treatment.boundary(1)
    start = copy.deepcopy(treatment.state_dict())

    def train(skipped: bool = False) -> dict[str, int]:
        with treatment.evaluating():
            nets["a"](x["a"])  # in training mode
        for name, net in nets.items():
            net(x[name]), copy.deepcopy(net)(x[name])
            with torch.no_grad():
                net(x[name])
        treatment.before_step()
        treatment.after_step(skipped=skipped)
        return {name: len(inputs.kept) for name, inputs in method.recorders.items()}

    assert [train(), train(skipped=True), train()] == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 2}]
    assert train() == {"a": 0, "b": 0}, "each net has made its rank step"
    train()
    treatment.load_state_dict(start)
    assert train() == {"a": 1, "b": 1}
    treatment.boundary(2)
    assert train() == {"a": 2, "b": 2}, "a boundary loses none"
    treatment.load_state_dict(start)
    treatment.state.nets["a"] = nets["a"] = body(3)
    assert [train()["a"], train()["a"]] == [0, 1], "the new net is known from its first step on"
