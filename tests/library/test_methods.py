"""Settings of methods, the basic methods worked out by hand, the dial, the controls, and plasticity injection."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from fire_core import UserError, attach, fire
from fire_core.engine import observe
from fire_core.methods import create, table
from fire_core.methods.plasticity_injection import inject
from fire_core.methods.spectral_clip import spectral_clip
from fire_core.state import snapshot
from tests.polar_cases import gaussian
from tests.tiny_nets import Net, beginning, replica, state_of, untouched


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


def test_rules_that_overlap_are_refused_before_anything_changes():
    net, state = small_state()
    method = create("rescale", targets="all", reset="2")
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


@pytest.mark.parametrize("name", ["fire", "interpolate"])
def test_variance_factor_is_the_share_of_the_initial_mean_square(name):
    net, state = small_state()
    start = state.initial["net"]["0.weight"]
    create(name, scale="initial", variance_factor=0.25, strength=1.0).boundary(state)
    assert (net[0].weight.square().mean() / start.square().mean()).item() == pytest.approx(0.25, rel=1e-5)


def test_fire_muon_projects_at_a_boundary_and_trains_with_muon():
    net, state = small_state()
    method = create("fire_muon", iterations=7, projected="no_head")
    treatment = attach(method, net, torch.optim.Adam(net.parameters(), lr=1e-3))
    assert treatment.boundary(1).changed == {"net.0.weight"}
    assert torch.equal(net[0].weight, weight_after("fire", iterations=7, targets="no_head"))
    assert "momentum" in treatment.optimizer.param_groups[0]
    with pytest.raises(UserError, match="'nowhere' matches nothing"):
        create("fire_muon", projected="nowhere").check(state)


def weight_after(name, **settings):
    net, state = small_state()
    create(name, **settings).boundary(state)
    return net[0].weight.detach()


def test_controls_share_with_fire_what_they_say():
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


INTERVALS = [(0.5, 2.0), (0.0, 1.0), (0.9, math.inf), (0.3, 0.3), (1.0, 1.0), (0.0, math.inf)]


@pytest.mark.parametrize("unit", ["scale", "absolute"])
@pytest.mark.parametrize("low, high", INTERVALS)
@pytest.mark.parametrize("kind", SHAPES)
def test_the_dial_is_the_clipped_svd(kind, low, high, unit):
    """[1, 1] is the exact projection to the bit, and an interval that holds all values keeps every bit."""
    net = layer(kind)
    before = taps(net.weight)
    scale = (before.shape[1] / before.shape[2]) ** 0.5 / len(before) if unit == "scale" else 1.0
    left, singular, right = torch.linalg.svd(before, full_matrices=False)
    wanted = left * singular.clamp(low * scale, high * scale).unsqueeze(-2) @ right
    spectral_clip(net, low, high, unit=unit)
    assert float((taps(net.weight) - wanted).abs().max()) < 1e-6 * float(singular.max())
    if low == high == 1.0:
        fire(projected := layer(kind), solver="exact", scale="official" if unit == "scale" else "none")
        assert torch.equal(net.weight, projected.weight)
    if low == 0.0 and high > 1.0:  # in float64, where a product of its factors would differ from the matrix
        spectral_clip(net := layer(kind).double(), low, high, unit=unit)
        assert torch.equal(net.weight, layer(kind).double().weight)


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
    """Also where a GradScaler skips a step, which is then repeated, and where the schedule changes the rate."""
    _, adam, treatment = trained("rewarm", "clear", steps=4)
    assert step(treatment) == [0.1]  # before its first boundary
    treatment.boundary(1)
    rates = step(treatment)
    treatment.before_step(), treatment.before_step()  # two updates in one step
    assert adam.param_groups[0]["lr"] == pytest.approx(0.05)
    treatment.after_step(skipped=True)
    saved = treatment.state_dict()
    rates += step(treatment)
    adam.param_groups[0]["lr"] = torch.tensor(0.2)
    rates += [step(treatment)[0] for _ in range(3)]
    assert rates == pytest.approx([0.025, 0.05, 0.15, 0.2, 0.2]) and adam.param_groups[0]["lr"] == 0.2
    _, _, again = trained("rewarm", "clear", steps=4)
    again.load_state_dict(saved)
    assert step(again) == pytest.approx([0.05])
    with pytest.raises(UserError, match="'rewarm' needs the learning rate: give"):
        attach("rewarm", nn.Linear(2, 2))


def test_the_page_has_the_table_of_the_classes():
    """Update it with `fire-core methods --markdown`."""
    assert table() in (Path(__file__).resolve().parents[2] / "docs/concepts/methods.md").read_text()


def new_net():
    head = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    return Net(lambda net, x: net.head(net.encoder(x).relu()), encoder=nn.Linear(3, 4), head=head)


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


def test_what_would_be_treated_twice_or_begin_to_train_is_refused():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pair = {"a": net[0], "b": net[1]}
    wrong = [(net, net[1], "would train 0"), (net[1], net, "in no net"), (pair, net, "in no net|that one")]
    for method in ("muon", "upgd", create("plasticity_injection", head="1")):
        for whole, held, said in wrong:
            with pytest.raises(UserError, match=said):
                attach(method, whole, torch.optim.SGD(held.parameters()))
    both, alone = {"both": torch.optim.SGD(net.parameters())}, attach("fire", net)
    bare = attach("dash", net, loss=nn.functional.mse_loss, batches=lambda: [torch.ones(2, 2)])
    with pytest.raises(UserError, match="f made 1"), observe(net, action="", method="f"):
        net[1].weight = nn.Parameter(net[1].weight / 2)
    for said, act in (
        ("would be treated twice", lambda: attach("parseval", {"a": net, "b": net[0]})),
        ("give its optimizer that name", lambda: attach(create("plasticity_injection", head=""), pair, both)),
        ("was given no optimizer of net 'net'", lambda: alone.optimizer),
        ("is of nets", lambda: alone.load_state_dict(attach("fire", pair).state_dict())),
        ("is of optimizers", lambda: attach("fire", net, both["both"]).load_state_dict(alone.state_dict())),
        ("batches yields a Tensor: let it yield pairs", lambda: bare.boundary(1)),
        (r"adam_betas=0\.9 must be two numbers", lambda: create("muon", adam_betas=0.9)),
        ("lacks the weights of net 'net'", lambda: attach("none", net, initial={"model": net.state_dict()})),
        ("holds the weights of the model themselves", lambda: attach("none", net, initial=net.state_dict())),
        ("list is no optimizer", lambda: attach("none", net, optimizers=[])),
        ("follower Sequential has other keys", lambda: attach("none", net, followers=[(net, net[0])])),
        ("initial is a Linear: give", lambda: attach("none", net, initial=net[0])),
    ):
        with pytest.raises(UserError, match=said):
            act()


@pytest.mark.parametrize("name", ["rewarm", "adamo", "l2_init", "swr"])
def test_a_loop_that_leaves_out_a_call_is_told(name):
    net = nn.Linear(2, 2)
    treatment = attach(name, net, torch.optim.SGD(net.parameters(), lr=0.1))
    treatment.boundary(1)
    if name == "swr":
        treatment.before_step()
    with pytest.raises(UserError, match=r"before_step\(\)|call penalty\(\)|finds no gradients"):
        treatment.after_step()


def test_one_damaged_net_of_two_and_starting_weights_of_another_shape_change_nothing():
    state = state_of(nn.Linear(2, 2))
    state.nets["other"] = nn.Linear(2, 2)
    state.nets["other"].weight.data[0, 0] = float("nan")
    with untouched(state.nets["net"]), pytest.raises(UserError, match="in net 'other': no net was changed"):
        create("fire").boundary(state)
    net, state = small_state()
    state.initial["net"]["2.bias"] = torch.zeros(1)
    with untouched(net), pytest.raises(UserError, match=r"lacks 2\.bias, or in that shape"):
        create("shrink_perturb").boundary(state)
    with untouched(net), pytest.raises(UserError, match=r"differ in 2\.bias"):
        create("full_reset").boundary(state)
    with pytest.raises(UserError, match=r"other shapes than net 'net' in 2\.bias"):
        attach("full_reset", net, initial=state.initial)


def test_a_tied_head_leaves_the_embedding_in_training():
    net = nn.ModuleDict({"table": nn.Embedding(3, 4), "head": nn.Linear(4, 3, bias=False)})
    net["head"].weight = net["table"].weight
    inject(net, snapshot({"net": net})["net"])
    assert net["table"].weight.requires_grad and not net["head"].old.weight.requires_grad
    assert net["head"](input=torch.ones(1, 4)).shape == (1, 3)


def test_a_compiled_net_is_injected_with_each_output_of_its_head_and_a_replica_is_refused():
    pair = Net(lambda net, x: (net.mean(x), net.spread(x)), mean=nn.Linear(3, 2), spread=nn.Linear(3, 2))
    net, x = nn.ModuleDict({"head": pair}), torch.randn(5, 3)
    before = net.head(x)
    with pytest.raises(UserError, match="wrap the net afterwards"):
        inject(replica(net), net.state_dict())
    report = inject(torch.compile(net), copy.deepcopy(net.state_dict()))
    assert report.changed == {f"head.new.{name}" for name, _ in net.head.new.named_parameters()}
    torch.testing.assert_close(net.head(x), before)


def test_predictions_do_not_change_and_only_the_new_head_and_the_encoder_learn():
    state, net, target = trained_state()
    x = torch.randn(6, 3)
    before, old_head = net(x), copy.deepcopy(net.head)
    report = create("plasticity_injection").boundary(state)
    target.load_state_dict(net.state_dict())
    torch.testing.assert_close(net(x), before, rtol=0, atol=1e-6)
    torch.testing.assert_close(target(x), before, rtol=0, atol=1e-6)
    trainable = {name for name, p in net.named_parameters() if p.requires_grad}
    learning = ("encoder", "head.new.0", "head.new.2")
    assert trainable == {f"{module}.{k}" for module in learning for k in ("weight", "bias")}
    assert report.changed == {f"net.{name}" for name in trainable if name.startswith("head")}
    net(x).square().sum().backward()
    torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1).step()
    hidden, start = net.encoder(x).relu(), nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    start.load_state_dict(beginning("head.", state.initial["net"]))
    by_hand = old_head(hidden) + net.head.new(hidden) - start(hidden)
    torch.testing.assert_close(net(x), by_hand, rtol=1e-5, atol=1e-5)
    assert not torch.equal(net.head.new[0].weight, start[0].weight)


@pytest.mark.parametrize("phases, first_phase", [([], 1), ([1, 2], 1), ([1, 2], 2), ([10], 1), ([1, 1], 1)])
def test_a_rebuilt_net_takes_the_checkpoint_of_an_injected_one(phases, first_phase):
    def attached(net, target):
        method = create("plasticity_injection", first_phase=first_phase)
        return attach(method, net, torch.optim.Adam(net.parameters()), followers=[(target, net)])

    _, net, target = trained_state()
    treatment = attached(net, target)
    for phase in phases:
        treatment.optimizer.param_groups[0]["lr"] /= 2
        treatment.boundary(phase)
    assert treatment.optimizer.param_groups[0]["lr"] == 1e-3 / 2 ** len(phases)
    fresh, other, saved = new_net(), new_net(), copy.deepcopy(treatment.state_dict())
    attached(fresh, other).load_state_dict(saved)
    other.load_state_dict(target.state_dict())
    x = torch.randn(4, 3)
    assert torch.equal(fresh(x), before := net(x))
    treatment.boundary(sum(phases) + 1)
    treatment.load_state_dict(saved)  # back to an earlier state
    assert torch.equal(net(x), before)
    assert [p.requires_grad for p in fresh.parameters()] == [p.requires_grad for p in net.parameters()]
