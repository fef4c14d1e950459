"""The dial between `none` and FIRE against the SVD, and the controls that change no weight."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from fire_core import attach, fire
from fire_core.methods import available, create, moments, table
from fire_core.methods._units import gradient_scores
from fire_core.methods.spectral_clip import spectral_clip
from fire_core.units import find_unit_layers
from rl.sac.network import Critics
from tests.polar_cases import gaussian
from tests.tiny_nets import untouched

SHAPES = {"tall": (12, 5), "wide": (5, 12), "square": (8, 8), "conv": (6, 4, 3, 3)}


def layer(kind: str) -> nn.Module:
    shape = SHAPES[kind]
    conv = nn.Conv2d(shape[1], shape[0], 3, bias=False)
    made = conv if kind == "conv" else nn.Linear(*shape[::-1], bias=False)
    made.weight.data = gaussian(*shape, seed=3)
    return made


def taps(weight: torch.Tensor) -> torch.Tensor:
    """The matrices of a weight, float64."""
    weight = weight.detach().double()
    return weight.flatten(2).movedim(2, 0) if weight.ndim == 4 else weight[None]


@pytest.mark.parametrize("unit", ["scale", "absolute"])
@pytest.mark.parametrize("low, high", [(0.5, 2.0), (0.0, 1.0), (0.9, math.inf), (0.3, 0.3)])
@pytest.mark.parametrize("kind", SHAPES)
def test_the_dial_is_the_clipped_svd(kind, low, high, unit):
    net = layer(kind)
    before = taps(net.weight)
    scale = (before.shape[1] / before.shape[2]) ** 0.5 / len(before) if unit == "scale" else 1.0
    left, singular, right = torch.linalg.svd(before, full_matrices=False)
    wanted = left * singular.clamp(low * scale, high * scale).unsqueeze(-2) @ right
    spectral_clip(net, low, high, unit=unit)
    assert float((taps(net.weight) - wanted).abs().max()) < 1e-6 * float(singular.max())


@pytest.mark.parametrize("kind", SHAPES)
def test_both_ends_of_the_dial(kind):
    """[1, 1] is the exact projection, [0, inf] keeps every bit, and so does an interval that holds all values."""
    clipped, projected = layer(kind), layer(kind)
    spectral_clip(clipped, 1.0, 1.0), fire(projected, solver="exact")
    assert torch.equal(clipped.weight, projected.weight)
    for low, high in ((0.0, math.inf), (0.0, 1e4)):
        net = layer(kind)
        spectral_clip(net, low, high)
        assert torch.equal(net.weight, layer(kind).weight)


def test_a_cap_leaves_the_small_values_and_lost_rank():
    net = layer("square")
    net.weight.data[:, 1] = net.weight[:, 0]
    singular = torch.linalg.svdvals(net.weight.detach().double())
    attach(create("cap", high=2.0), net).boundary(1)
    after = torch.linalg.svdvals(net.weight.detach().double())
    torch.testing.assert_close(after, singular.clamp(max=2.0), atol=1e-6, rtol=0)
    assert singular[0] > 2.0 and after[-1] < 1e-6


def trained(name: str, policy: str, **settings):
    net = nn.Linear(2, 2)
    adam = torch.optim.Adam(net.parameters(), lr=0.1)
    treatment = attach(create(name, **settings), net, adam, optimizer_state=policy)
    step(treatment)
    return net, adam, treatment


def step(treatment) -> list[float]:
    """One step; return the rates that it was made with."""
    net, adam = treatment.state.nets["net"], treatment.optimizer
    net(torch.ones(1, 2)).sum().backward()
    treatment.before_step()
    rates = [group["lr"] for group in adam.param_groups]
    adam.step()
    treatment.after_step()
    return rates


@pytest.mark.parametrize("policy", ["keep", "clear", "clear_changed"])
def test_clear_and_rewarm_decide_about_moments_themselves(policy):
    for name, kept in (("clear", False), ("rewarm", True), ("none", policy != "clear")):
        net, adam, treatment = trained(name, policy)
        with untouched(net):
            report = treatment.boundary(1)
        assert bool(adam.state) == kept and not report.changed


def test_the_rate_rises_again_and_the_loop_keeps_its_own():
    _, adam, treatment = trained("rewarm", "clear", steps=4)
    assert step(treatment) == [0.1]  # before its first boundary
    treatment.boundary(1)
    rates = [step(treatment)[0]]
    treatment.before_step(), treatment.after_step(skipped=True)  # by a GradScaler; the step is made again
    saved = treatment.state_dict()
    rates.append(step(treatment)[0])
    adam.param_groups[0]["lr"] = 0.2  # the schedule goes on
    rates += [step(treatment)[0] for _ in range(3)]
    assert rates == pytest.approx([0.025, 0.05, 0.15, 0.2, 0.2]) and adam.param_groups[0]["lr"] == 0.2
    _, _, again = trained("rewarm", "clear", steps=4)
    again.load_state_dict(saved)
    assert step(again) == pytest.approx([0.05])


def test_gradient_scores_of_a_stack_leave_out_its_biases():
    """The two critics of SAC are one stack of layers, with a row of biases for each."""
    critics = Critics(3, 2, 8, 1, 2, torch.Generator().manual_seed(0), "layer")
    inputs = torch.ones(4, 3), torch.ones(4, 2)
    layers, _ = find_unit_layers(critics, inputs)
    critics(*inputs).square().sum().backward()
    for layer in layers:
        means = critics.get_submodule(layer.name).weight.grad.abs().mean(dim=-1).flatten()
        torch.testing.assert_close(gradient_scores(critics, layer), means / (means.mean() + 1e-8))
    assert layers


def test_the_page_has_the_table_of_the_classes():
    """Update it with `fire-core methods --markdown`."""
    page = Path(__file__).resolve().parents[2] / "docs/concepts/methods.md"
    assert table() in page.read_text()
    assert moments(available()["none"]) == "never"
    assert moments(available()["fire_muon"]) == "boundary, optimizer"
