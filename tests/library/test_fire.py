"""fire(): the published formula, the exact projection, and what happens to awkward weights."""

import copy
import math
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fire_core
from fire_core import UserError, find_targets, fire, project_, reset_optimizer_state
from fire_core.engine import Treated, treat_tensors
from fire_core.measure.metrics import deviation_from_isometry
from language.model import Decoder, Shape
from tests.polar_cases import spread, with_spectrum
from tests.tiny_nets import linear, untouched
from vision.models import build

IMAGES = {"channels": 3, "image_size": 32, "classes": 10}
NETS = {
    "resnet18": lambda: build("resnet18", **IMAGES, width=8),
    "vit_tiny": lambda: build("vit_tiny", **IMAGES, width=24, depth=1, heads=2),
    "gpt": lambda: Decoder(Shape(layers=1, heads=2, width=16, block=8, vocabulary=40)),
}


def paper(w: torch.Tensor) -> torch.Tensor:
    """The paper's Algorithm 1 with ten iterations on one matrix, written down as plainly as possible."""
    tall = w if w.shape[0] >= w.shape[1] else w.T
    x = tall / tall.norm()
    for _ in range(10):
        x = 1.5 * x - 0.5 * x @ (x.T @ x)
    return (x if tall is w else x.T) * math.sqrt(w.shape[0] / w.shape[1])


@pytest.mark.parametrize("name", NETS)
def test_equals_the_published_formula(name):
    torch.manual_seed(0)
    net = NETS[name]()
    before, expected = {name: p.detach().clone() for name, p in net.named_parameters()}, {}
    for place, layer in net.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            w = layer.weight.detach().clone()
            for i, j in np.ndindex(*w.shape[2:]) if w.ndim == 4 else ():
                w[:, :, i, j] = paper(w[:, :, i, j]) / w[0, 0].numel()
            parts = w.chunk(3 if place.endswith("c_attn") else 1)
            weight = w if w.ndim == 4 else torch.cat([paper(part) for part in parts])
            expected["wte.weight" if place == "lm_head" else f"{place}.weight"] = weight
    assert fire(net, iterations=10).changed == set(expected)
    for name, parameter in net.named_parameters():
        want = expected.get(name, before[name])
        assert (parameter - want).norm() <= 1e-5 * want.norm().clamp_min(1e-12), name


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
    # before its scale, one step of the published loop leaves 0.792 and 0.944
    (row,) = fire(linear([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]), iterations=1).treated()
    assert row.dfi_factor == pytest.approx((1 - 0.792**2) ** 2 + (1 - 0.944**2) ** 2, rel=1e-5)


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


def test_the_tolerance_reaches_the_solver():
    """A matrix of six decades, which the exact solver repairs only where 1e-8 is asked for."""
    steep, settings = with_spectrum(128, 128, spread(128, 6.0)).tolist(), ({}, {"tolerance": 1.0})
    (good,), (rough,) = (fire(linear(steep), solver="exact", **given).treated() for given in settings)
    assert good.dfi_factor <= 1e-8 < rough.dfi_factor


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def test_a_failure_in_the_second_stack_leaves_the_model_alone():
    net = two_layers()

    def treat(stack, group):
        return Treated(stack / 2 if group[0].name == "0.weight" else stack * math.nan)

    with untouched(net), pytest.raises(UserError, match=r"NaN.*1\.weight"):
        treat_tensors(dict(net.named_parameters()), find_targets(net), treat, action="halved")


def test_a_report_keeps_no_matrix_alive():
    net, kept = two_layers(), []

    def treat(stack, group):
        kept.append(weakref.ref(stack))
        return Treated(stack / 2)

    report = treat_tensors(dict(net.named_parameters()), find_targets(net), treat, action="halved")
    assert report.changed and len(kept) == 2 and not any(reference() is not None for reference in kept)


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
    wrong = [start | {"1.weight": torch.full((3, 6), value)} for value in (0.0, torch.nan)]
    for bad in (None, {"0.weight": start["0.weight"]}, *wrong):
        with untouched(net), pytest.raises(UserError, match=r"starting weights of .*[01]\.weight"):
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


def test_a_call_goes_through_few_functions():
    root, called, net = str(Path(fire_core.__file__).parent), set(), two_layers()

    def watch(frame, event, function):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            called.add(frame.f_code)

    sys.setprofile(watch)
    try:
        fire(net)
    finally:
        sys.setprofile(None)
    functions = {(Path(c.co_filename).name, c.co_qualname) for c in called if "<" not in c.co_name}
    assert len(functions) <= 45 and len({file for file, _ in functions}) <= 7, sorted(functions)
