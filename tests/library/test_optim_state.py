"""keep, clear, clear_changed: what the optimizer remembers afterwards."""

import pytest
import torch
from torch import nn

from fire_core import UserError, attach, fire, reset_optimizer_state
from fire_core.methods import create
from fire_core.optim_state import copies_follow
from fire_core.units import find_unit_layers, recycle
from tests.tiny_nets import untouched


def train(net, optimizer, steps=3):
    inputs = torch.linspace(-1, 1, 32).sin().view(8, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        net(inputs).square().sum().backward()
        optimizer.step()


def trained(make):
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = make(list(net.parameters()))
    train(net, optimizer)
    return net, optimizer


def test_float32_copies_of_half_precision_weights_are_not_missed():
    torch.manual_seed(0)
    net = nn.Linear(6, 4).bfloat16()
    copies = [p.detach().float().requires_grad_() for p in net.parameters()]
    optimizer = torch.optim.Adam(copies, lr=1e-9)

    def step() -> None:
        for copy in copies:
            copy.grad = torch.ones_like(copy)
        optimizer.step()
        for parameter, copy in zip(net.parameters(), copies, strict=True):
            parameter.data.copy_(copy)

    step()
    report, treated = fire(net, solver="exact"), net.weight.detach().clone()
    for policy in ("keep", "clear_changed"):
        with pytest.raises(UserError, match=r"1 changed parameters.*bfloat16.*into the copies"):
            reset_optimizer_state(optimizer, policy, report)
    with torch.no_grad():
        copies[0].copy_(net.weight)
    assert reset_optimizer_state(optimizer, "clear_changed", copies[0]) == 1
    step()
    assert torch.equal(net.weight, treated)


class Toy(torch.optim.Optimizer):
    """An optimizer that remembers where its `update` of a group says."""

    def __init__(self, params, **defaults):
        super().__init__(params, dict(lr=0.1) | defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            self.update(group)


class GroupStepAdam(Toy):
    """Counts steps in its group, as apex's FusedAdam does (issues 1615 of apex, 857 of sd-scripts)."""

    def update(self, group):
        group["step"] = group["step"] + 1 if "step" in group else 1
        for p in group["params"]:
            moments = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
            moments.lerp_(p.grad, 0.1)
            p.sub_(group["lr"] * moments / (1 - 0.9 ** group["step"]))


class Lookahead(torch.optim.Optimizer):
    """Slow weights in an attribute, a counter in the groups, another optimizer inside (mgrankin/over9000)."""

    def __init__(self, base):
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups = base, base.param_groups
        self.slow = [[p.clone().detach() for p in group["params"]] for group in self.param_groups]
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self):
        self.base.step()
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            group["counter"] += 1
            if group["counter"] % 2 == 0:
                for p, q in zip(group["params"], slow, strict=True):
                    q.lerp_(p, 0.5)
                    p.copy_(q)


class SAM(Toy):
    """Shares nothing but the groups with the optimizer inside (issue 73 of davda54/sam)."""

    def __init__(self, params):
        super().__init__(params, rho=0.05)
        self.base_optimizer = torch.optim.Adam(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    def update(self, group):
        for p in group["params"]:
            self.state[p]["old_p"] = p.data.clone()
        self.base_optimizer.step()


class AveragingFree(Toy):
    """As Schedule-Free: counters in the defaults, z in the state (issue 39 of schedule_free)."""

    def __init__(self, params):
        super().__init__(params, k=0, weight_sum=0.0)

    def update(self, group):
        group["weight_sum"] = group["weight_sum"] + 1.0
        for y in group["params"]:
            z = self.state[y].setdefault("z", y.clone())
            z.sub_(group["lr"] * y.grad)
            y.lerp_(z, 1 / group["weight_sum"])
        group["k"] = group["k"] + 1


class Masters(Toy):
    """Float32 copies inside, although the bfloat16 parameters are listed (issue 1731 of apex)."""

    def __init__(self, params):
        super().__init__(params)
        self.masters = {}

    def update(self, group):
        for _, w in enumerate(group["params"]):
            w.copy_(self.masters.setdefault(w, w.to(torch.float32, copy=True)).sub_(group["lr"] * w.grad))


class Wide(Toy):
    """A float32 momentum that begins at 0, a count and a setting, in a state that is filled before the first step."""

    def __init__(self, params):
        super().__init__(params)
        for p in params:
            state = self.state[p]
            state["m"], state["k"], state["rate"] = torch.zeros_like(p).float(), 0, 0.5
        self.state[params[0]]["rate"] = 0.25

    def update(self, group):
        for p in group["params"]:
            (state := self.state[p])["k"] += 1
            p.sub_(state["rate"] * group["lr"] / state["k"] * state["m"].add_(p.grad))


class Anchored(Toy):
    """Weights are computed from the first ones, as in MADGRAD."""

    def update(self, group):
        for p in group["params"]:
            p.copy_(self.state[p].setdefault("x0", p.clone()) - group["lr"] * p.grad)


class SharedCounter(Toy):
    """Its counter lies in the state, beside the parameters, as k of pytorch_optimizer's MADGRAD."""

    def update(self, group):
        k = self.state.setdefault("k", torch.tensor([0]))
        for p in group["params"]:
            total = self.state[p].setdefault("s", torch.zeros_like(p)).add_(p.grad)
            p.sub_(group["lr"] * total / (1 + k))
        k.add_(1)


class Stacked(Toy):
    """One momentum for all weights of a group, and a scalar that every step fills, as MuonAdamW of nanochat."""

    def __init__(self, params):
        super().__init__(params)
        self.rate = torch.tensor(0.0)

    def update(self, group):
        self.rate.fill_(group["lr"])
        new = torch.stack([p.grad for p in group["params"]])
        momentum = self.state[group["params"][0]].setdefault("m", torch.zeros_like(new)).add_(new)
        torch._foreach_sub_(group["params"], [*(self.rate * momentum)])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1), "shared_counter": SharedCounter,
    "group_step": GroupStepAdam, "lookahead": lambda p: Lookahead(torch.optim.Adam(p, lr=0.1)), "sam": SAM,
    "averaging": AveragingFree, "masters": Masters, "wide": Wide,
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.5, initial_accumulator_value=0.3),
    "rprop": torch.optim.Rprop,
}  # fmt: skip
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on
    OPTIMIZERS["muon"] = lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.1)


