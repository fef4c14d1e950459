"""Metrics against answers known by hand or by closed form."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu

from fire_core.errors import UserError
from fire_core.measure import metrics
from fire_core.measure.dormancy import dormancy_of, relative_to_layer
from fire_core.measure.plasticity import curvature, plasticity
from tests.tiny_nets import Net, untouched


def test_distances_and_ranks_by_hand():
    tall, dfi = torch.linalg.qr(torch.randn(7, 3, dtype=torch.float64))[0], metrics.deviation_from_isometry
    assert dfi(tall) < 1e-25 and dfi(tall.T) < 1e-25
    with torch.autocast("cpu", torch.bfloat16):
        assert dfi(tall.float()) < 1e-9
    assert dfi(2 * tall).item() == pytest.approx(27.0)  # 3 * (4 - 1)^2
    w = torch.tensor([[1.0, 1.0], [0.0, 1.0]])  # W^T W = [[1, 1], [1, 2]], minus I: [[0, 1], [1, 1]]
    assert dfi(torch.stack([w, torch.eye(2)])).tolist() == [3.0, 0.0]
    before, after, initial = torch.tensor([[3.0]]), torch.tensor([[2.0]]), torch.tensor([[1.0]])
    assert metrics.relative_squared_error(before, after, initial).item() == 0.25
    assert metrics.relative_squared_error(before, after, before).isnan()
    assert relative_to_layer(torch.tensor([2.0, 0.0, 2.0])).tolist() == pytest.approx([1.5, 0.0, 1.5])
    assert relative_to_layer(torch.zeros(4)).tolist() == [0.0] * 4
    # shares 1/2, 1/4, 1/4: entropy 1.5 ln 2
    assert metrics.effective_rank(torch.tensor([2.0, 1.0, 1.0])).item() == pytest.approx(2**1.5, rel=1e-6)
    assert metrics.effective_rank(torch.zeros(3), 1e-8) == 1
    features = torch.diag(torch.tensor([50.0, 49.0, 1.0, 0.0]))
    ranks = [metrics.feature_rank(features, delta=delta).item() for delta in (0.01, 0.005)]
    assert ranks == [2, 3] and metrics.feature_rank(torch.zeros(4, 3)) == 0  # 99 of 100 reached after two
    with pytest.raises(UserError, match="diverged"):
        metrics.feature_rank(features / 0)


def test_curvature_of_a_net_equals_the_full_hessian_and_leaves_the_net_alone():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    net.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    inputs, labels = torch.randn(16, 3, dtype=torch.float64), torch.randint(2, (16,))

    def loss_of(flat: torch.Tensor) -> torch.Tensor:
        pieces = flat.split([p.numel() for p in net.parameters()])
        weights = {name: x.view_as(p) for (name, p), x in zip(net.named_parameters(), pieces, strict=True)}
        return cross_entropy(torch.func.functional_call(deepcopy(net), weights, (inputs,)), labels)

    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    full, draw = torch.autograd.functional.hessian(loss_of, flat), torch.Generator().manual_seed(0)
    with untouched(net), torch.no_grad():
        found = curvature(net, inputs, labels, cross_entropy, generator=draw, iterations=300)
    assert found == pytest.approx(torch.linalg.eigvalsh(full).abs().max().item(), rel=1e-6)
    assert all(p.grad is None for p in net.parameters())


def silence(layer: nn.Module, units: int) -> None:
    """On positive inputs, the first units never fire."""
    with torch.no_grad():
        layer.weight.fill_(0.5), layer.bias.zero_()
        layer.weight[:units] = -1.0


@pytest.mark.parametrize("layer, shape", [(nn.Conv1d(3, 4, 1), (2, 3, 6)), (nn.Linear(3, 4), (2, 6, 3))])
def test_dormant_units_are_counted_along_their_own_dimension(layer, shape):
    silence(layer, 1)
    assert plasticity(nn.Sequential(layer, nn.ReLU()), torch.ones(shape))["dormant_share"] == 0.25


def test_what_is_scored_is_what_the_next_layer_reads():
    net = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    inputs = torch.randn(5, 1, 4, 4)
    (scores,), unmeasured, _ = dormancy_of(net, inputs)
    assert unmeasured == 0
    assert torch.allclose(scores, relative_to_layer(net[:3](inputs).abs().mean((0, 2, 3))))


def test_plasticity_looks_at_what_is_trained():
    """A frozen layer with half its units dead, then a trained one with a quarter, whose output spans one direction."""
    hidden = [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()]
    net = nn.Sequential(*hidden, nn.Linear(4, 2), nn.Linear(2, 2))
    silence(net[0], 2), silence(net[2], 1)
    inputs = torch.rand(64, 3)
    assert plasticity(net, inputs)["dormant_share"] == pytest.approx(3 / 8)
    for frozen in (net[0], net[5]):
        frozen.requires_grad_(False)
    figures = plasticity(net, inputs)
    assert figures["dormant_share"] == pytest.approx(1 / 4)
    assert figures["feature_rank"] == 1  # of what net[4] reads, not net[5]
    trained = torch.cat([p.detach().flatten() for p in net.parameters() if p.requires_grad])
    assert figures["weight_norm"] == pytest.approx(float(trained.norm()))
    net.requires_grad_(False)
    with torch.inference_mode():
        assert plasticity(net, inputs)["dormant_share"] == pytest.approx(3 / 8)


def test_plasticity_leaves_out_what_a_net_does_not_define_and_modes_alone():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    net[0].eval()
    assert set(plasticity(net, torch.ones(2, 3))) == {"weight_norm"}  # no layer, so no units
    assert net.training and not net[0].training and net[1].training
    assert plasticity(nn.Sequential(nn.Flatten()), torch.ones(2, 3)) == {}


def net_of(function, **sizes):
    """A net with Linear layers of the given sizes; the first two units of each are silent."""
    torch.manual_seed(0)
    net = Net(function, **{name: nn.Linear(*size) for name, size in sizes.items()})
    with torch.no_grad():
        for layer in net.children():
            layer.weight[:2], layer.bias[:2] = 0.0, -8.0
    return net


ELEMENTWISE = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "where": lambda x: torch.where(x > 0, x, 0.0),
    "mask": lambda x: x * (x > 0), "clamp": lambda x: x.clamp(0, 6),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "relu6_": lambda x: nn.functional.relu6(x.clone(), inplace=True),
    "rms": lambda x: nn.functional.rms_norm(torch.relu(x), (8,)),
}  # fmt: skip
DENSE = {"a": (6, 8), "b": (8, 4), "c": (12, 3)}
SIZES = {"critic": {"b": (12, 1)}, "crelu": {"b": (16, 3)}, "densenet": DENSE, "fused_gate": {"a": (6, 16)}}
FOLLOWED = {  # forward passes of a net on an input and an action
    "critic": lambda net, x, action: net.b(torch.cat([net.a(x).relu(), action], dim=-1)),
    "crelu": lambda net, x, _: net.b(torch.cat([(z := net.a(x)).relu(), (-z).relu()], dim=-1)),
    "densenet": lambda net, x, _: net.c(torch.cat([h := net.a(x).relu(), net.b(h).relu()], dim=-1)),
    "shuffled": lambda net, x, _: net.b(net.a(x).relu().view(-1, 2, 4).mT.flatten(1).roll(3, dims=1)),
    "fused_gate": lambda net, x, _: net.b(silu((h := net.a(x).chunk(2, dim=-1))[0]) * h[1]),
}
FOLLOWED |= {kind: lambda net, x, _, f=f: net.b(f(net.a(x))) for kind, f in ELEMENTWISE.items()}


@pytest.mark.parametrize("kind", FOLLOWED)
def test_units_are_followed_to_their_reader(kind):
    net = net_of(FOLLOWED[kind], **{"a": (6, 8), "b": (8, 3)} | SIZES.get(kind, {}))
    figures = plasticity(net, (torch.randn(64, 6), 50 * torch.randn(64, 4)))
    dormant = {"crelu": 2 / 16, "densenet": 4 / 12}.get(kind, 2 / 8)
    assert figures["dormant_share"] == pytest.approx(dormant) and "unmeasured" not in figures


def buffer(net, x):
    h = torch.zeros(len(x), 12)
    h[:, :8] = net.a(x).relu()
    h[:, 8:] = net.b(h[:, :8]).relu()
    return net.c(h)


THREE = {"a": (6, 8), "b": (8, 8), "c": (8, 3)}
NOT_FOLLOWED = {  # what runs, its layers, the share that is dormant of what is measured, and how many are not measured
    "sort": (lambda net, x: net.c(net.b(net.a(x).relu()).relu().sort(-1).values), THREE, 2 / 8, 1),
    "mean": (lambda n, x: n.c(n.b(n.a(x).relu()).relu().view(-1, 4, 2).mean(-1)), THREE | {"c": (4, 3)}, 2 / 8, 1),
    "buffer": (buffer, DENSE, None, 2),
    "affine": (lambda net, x: net.b(2 * net.a(x) / 3 - 1).double(), {"a": (6, 8), "b": (8, 3)}, None, None),
}  # fmt: skip


@pytest.mark.parametrize("forward, layers, dormant, unmeasured", NOT_FOLLOWED.values(), ids=NOT_FOLLOWED)
def test_layers_that_cannot_be_measured_are_counted(forward, layers, dormant, unmeasured):
    figures = plasticity(net_of(forward, **layers), torch.randn(64, 6))
    assert (figures.get("dormant_share"), figures.get("unmeasured")) == (dormant, unmeasured)


def test_features_are_read_by_the_layer_that_runs_last():
    net = net_of(lambda net, x: net.out(torch.relu(net.b(net.a(x)))), out=(64, 4), a=(10, 64), b=(64, 64))
    with torch.no_grad():
        net.b.weight[8:], net.b.bias[8:] = 0.0, 0.0
    assert plasticity(net, torch.randn(200, 10))["feature_rank"] <= 8
