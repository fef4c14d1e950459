"""The units' tools: any net's layers, the entries of their weights, and fresh ones."""

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from fire_core import UserError
from fire_core.measure.dormancy import dormancy, relative_to_layer
from fire_core.methods._units import gradient_scores
from fire_core.units import LAWS, draw, find_unit_layers, incoming, outgoing, recycle
from rl.sac.network import linear
from tests.tiny_nets import Net, hooks


def joined(net, x):
    image = torch.relu(net.norm(net.conv(x))).permute(0, 2, 3, 1).flatten(1)
    return net.out(torch.cat([torch.relu(net.side(x.flatten(1))), image], dim=1))


def test_joined_layers_know_their_columns():
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(1, 3, 1), "norm": nn.BatchNorm2d(3), "side": nn.Linear(4, 2)}
    net, x = Net(joined, **layers, out=nn.Linear(14, 5)), torch.randn(8, 1, 2, 2)
    layers, reasons = find_unit_layers(net, x)
    assert reasons == {"out": "feeds the output"}
    columns = {layer.name: layer.columns_in("out").tolist() for layer in layers}
    assert columns == {"side": [[0], [1]], "conv": [[2 + i, 5 + i, 8 + i, 11 + i] for i in range(3)]}
    conv = next(layer for layer in layers if layer.name == "conv")
    expected = relative_to_layer(torch.relu(net.eval().norm(net.conv(x))).detach().mean((0, 2, 3)))
    torch.testing.assert_close(dormancy(net, x.split(3))["conv"], expected)
    before = net.out.weight.detach().clone()
    nn.init.constant_(net.norm.weight, 2.0)
    assert recycle(net, conv, torch.tensor([1]), generator=torch.Generator()) == 1
    assert (net.out.weight == before).all(dim=0).tolist() == [i not in (3, 6, 9, 12) for i in range(14)]
    side = next(layer for layer in layers if layer.name == "side")
    recycle(net, side, torch.tensor([0]), generator=torch.Generator())
    empty = (net.out.weight == 0).all(dim=0)
    assert empty.tolist() == [i in (0, 3, 6, 9, 12) for i in range(14)]  # of side, one column
    assert (net.out.weight[:, 3] == 0).all() and net.norm.weight.tolist() == [2.0, 1.0, 2.0]


def test_entries_are_read_and_written_unit_by_unit():
    net = nn.Sequential(linear(3, 4, 2, nn.init.normal_), nn.ReLU(), linear(4, 1, 2, nn.init.normal_))
    nn.init.normal_(net[0].bias)
    (layer,), _ = find_unit_layers(net, torch.randn(2, 5, 3))
    assert layer.units == 8 and layer.outgoing == (("2", 1),)
    net(torch.ones(2, 5, 3)).square().sum().backward()
    means = net[0].weight.grad.abs().mean(dim=-1).flatten()
    torch.testing.assert_close(gradient_scores(net, layer), means / (means.mean() + 1e-8))
    weight, bias = incoming(net, layer)
    (read,) = outgoing(net, layer)
    assert (weight.name, bias.name, read.name) == ("0.weight", "0.bias", "2.weight")
    assert torch.equal(weight.read(), net[0].weight.flatten(0, 1)) and bias.read().shape == (8,)
    assert torch.equal(read.read()[:, 0, 0], net[2].weight.flatten())
    read.write(7.0, chosen=torch.tensor([5]))
    assert (net[2].weight.flatten() == 7).tolist() == [i == 5 for i in range(8)]
    moments = torch.zeros_like(net[0].weight)
    weight.write(torch.ones(8, 3), moments)
    assert (moments == 1).all() and not (net[0].weight == 1).any()
    assert dormancy(net, [torch.randn(2, 5, 3)])["0"].shape == (8,)
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.state[net[0].weight] = {
        "master": (master := net[0].weight.detach().double()),
        "moment": moments,
    }
    recycle(
        net, layer, torch.tensor([6]), generator=torch.Generator(), law="he_uniform", optimizers=[optimizer]
    )
    assert net[2].weight[1, 0, 2] == 0 and net[0].bias[1, 2] == 0
    assert torch.equal(master.float(), net[0].weight) and (moments[1, 2] == 0).all() and moments.sum() == 21


@pytest.mark.parametrize("law", LAWS)
def test_laws_have_their_spread(law):
    values, bound = draw(law, (2000, 50), torch.Generator().manual_seed(0)), LAWS[law] * 50**-0.5
    assert float(values.std()) == pytest.approx(bound / 3**0.5, rel=0.02) and values.abs().max() <= bound
    with pytest.raises(UserError, match="law='xavier'"):
        draw("xavier", (2, 2), torch.Generator())


def test_gated_units():
    layers = {"gate": nn.Linear(4, 6), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}
    block = Net(lambda net, x: x + net.down(silu(net.gate(x)) * net.up(x)), **layers)
    net, x = nn.Sequential(block, nn.Linear(4, 2)), torch.randn(64, 5, 4)
    layers, _ = find_unit_layers(net, x)
    assert [(u.incoming, u.outgoing, u.units) for u in layers] == [(("0.gate", "0.up"), (("0.down", 1),), 6)]
    hidden = (silu(net[0].gate(x)) * net[0].up(x)).abs().mean(dim=(0, 1))
    torch.testing.assert_close(dormancy(net, [x])["0.gate"], (hidden / hidden.mean()).detach())
    recycle(net, layers[0], torch.tensor([2]), generator=torch.Generator().manual_seed(0))
    assert (net[0].down.weight[:, 2] == 0).all() and net[0].gate.bias[2] == 0 and net[0].up.bias[2] == 0
    compiled, start = torch.compile(net), {name: p + 1 for name, p in net.state_dict().items()}
    layer = find_unit_layers(compiled, x)[0][0]
    recycle(compiled, layer, torch.tensor([3]), generator=torch.Generator(), initial=start)
    assert torch.equal(net[0].gate.weight[3], start["0.gate.weight"][3])


def shared(net, x):
    """A residual sum, a layer used twice, sorted units, two layers before one."""
    x = net.stem(x)
    x = x + net.twice(torch.relu(net.twice(x)))
    out = net.out(torch.cat([x, net.side(x).sort(dim=1).values], dim=1))
    return out, net.head(net.left(x).relu()), net.head(net.right(x).relu())


def test_units_without_an_owner_are_left_out_with_a_reason():
    layers = {name: nn.Linear(4, 4) for name in ("stem", "twice", "side", "left", "right", "head")}
    net = Net(shared, **layers, out=nn.Linear(8, 2))
    net.side.weight.requires_grad_(False)
    layers, reasons = find_unit_layers(net, torch.randn(2, 4))
    assert layers == [] and set(reasons) == {"stem", "twice", "side", "left", "right", "head", "out"}
    assert reasons["left"] == reasons["right"] == "goes through head, which runs several times"
    assert "added" in reasons["stem"] and "2 times" in reasons["twice"] and "output" in reasons["out"]
    assert not net.side.weight.requires_grad and net.training and hooks(net) == 0
