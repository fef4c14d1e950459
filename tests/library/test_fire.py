"""fire(): the report, failures, and what happens to awkward weights. Its formula is tested in tests/official."""

import copy
import math

import pytest
import torch
from torch import nn

from fire_core import UserError, find_targets, fire, polar, project_, reset_optimizer_state
from fire_core.engine import Treated, treat_tensors
from fire_core.measure.metrics import deviation_from_isometry
from tests.polar_cases import spread, with_spectrum
from tests.tiny_nets import linear, untouched


def test_report_figures_by_hand():
    net = linear([[3.0, 0.0], [0.0, 4.0]])
    report = fire(net, solver="exact", initial={"weight": torch.zeros(2, 2)})
    (row,) = report.treated()
    assert torch.allclose(net.weight, torch.eye(2), atol=1e-6)
    assert row.dfi_before == pytest.approx((9 - 1) ** 2 + (16 - 1) ** 2)
    assert row.sfe == pytest.approx(2**2 + 3**2, rel=1e-5)
    assert row.sfe_relative == pytest.approx(13 / 25, rel=1e-5)
    assert (row.norm_before, row.norm_after) == (pytest.approx(5.0), pytest.approx(math.sqrt(2)))
    assert "weight" in str(report) and report.summary()["targets"] == 1


def test_the_report_is_of_the_weight_as_stored():
    torch.manual_seed(0)
    net = nn.Linear(32, 32, bias=False).bfloat16()
    before = net.weight.detach().float()
    (row,) = fire(net, solver="exact").treated()
    after = net.weight.detach().float()
    assert row.dfi_after == pytest.approx(deviation_from_isometry(after).item(), rel=1e-4)
    assert 1e-5 < row.dfi_after < 1e-2
    assert row.norm_after == pytest.approx(after.norm().item(), rel=1e-6)
    assert row.sfe == pytest.approx((after - before).square().sum().item(), rel=1e-5)
    assert row.dfi_factor < 1e-8


def test_settings_reach_the_solver_and_its_residual_the_report():
    """A matrix of six decades, which the exact solver repairs only where 1e-8 is asked for."""
    for settings in ({"solver": "exact"}, {"solver": "exact", "tolerance": 1.0}, {"iterations": 3}):
        net = nn.Linear(128, 128, bias=False)
        net.weight.data.copy_(with_spectrum(128, 128, spread(128, 6.0)))
        expected = polar(net.weight, **{"solver": "newton_schulz", **settings}).residual.item()
        (row,) = fire(net, **settings).treated()
        assert row.dfi_factor == pytest.approx(expected, rel=1e-3)
        assert (expected <= 1e-8) == (settings == {"solver": "exact"})


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


@pytest.mark.parametrize("wrong", ["nan", "error"])
def test_a_failure_in_the_second_stack_leaves_the_model_alone(wrong):
    net = two_layers()

    def treat(stack, group):
        if group[0].name == "0.weight":
            return Treated(stack / 2)
        if wrong == "error":
            raise torch.OutOfMemoryError("no memory left")
        return Treated(stack * float("nan"))

    error, message = (
        (UserError, r"NaN.*1\.weight") if wrong == "nan" else (torch.OutOfMemoryError, "no memory")
    )
    with untouched(net), pytest.raises(error, match=message):
        treat_tensors(dict(net.named_parameters()), find_targets(net), treat, action="halved")


REASONS = {0.0: "all-zero matrix", 1e-6: "norm 1e-06 is below min_norm=0.001", math.nan: "", math.inf: ""}


@pytest.mark.parametrize("norm, reason", REASONS.items())
def test_matrices_without_a_direction_raise_or_are_skipped_with_the_reason(norm, reason):
    net, settings = two_layers(), {"min_norm": 1e-3} if "min_norm" in reason else {}
    with torch.no_grad():
        net[1].weight.mul_(norm / net[1].weight.norm())
    with untouched(net[0]), pytest.raises(UserError, match=rf"{reason}.* in 1\.weight"):
        fire(net, **settings)
    if not reason:
        return
    with untouched(net[1]):
        report = fire(net, degenerate="skip", **settings)
    skipped = next(r for r in report.rows if r.name == "1.weight")
    assert (skipped.action, skipped.reason) == ("skipped", reason) and report.changed == {"0.weight"}


def test_a_dry_run_reports_and_writes_nothing():
    net, other = two_layers(), two_layers()
    with untouched(net):
        report = fire(net, dry_run=True)
    assert report.treated() == fire(other).treated() and not report.changed and not report.parameters
    assert "would change (dry run)" in str(report)


def test_initial_scale_gives_back_the_starting_norm():
    net, plain, start = two_layers(), two_layers(), dict(two_layers().named_parameters())
    net[0].weight.data.mul_(5.0)
    fire(plain, solver="exact")
    fire(net, solver="exact", scale="initial", initial=start)
    expected = plain[0].weight * start["0.weight"].norm() / plain[0].weight.norm()
    torch.testing.assert_close(net[0].weight, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="scale='initial' needs the starting weights"):
        fire(net, scale="initial")
    lacking = {"0.weight": start["0.weight"]}
    for bad in (lacking, *(start | {"1.weight": torch.full((3, 6), value)} for value in (0.0, torch.nan))):
        with untouched(net), pytest.raises(UserError, match=r"1\.weight"):
            fire(net, scale="initial", initial=bad)


def test_project_changes_one_weight_in_place():
    for layer in (nn.Linear(5, 8), nn.Conv2d(3, 6, 3)):
        fire(other := copy.deepcopy(layer), solver="exact")
        assert project_(layer.weight) is layer.weight
        assert torch.allclose(layer.weight, other.weight, atol=1e-6)
    assert deviation_from_isometry(project_(torch.randn(9, 4), scale=1.0)) < 1e-8
    with pytest.raises(UserError, match="share one place"):
        project_(torch.ones(1, 4).expand(3, 4))


def test_tied_weights_are_treated_once_and_forgotten_together():
    """Two Parameter objects over one memory are one weight; what only shares memory is refused."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    net[1].weight = nn.Parameter(net[0].weight.detach())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
    net(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    report = fire(net, solver="exact")
    (row,) = report.treated()
    assert row.norm_after == pytest.approx(net[0].weight.norm().item()) and row.dfi_after < 1e-8
    assert report.changed == {"0.weight", "1.weight"}
    assert reset_optimizer_state(optimizer, "clear_changed", report) == 2 and not optimizer.state
    for view in (net[0].weight.detach().T, net[0].weight.detach()[:3]):
        net[1].weight = nn.Parameter(view)
        with untouched(net), pytest.raises(UserError, match=r"'0\.weight' and '1\.weight' overlap in memory"):
            fire(net)
    buffer = torch.randn(8, 4)
    net[0].weight, net[1].weight = nn.Parameter(buffer[:4]), nn.Parameter(buffer[4:])
    assert len(fire(net).treated()) == 2
