"""keep, clear, clear_changed: what the optimizer remembers afterwards."""

import pytest
import torch
from torch import nn

from fire_core import UserError, fire, reset_optimizer_state

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.1),
}
if not hasattr(torch.optim, "Muon"):  # torch below 2.9
    del OPTIMIZERS["muon"]


def trained(make):
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = make(list(net.parameters()))
    inputs = torch.randn(8, 4)
    for _ in range(3):
        optimizer.zero_grad()
        net(inputs).square().sum().backward()
        optimizer.step()
    return net, optimizer, inputs


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_cleared_state_equals_a_new_optimizer(name):
    net, optimizer, inputs = trained(OPTIMIZERS[name])
    twin = nn.Linear(4, 3)
    twin.load_state_dict(net.state_dict())
    fresh = OPTIMIZERS[name](list(twin.parameters()))
    identity = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert reset_optimizer_state(optimizer, "clear") == len(identity)
    for model, opt in ((net, optimizer), (twin, fresh)):
        opt.zero_grad()
        model(inputs).square().sum().backward()
        opt.step()
    assert torch.equal(net.weight, twin.weight) and torch.equal(net.bias, twin.bias)
    assert identity == [id(p) for g in optimizer.param_groups for p in g["params"]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_keep_and_clear_changed(name):
    net, optimizer, _ = trained(OPTIMIZERS[name])
    held = len(optimizer.state)
    assert reset_optimizer_state({"a": optimizer}, "keep", [net.weight]) == 0 and len(optimizer.state) == held
    second = OPTIMIZERS["sgd"](list(net.parameters()))
    second.step()
    assert reset_optimizer_state({"a": optimizer, "b": second}, "clear_changed", [net.weight]) == 2
    assert net.weight not in optimizer.state and len(optimizer.state) == held - 1


def test_lbfgs_forgets_all_its_steps_if_any_of_its_parameters_changed():
    net = nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(net.parameters())  # keeps its memory with the weight
    optimizer.step(lambda: net(torch.ones(2, 4)).square().sum())
    assert reset_optimizer_state(optimizer, "clear_changed", net.bias) == 1 and not optimizer.state


def test_names_instead_of_parameters_are_refused():
    _, optimizer, _ = trained(OPTIMIZERS["adam"])
    with pytest.raises(UserError, match=r"changed holds 'weight'.*give the report"):
        reset_optimizer_state(optimizer, "clear_changed", {"weight"})


def test_float32_copies_of_half_precision_weights_are_not_missed():
    """An optimizer over copies would bring the old weights back at its next step."""
    torch.manual_seed(0)
    net = nn.Linear(6, 4).bfloat16()
    copies = [p.detach().float().requires_grad_() for p in net.parameters()]
    optimizer = torch.optim.Adam(copies, lr=1e-9)

    def step() -> None:
        for copy in copies:
            copy.grad = torch.ones_like(copy)
        optimizer.step()
        with torch.no_grad():
            for parameter, copy in zip(net.parameters(), copies, strict=True):
                parameter.copy_(copy)

    step()
    report = fire(net, solver="exact")
    treated = net.weight.detach().clone()
    for policy in ("keep", "clear_changed"):
        with pytest.raises(UserError, match=r"1 changed parameters.*bfloat16.*masters="):
            reset_optimizer_state(optimizer, policy, report)
    masters = zip(net.parameters(), copies)
    assert reset_optimizer_state(optimizer, "clear_changed", report, masters=masters) == 1
    step()
    assert torch.equal(net.weight, treated)
