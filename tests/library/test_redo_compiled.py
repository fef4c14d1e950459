"""ReDo where training is compiled: activations are outputs of one graph, which is kept from check to check."""

from functools import partial

import pytest
import torch
from torch import nn

from fire_core.methods.redo import dormancy
from fire_core.units import find_unit_layers


@pytest.fixture
def traced(monkeypatch):
    """torch.compile without a compiler behind it, and with fresh counters."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


def test_compiled_scores_are_those_of_the_plain_pass_from_one_graph_without_a_break(traced) -> None:
    net = build()
    train = torch.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    layers, _ = find_unit_layers(net, torch.randn(8, 1, 6, 6))
    graphs = []
    for _ in range(3):
        for _ in range(2):
            optimizer.zero_grad()
            train(torch.randn(8, 1, 6, 6)).square().sum().backward()
            optimizer.step()
        inputs = [torch.randn(8, 1, 6, 6), torch.randn(8, 1, 6, 6)]
        plain, compiled = (dormancy(net, inputs, layers, compiled=how) for how in (False, True))
        assert plain.keys() == compiled.keys() and len(plain) == 3
        assert all(torch.equal(plain[name], compiled[name]) for name in plain)
        graphs.append(traced["stats"]["unique_graphs"])
    assert graphs == [2, 2, 2]  # the training pass and this one
    assert not traced["graph_break"]
