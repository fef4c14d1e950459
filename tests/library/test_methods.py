"""The contract every registered method keeps, and the hand-worked cases of the basic ones.

A method that fire_core/methods/__init__.py imports is picked up here without another edit.
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from fire_core import Phase, State, UserError, reset_optimizer_state, snapshot
from fire_core.methods import available, create, variants
from fire_core.methods.fire import Projection
from vision.models import build

NAMES = [name for name, cls in available().items() if not cls.changes_structure]
NETS = {
    "resnet18": {"width": 4, "image_size": 16},
    "vit_tiny": {"width": 24, "depth": 1, "heads": 2, "image_size": 16},
    "vgg16": {"width": 4, "image_size": 32},
}
# Settings with which methods act within the few steps of these tests. A method with a period or a threshold in steps
# needs an entry, or its `state_dict` is not tested.
OFTEN = {
    "cbp": {"replacement_rate": 0.2, "maturity": 1},
    "snr": {"update_every": 2, "longest": 4},
    "redo": {"every_steps": 2, "threshold": 0.9, "samples": 16},
    "hare_tortoise": {"period": 2, "momentum": 0.5},
}
RECYCLING = ["cbp", "snr", "redo"]
CASES = {name: (name, OFTEN.get(name, {})) for name in NAMES}
CASES["dash every two steps"] = "dash", {"every_steps": 2}
OFTEN_OFFICIAL = {
    "cbp": {"replacement_rate": 0.2, "maturity": 2},
    "redo": {"threshold": 0.5},
    "snr": {"percentile": 0.5},
}
for name in (name for name in NAMES if "official" in variants(name)):
    CASES[f"{name} official"] = name, {"variant": "official", **OFTEN_OFFICIAL.get(name, {})}
ROOT = Path(__file__).resolve().parents[2]


def batches(size, dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    inputs = torch.randn(16, 3, size, size, generator=g).to(dtype)
    labels = torch.randint(5, (16,), generator=g)
    return [(inputs[:8], labels[:8]), (inputs[8:], labels[8:])]


class Training:
    """A few steps of a small net with a method, as the scripts do it; saves and loads like a checkpoint."""

    def __init__(self, name, net="vit_tiny", dtype=torch.float32, first_phase=0):
        torch.manual_seed(0)
        settings = NETS[net]
        self.net = build(net, classes=5, channels=3, **settings).to(dtype)
        self.data = batches(settings["image_size"], dtype)
        name, settings = CASES[name]
        self.method = create(name, **settings, first_phase=first_phase)
        self.default = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.state = State({"net": self.net}, initial=snapshot({"net": self.net}), loss=cross_entropy)
        self.state.batches = lambda: iter(self.data)
        self.state.extras["test_inputs"] = lambda count: self.data[0][0]
        self.method.check(self.state)
        self.state.optimizers["net"] = self.method.optimizer(self.net, self.default, Phase(0))
        self.steps = 0

    def train(self, steps):
        for _ in range(steps):
            inputs, labels = self.data[self.steps % 2]
            loss = cross_entropy(self.net(inputs), labels) + self.method.penalty(self.state)
            optimizer = self.state.optimizers["net"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.method.after_step(self.state)
            self.steps += 1
            if self.steps % len(self.data) == 0:
                for call in ("after_epoch", "before_evaluation", "after_evaluation"):
                    getattr(self.method, call)(self.state)
        return self

    def boundary(self, phase=1):
        self.state.generator = torch.Generator().manual_seed(phase)
        report = self.method.at_boundary(self.state, Phase(phase))
        reset_optimizer_state(self.state.optimizers, "clear", report)
        self.state.optimizers["net"] = self.method.optimizer(self.net, self.default, Phase(phase))
        self.state.phase = phase
        return report

    def weights(self):
        return torch.cat([v.flatten().float() for v in self.net.state_dict().values()])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("net", NETS)
def test_runs_in_every_model_keeps_parameter_identity_and_reports_what_changed(name, net):
    run = Training(name, net)
    identity = {n: (id(p), p.data_ptr(), p.shape, p.dtype) for n, p in run.net.named_parameters()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in run.net.modules())
    run.train(2)
    before = {n: p.detach().clone() for n, p in run.net.named_parameters()}
    weights = run.weights()
    report = run.boundary()
    assert identity == {n: (id(p), p.data_ptr(), p.shape, p.dtype) for n, p in run.net.named_parameters()}
    after = run.weights()
    assert after.isfinite().all()
    assert torch.equal(weights, after) == (not report.changed)
    changed = {f"net.{n}" for n, p in run.net.named_parameters() if not torch.equal(p, before[n])}
    assert changed <= report.changed
    assert {row.parameter for row in report.treated()} <= {f"net.{n}" for n in before}
    assert all(row.dfi_after is not None or row.reason for row in report.rows)
    run.boundary(2)
    run.train(2)
    assert run.weights().isfinite().all()
    if hasattr(run.method, "close"):
        run.method.close()
        assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in run.net.modules())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("net", NETS)
def test_survives_resume_in_the_middle_of_a_phase(name, net, tmp_path):
    whole = Training(name, net).train(2)
    whole.boundary()
    whole.train(3)
    saved = {
        "net": whole.net.state_dict(),
        "optimizer": whole.state.optimizers["net"].state_dict(),
        "method": whole.method.checkpoint(),
        "random": torch.get_rng_state(),
    }
    torch.save(saved, tmp_path / "c.pt")
    before = recycled(whole)
    expected = whole.train(5).weights()
    of_units = name.removesuffix(" official") in RECYCLING
    silent = of_units and net == "vit_tiny"  # GELU is never silent, so SNR finds nothing there
    if of_units and not silent:
        assert before > 0 and (name.endswith("official") or before < recycled(whole))

    def resumed(method):
        again = Training(name, net)
        again.state.phase = 1
        again.state.optimizers["net"] = again.method.optimizer(again.net, again.default, Phase(1))
        again.state.generator = torch.Generator().manual_seed(1)
        again.method.rebuild(again.state)
        saved = torch.load(tmp_path / "c.pt", weights_only=True)
        again.net.load_state_dict(saved["net"])
        again.state.optimizers["net"].load_state_dict(saved["optimizer"])
        again.method.resume(saved["method"] if method is None else method, again.state)
        torch.set_rng_state(saved["random"])
        again.steps = 5
        return again.train(5)

    again = resumed(None)
    assert torch.equal(again.weights(), expected)
    assert recycled(again) == recycled(whole)
    remembers = any(
        not isinstance(leaf, str) and bool(torch.as_tensor(leaf).any())
        for leaf in tree_leaves(saved["method"])
    )
    if remembers and not silent:  # the state matters within these steps
        assert not torch.equal(resumed({}).weights(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_another_method_is_left_alone(name):
    """A method may be given what a shared first phase holds, which another method trained."""
    other = Training("redo" if name == "cbp" else "cbp").train(3).method.checkpoint()
    run = Training(name)
    empty = run.method.checkpoint()
    for saved in (other, {"method": "another", "average": {}}, {}):
        run.method.resume(saved, run.state)
        assert run.method.checkpoint() == empty
    assert empty["method"] == name


def recycled(run):
    """How many units a method of units has replaced so far."""
    return run.method.counts["recycled"] if hasattr(run.method, "counts") else 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("net", NETS)
def test_trains_and_is_applied_twice_on_bf16_weights(name, net):
    run = Training(name, net, dtype=torch.bfloat16).train(3)
    run.boundary()
    run.train(3)
    run.boundary(2)
    assert all(p.dtype == torch.bfloat16 for p in run.net.parameters())
    assert run.weights().isfinite().all()
    if name in RECYCLING and net != "vit_tiny":
        assert recycled(run) > 0


@pytest.mark.parametrize("name", CASES)
def test_does_nothing_before_its_first_phase(name):
    plain = Training("none", first_phase=1).train(5).weights()
    run = Training(name, first_phase=1)
    assert torch.equal(run.train(5).weights(), plain)
    assert run.method.checkpoint() == Training(name, first_phase=1).method.checkpoint()
    run.method.first_phase = 2
    before = run.weights()
    assert not run.boundary(1).changed and torch.equal(run.weights(), before)


def small_state():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    state = State({"net": net}, initial=snapshot({"net": net}), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    net[1].running_mean.fill_(5.0)
    return net, state


@pytest.mark.parametrize(
    "name, settings, said",
    [
        ("fier", {}, "did you mean 'fire'"),
        ("fire", {"iteration": 5}, "did you mean 'iterations'"),
        ("fire", {"strength": 7.0}, r"strength=7\.0"),
        ("fire", {"variant": "official"}, "'official'"),
        ("fire", {"variance_factor": 0.25}, r"variance_factor=0\.25"),  # no effect with scale=official
        ("rescale", {"degenerate": "zero"}, "zero"),
        ("shrink_perturb", {"shrink": 1.5}, r"shrink=1\.5"),
        ("cbp", {"replacement_rate": 2.0}, r"2\.0"),
        ("redo", {"fresh": "old"}, "old"),
        ("dash", {"alpha": 0.0}, r"0\.0"),
        ("adamo", {"coefficient": -1.0}, "coefficient=-1.0"),
        ("redo", {"threshold": -1.0}, "threshold=-1.0"),
        ("cbp", {"variant": "official", "compensate": False}, "compensate=False"),
        ("muon", {"variant": "official", "targets": "all"}, "targets='all'"),
        ("snr", {"variant": "official", "longest": 9}, "longest=9"),
    ],
)
def test_names_and_settings_that_mean_nothing_are_quoted_when_the_method_is_made(name, settings, said):
    with pytest.raises(UserError, match=said):
        create(name, **settings)


def test_shrink_perturb_by_hand():
    net, state = small_state()
    create("shrink_perturb", shrink=0.8).at_boundary(state, Phase(1))
    for name, p in net.named_parameters():
        start = state.initial["net"][name]
        assert torch.allclose(p, 0.2 * (start + 1) + 0.8 * start, atol=1e-6), name
    assert net[1].running_mean.tolist() == [5.0] * 4  # statistics are kept
    net[0].weight.data.fill_(float("nan"))
    create("shrink_perturb", shrink=1.0).at_boundary(state, Phase(1))
    assert torch.equal(net[0].weight, state.initial["net"]["0.weight"])
    net, state = small_state()
    report = create("shrink_perturb", parameters="0").at_boundary(state, Phase(1))
    assert [row.name for row in report.treated()] == ["net.0.weight"]
    assert {row.name: row.action for row in report.rows}["net.2.weight"] == "skipped"


def test_full_reset_restores_buffers_too():
    net, state = small_state()
    report = create("full_reset").at_boundary(state, Phase(1))
    for name, value in net.state_dict().items():
        assert torch.equal(value, state.initial["net"][name]), name
    assert all(row.sfe_relative == pytest.approx(1.0) for row in report.treated())


@pytest.mark.parametrize("name", ["fire", "rescale"])
def test_rules_that_overlap_are_refused_before_anything_changes(name):
    net, state = small_state()
    before = {key: p.detach().clone() for key, p in net.named_parameters()}
    method = create(name, targets="all", reset="2")
    for act in (lambda: method.check(state), lambda: method.at_boundary(state, Phase(1))):
        with pytest.raises(UserError, match=r"2\.weight"):
            act()
    assert all(torch.equal(p, before[key]) for key, p in net.named_parameters())


@pytest.mark.parametrize("name", ["fire", "shrink_perturb"])
def test_missing_starting_weights_are_named_before_anything_changes(name):
    net, state = small_state()
    before = {key: p.detach().clone() for key, p in net.named_parameters()}
    method = create(name, **{"targets" if name == "fire" else "parameters": "0"}, reset="2")
    del state.initial["net"]["2.bias"]
    with pytest.raises(UserError, match=r"2\.bias"):
        method.at_boundary(state, Phase(1))
    state.initial.clear()
    with pytest.raises(UserError, match=r"State\.initial"):
        method.at_boundary(state, Phase(1))
    assert all(torch.equal(p, before[key]) for key, p in net.named_parameters())


PROJECTIONS = [name for name, cls in available().items() if issubclass(cls, Projection)]


@pytest.mark.parametrize("name", PROJECTIONS)
def test_min_norm_leaves_small_matrices_alone_and_is_told(name):
    net, state = small_state()
    with torch.no_grad():
        net[2].weight.mul_(1e-5)
    small = net[2].weight.detach().clone()
    report = create(name, min_norm=1e-2).at_boundary(state, Phase(1))
    assert torch.equal(net[2].weight, small) and report.changed == {"net.0.weight"}
    (reason,) = (row.reason for row in report.rows if row.name == "net.2.weight")
    assert "below min_norm=0.01" in reason


@pytest.mark.parametrize("name", ["fire", "fire_exact", "fire_all", "interpolate"])
def test_variance_factor_is_the_share_of_the_initial_mean_square(name):
    net, state = small_state()
    start = state.initial["net"]["0.weight"]
    create(name, scale="initial", variance_factor=0.25, strength=1.0).at_boundary(state, Phase(1))
    assert (net[0].weight.square().mean() / start.square().mean()).item() == pytest.approx(0.25, rel=1e-5)


def test_fire_muon_projects_at_a_boundary_and_trains_with_muon():
    net, state = small_state()
    default = torch.optim.Adam(net.parameters(), lr=1e-3)
    method = create("fire_muon", iterations=7, projected="no_head")
    assert method.optimizer(net, default, Phase(0)) is default
    report = method.at_boundary(state, Phase(1))
    assert report.changed == {"net.0.weight"}
    assert torch.equal(net[0].weight, weight_after("fire", iterations=7, targets="no_head"))
    groups = method.optimizer(net, default, Phase(1)).param_groups
    assert [g["lr"] for g in groups if net[0].weight in set(g["params"])] == [pytest.approx(1e-2)]
    with pytest.raises(UserError, match="'nowhere' matches nothing"):
        create("fire_muon", projected="nowhere").check(state)


def weight_after(name, **settings):
    net, state = small_state()
    create(name, **settings).at_boundary(state, Phase(1))
    return net[0].weight.detach()


def test_controls_share_with_fire_what_they_say():
    """`rescale` the norm, `keep_norm` the directions, `interpolate` a part of the way."""
    old, fired = small_state()[0][0].weight.detach(), weight_after("fire")
    rescaled, turned = weight_after("rescale"), weight_after("keep_norm", solver="newton_schulz")
    for ours, norm, directions in ((rescaled, fired, old), (turned, old, fired)):
        torch.testing.assert_close(ours, directions * norm.norm() / directions.norm(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight_after("interpolate", strength=0.25), old + 0.25 * (fired - old))


def test_random_orthogonal_has_the_spectrum_of_fire_exact_and_no_memory():
    net, state = small_state()
    twin, twin_state = small_state()
    with torch.no_grad():
        twin[0].weight.mul_(-3.0)
    report = create("random_orthogonal").at_boundary(state, Phase(1))
    create("random_orthogonal").at_boundary(twin_state, Phase(1))
    assert torch.equal(net[0].weight, twin[0].weight)
    assert all(row.dfi_factor < 1e-10 for row in report.treated())
    assert torch.linalg.svdvals(net[0].weight).tolist() == pytest.approx([(4 / 3) ** 0.5] * 3, rel=1e-5)


def test_every_file_of_a_method_is_imported():
    files = {path.stem for path in (ROOT / "fire_core" / "methods").glob("*.py")} - {"__init__", "method"}
    imported = {cls.__module__.rpartition(".")[2] for cls in available().values()}
    assert {name for name in files if not name.startswith("_")} == imported
