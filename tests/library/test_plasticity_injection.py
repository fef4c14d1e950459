"""Plasticity injection by hand: nothing changes at the boundary, only the new head learns, a resume rebuilds it."""

import copy

import pytest
import torch
from torch import nn

from fire_core import UserError, attach
from fire_core.methods import create
from fire_core.methods.plasticity_injection import inject
from fire_core.state import snapshot
from tests.tiny_nets import Net, replica, state_of


def head():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def new_net():
    return Net(lambda net, x: net.head(net.encoder(x).relu()), encoder=nn.Linear(3, 4), head=head())


def trained_state():
    torch.manual_seed(0)
    net, target = new_net(), new_net()
    state = state_of(net)
    state.followers = [(target, net)]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter))
    target.load_state_dict(net.state_dict())
    return state, net, target


def test_a_tied_head_leaves_the_embedding_in_training():
    net = nn.ModuleDict({"table": nn.Embedding(3, 4), "head": nn.Linear(4, 3, bias=False)})
    net["head"].weight = net["table"].weight
    inject(net, snapshot({"net": net})["net"])
    assert net["table"].weight.requires_grad and not net["head"].old.weight.requires_grad
    assert net["head"](input=torch.ones(1, 4)).shape == (1, 3)


def test_a_compiled_net_is_injected_as_a_bare_one_and_a_replica_is_refused():
    _, net, _ = trained_state()
    with pytest.raises(UserError, match="wrap the net afterwards"):
        inject(replica(net), net.state_dict())
    report = inject(torch.compile(net), net.state_dict())
    assert report.changed == {f"head.new.{name}" for name, _ in net.head.new.named_parameters()}


def test_predictions_do_not_change_and_only_the_new_head_and_the_encoder_learn():
    state, net, target = trained_state()
    x = torch.randn(6, 3)
    before, old_head = net(x), copy.deepcopy(net.head)
    report = create("plasticity_injection").boundary(state)
    state.copy_followers()
    torch.testing.assert_close(net(x), before, rtol=0, atol=1e-6)
    torch.testing.assert_close(target(x), before, rtol=0, atol=1e-6)
    trainable = {name for name, p in net.named_parameters() if p.requires_grad}
    learning = ("encoder", "head.new.0", "head.new.2")
    assert trainable == {f"{module}.{k}" for module in learning for k in ("weight", "bias")}
    assert report.changed == {f"net.{name}" for name in trainable if name.startswith("head")}
    net(x).square().sum().backward()
    torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1).step()
    hidden, start = net.encoder(x).relu(), head()
    start.load_state_dict(
        {k.removeprefix("head."): v for k, v in state.initial["net"].items() if "head" in k}
    )
    by_hand = old_head(hidden) + net.head.new(hidden) - start(hidden)
    torch.testing.assert_close(net(x), by_hand, rtol=1e-5, atol=1e-5)
    assert not torch.equal(net.head.new[0].weight, start[0].weight)


@pytest.mark.parametrize("boundaries, first_phase", [(1, 1), (2, 1), (2, 2)])
def test_a_rebuilt_net_takes_the_checkpoint_of_an_injected_one(boundaries, first_phase):
    def attached(net, target):
        method = create("plasticity_injection", first_phase=first_phase)
        return attach(method, net, torch.optim.Adam(net.parameters()), followers=[(target, net)])

    _, net, target = trained_state()
    treatment = attached(net, target)
    for phase in range(1, boundaries + 1):
        treatment.boundary(phase)
    fresh, other = new_net(), new_net()
    attached(fresh, other).load_state_dict(treatment.state_dict())
    other.load_state_dict(target.state_dict())
    x = torch.randn(4, 3)
    assert torch.equal(fresh(x), net(x))
    assert [p.requires_grad for p in fresh.parameters()] == [p.requires_grad for p in net.parameters()]


def test_heads_with_two_outputs_are_combined_entry_by_entry():
    pair = Net(lambda net, x: (net.mean(x), net.spread(x)), mean=nn.Linear(3, 2), spread=nn.Linear(3, 2))
    net, x = nn.ModuleDict({"head": pair}), torch.randn(5, 3)
    before = net.head(x)
    create("plasticity_injection").boundary(state_of(net))
    torch.testing.assert_close(net.head(x), before)