@pytest.mark.parametrize("policy", ["clear", "clear_changed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_cleared_optimizer_steps_as_a_new_one(name, policy):
    net, optimizer = trained(OPTIMIZERS[name])
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with torch.no_grad():
        for parameter in owned:
            parameter.mul_(-2.0)
    twin = nn.Linear(4, 3)
    twin.load_state_dict(net.state_dict())
    fresh = OPTIMIZERS[name](list(twin.parameters()))
    assert reset_optimizer_state(optimizer, policy, owned) == (0 if name == "masters" else len(owned))
    assert all(p is q for p, q in zip(owned, (p for g in optimizer.param_groups for p in g["params"])))
    train(net, optimizer), train(twin, fresh)
    assert torch.equal(net.weight, twin.weight) and torch.equal(net.bias, twin.bias)


@pytest.mark.parametrize("name", ["lookahead", "averaging", "masters"])
def test_keep_does_not_bring_old_weights_back_through_copies(name):
    net, optimizer = trained(OPTIMIZERS[name])
    with torch.no_grad():
        net.weight.mul_(-2.0)
    new = net.weight.detach().clone()
    with pytest.raises(UserError, match=r"keep.*copies of weights.*report"):
        reset_optimizer_state(optimizer, "keep")
    assert reset_optimizer_state(optimizer, "keep", net.weight) == 0
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(net, optimizer)
    torch.testing.assert_close(net.weight.detach(), new)
    assert reset_optimizer_state(trained(Wide)[1], "keep") == 0  # a momentum is no copy


def test_copies_take_the_replaced_units_alone():
    net, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(8, 4)
    net[0].bias.data[:2] = -9.0
    train(net, optimizer := Masters(list(net.parameters())), 1)
    kept = optimizer.masters[net[0].weight].add_(1e-6).clone()  # steps that are too small for the weights
    treatment = attach("redo", net, optimizer, batches=lambda: [(x, None)])
    treatment.boundary(1), treatment.after_pass()
    copy, replaced = optimizer.masters[net[0].weight], treatment.method.counts["recycled"]
    assert replaced == 2 and torch.equal(copy[:2], net[0].weight[:2]) and torch.equal(copy[2:], kept[2:])


@pytest.mark.parametrize("name, given", [("nap", {}), ("adamo", {}), ("weight_clipping", {"factor": 0.1})])
def test_copies_follow_what_a_method_changes_in_a_step(name, given):
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    treatment = attach(create(name, first_phase=0, **given), net, optimizer := Masters([*net.parameters()]))
    train(net, optimizer, 1)
    before = [p.detach().clone() for p in net.parameters()]
    treatment.before_step(), treatment.after_step()
    assert not all(map(torch.equal, before, net.parameters()))
    assert all(torch.equal(p, optimizer.masters[p]) for p in net.parameters())
    plain, optimizer = trained(OPTIMIZERS["lookahead"])
    before = [slow.clone() for slow in optimizer.slow[0]]
    with copies_follow([optimizer], masters=True):
        plain.weight.data.mul_(2.0)
    assert all(map(torch.equal, before, optimizer.slow[0]))


def test_moments_of_8_bits_are_an_error_before_anything_changes():
    net, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.zeros(1, 4)
    ((layer,), _), optimizer = find_unit_layers(net, x), torch.optim.SGD(net.parameters())
    optimizer.state[net[2].weight]["m"] = torch.zeros(2, 6).byte()
    with untouched(net), pytest.raises(UserError, match="moments of 8 bits cannot be cleared"):
        recycle(net, layer, torch.tensor([1]), generator=torch.Generator(), optimizers=[optimizer])


def test_what_a_cuda_graph_may_hold_is_cleared_in_place():
    optimizer = torch.optim.NAdam([weight := nn.Parameter(torch.ones(3))], capturable=True)
    held = {"step": torch.tensor(3.0), "exp_avg": torch.ones(3), "mu_product": torch.tensor(0.5)}
    optimizer.state[weight] = held
    assert reset_optimizer_state(optimizer, "clear") == 1 and optimizer.state[weight].keys() == held.keys()
    assert all(optimizer.state[weight][key] is value for key, value in held.items())
    assert [value.sum().item() for value in held.values()] == [0.0, 0.0, 1.0]


def test_memory_that_cannot_be_told_is_an_error_before_anything_is_written():
    net, optimizer = trained(OPTIMIZERS["sgd"])
    optimizer.buffers = [torch.zeros(3)]
    with pytest.raises(UserError, match="SGD keeps 1 tensors in its attribute 'buffers'"):
        reset_optimizer_state(optimizer, "clear", net.weight)

    class Masked(Wide):
        def __init__(self, params):
            super().__init__(params)
            for p in params:
                self.state[p]["mask"] = (p.clone() != 0).float()

    with pytest.raises(UserError, match="Masked keeps 'mask'"):
        attach("fire", net, trained(Masked)[1])  # where it would not come too late
    net, optimizer = trained(Anchored)
    with pytest.raises(UserError, match=r"'x0'.*choose clear"):
        reset_optimizer_state(optimizer, "keep", net.weight)
    assert len(optimizer.state) == 2 and reset_optimizer_state(optimizer, "clear", net.weight) == 2
    with pytest.raises(UserError, match=r"changed holds 'weight'.*give the report"):
        reset_optimizer_state(optimizer, "clear_changed", {"weight"})


class Helped(Toy):
    """Counts in a helper that `__init__` and every step call; with `in_group`, in its group, from a value of its own."""

    def __init__(self, params, in_group=False):
        super().__init__(params)
        self.k, self.in_group = 0, in_group
        self.tick()

    def tick(self):
        self.k += 1
        for group in self.param_groups if self.in_group else ():
            group["scale"] = group.get("scale", 0.0) + 1.0

    def update(self, group):
        self.tick()
        for p in group["params"]:
            self.state[p].setdefault("m", torch.zeros_like(p)).add_(p.grad)


def test_what_a_helper_of_every_step_counts_does_not_stay():
    _, optimizer = trained(Helped)
    assert optimizer.k == 4 and reset_optimizer_state(optimizer, "clear") == 2 and optimizer.k == 0
    _, optimizer = trained(lambda p: Helped(p, in_group=True))
    with pytest.raises(UserError, match="Helped keeps 'scale'"):
        reset_optimizer_state(optimizer, "clear")


def test_memory_that_parameters_share_is_forgotten_if_any_of_them_changed():
    for make in (SharedCounter, GroupStepAdam):
        net, optimizer = trained(make)
        assert reset_optimizer_state(optimizer, "clear_changed", net.weight) == 2 and not optimizer.state
        assert "step" not in optimizer.param_groups[0]
    pair = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    x = torch.ones(2, 3)
    for groups in ([*pair.parameters()], [{"params": [p]} for p in pair.parameters()]):
        optimizer = Stacked(groups)
        pair(x).sum().backward(), optimizer.step()
        redo = attach(create("redo", threshold=9.0, first_phase=0), pair, optimizer, batches=lambda: [(x, x)])
        with untouched(pair), pytest.raises(UserError, match="cannot be cleared in part"):
            redo.after_pass()
        assert reset_optimizer_state(optimizer, "clear_changed", pair[2].weight) == 1
    net = nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(net.parameters())  # keeps its memory with the weight
    optimizer.step(lambda: net(torch.ones(2, 4)).square().sum())
    assert reset_optimizer_state(optimizer, "clear_changed", net.bias) == 1 and not optimizer.state
