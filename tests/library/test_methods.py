"""Settings of methods, and the basic methods against numbers worked out by hand."""

import pytest
import torch
from torch import nn

from fire_core import UserError, attach
from fire_core.methods import available, create
from fire_core.methods.fire import Projection
from tests.tiny_nets import state_of, untouched


def small_state():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    state = state_of(net)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    net[1].running_mean.fill_(5.0)
    return net, state


def test_shrink_perturb_replaces_nan_and_takes_a_rule():
    net, state = small_state()
    net[0].weight.data.fill_(float("nan"))
    create("shrink_perturb", shrink=1.0).boundary(state)
    assert torch.equal(net[0].weight, state.initial["net"]["0.weight"])
    net, state = small_state()
    report = create("shrink_perturb", parameters="0").boundary(state)
    assert [row.name for row in report.treated()] == ["net.0.weight"]
    assert {row.name: row.action for row in report.rows}["net.2.weight"] == "skipped"


@pytest.mark.parametrize("name", ["fire", "rescale"])
def test_rules_that_overlap_are_refused_before_anything_changes(name):
    net, state = small_state()
    method = create(name, targets="all", reset="2")
    for act in (method.check, method.boundary):
        with untouched(net), pytest.raises(UserError, match=r"2\.weight"):
            act(state)


@pytest.mark.parametrize("name", ["fire", "shrink_perturb"])
def test_missing_starting_weights_are_named_before_anything_changes(name):
    net, state = small_state()
    method = create(name, **{"targets" if name == "fire" else "parameters": "0"}, reset="2")
    del state.initial["net"]["2.bias"]
    with untouched(net), pytest.raises(UserError, match=r"2\.bias"):
        method.boundary(state)
    state.initial.clear()
    with untouched(net), pytest.raises(UserError, match=r"initial has no values for"):
        method.boundary(state)


PROJECTIONS = [name for name, cls in available().items() if issubclass(cls, Projection)]


@pytest.mark.parametrize("name", PROJECTIONS)
def test_min_norm_leaves_small_matrices_alone_and_is_told(name):
    net, state = small_state()
    net[2].weight.data.mul_(1e-5)
    with untouched(net[2]):
        report = create(name, min_norm=1e-2).boundary(state)
    (reason,) = (row.reason for row in report.rows if row.name == "net.2.weight")
    assert report.changed == {"net.0.weight"} and "below min_norm=0.01" in reason


@pytest.mark.parametrize("name", ["fire", "fire_exact", "fire_all", "interpolate"])
def test_variance_factor_is_the_share_of_the_initial_mean_square(name):
    net, state = small_state()
    start = state.initial["net"]["0.weight"]
    create(name, scale="initial", variance_factor=0.25, strength=1.0).boundary(state)
    assert (net[0].weight.square().mean() / start.square().mean()).item() == pytest.approx(0.25, rel=1e-5)


def test_fire_muon_projects_at_a_boundary_and_trains_with_muon():
    net, state = small_state()
    default = torch.optim.Adam(net.parameters(), lr=1e-3)
    method = create("fire_muon", iterations=7, projected="no_head")
    treatment = attach(method, net, default)
    assert treatment.optimizer is default
    report = treatment.boundary(1)
    assert report.changed == {"net.0.weight"}
    assert torch.equal(net[0].weight, weight_after("fire", iterations=7, targets="no_head"))
    groups = treatment.optimizer.param_groups
    assert [g["lr"] for g in groups if net[0].weight in set(g["params"])] == [pytest.approx(1e-2)]
    with pytest.raises(UserError, match="'nowhere' matches nothing"):
        create("fire_muon", projected="nowhere").check(state)


def weight_after(name, **settings):
    net, state = small_state()
    create(name, **settings).boundary(state)
    return net[0].weight.detach()


def test_controls_share_with_fire_what_they_say():
    """`rescale` the norm, `keep_norm` the directions, `interpolate` a part of the way."""
    old, fired = small_state()[0][0].weight.detach(), weight_after("fire")
    rescaled, turned = weight_after("rescale"), weight_after("keep_norm", solver="newton_schulz")
    for ours, norm, directions in ((rescaled, fired, old), (turned, old, fired)):
        torch.testing.assert_close(ours, directions * norm.norm() / directions.norm(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight_after("interpolate", strength=0.25), old + 0.25 * (fired - old))


def test_random_orthogonal_has_the_spectrum_of_fire_exact_and_no_memory():
    (net, state), (twin, twin_state) = small_state(), small_state()
    twin[0].weight.data.mul_(-3.0)
    report = create("random_orthogonal").boundary(state)
    create("random_orthogonal").boundary(twin_state)
    assert torch.equal(net[0].weight, twin[0].weight)
    assert all(row.dfi_factor < 1e-10 for row in report.treated())
    assert torch.linalg.svdvals(net[0].weight).tolist() == pytest.approx([(4 / 3) ** 0.5] * 3, rel=1e-5)
