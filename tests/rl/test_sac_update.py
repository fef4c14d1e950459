"""One SAC update against a second implementation: separate critics, torch.distributions, AdamW written out."""

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform
from torch.nn.functional import layer_norm, linear, relu

from fire_core import attach
from harness.runs import seeded
from rl.captured import captured
from rl.replay import Batch
from rl.sac.network import Actor, Critics, Temperature
from rl.sac.update import Learner, actor_pass, critic_pass, update

OBSERVATIONS, ACTIONS, SIZE = 4, 2, 6
RATE, DECAY, DISCOUNT, TAU, TARGET_ENTROPY = 1e-3, 0.01, 0.9, 0.1, -1.0


def learner(seed: int = 0) -> Learner:
    with seeded(seed, "init"), torch.no_grad():
        actor = Actor(OBSERVATIONS, ACTIONS, 8, 1).double()
        critics = Critics(OBSERVATIONS, ACTIONS, 8, 1).double()
        target = deepcopy(critics)
        for parameter in target.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    others = (Temperature(0.2).double(), DISCOUNT, TAU, TARGET_ENTROPY, RATE, DECAY)
    return Learner(actor, critics, target, *others)


def batch(seed: int = 1) -> Batch:
    how = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    observations, following = torch.randn(2, SIZE, OBSERVATIONS, **how)
    actions, rewards = torch.rand(SIZE, ACTIONS, **how) * 2 - 1, torch.randn(SIZE, **how)
    ended = torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.float64)
    return Batch(observations, actions, rewards, following, ended)


def noise(seed: int = 2) -> Tensor:
    return torch.randn(2, SIZE, ACTIONS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_critic(weights: dict[str, Tensor], index: int, observations: Tensor, actions: Tensor) -> Tensor:
    p = {name: value[index] for name, value in weights.items()}
    x = linear(torch.cat([observations, actions], 1), p["embed.weight"], p["embed.bias"])
    y = layer_norm(x, (8,), p["head.0.norm.weight"], p["head.0.norm.bias"], 1e-6)
    y = relu(linear(y, p["head.0.expand.weight"], p["head.0.expand.bias"]))
    x = x + linear(y, p["head.0.contract.weight"], p["head.0.contract.bias"])
    x = layer_norm(x, (8,), p["head.1.weight"], p["head.1.bias"], 1e-6)
    return linear(x, p["head.2.weight"], p["head.2.bias"])[:, 0]


def draw_action(actor: Actor, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = actor(observations)
    normal = Independent(Normal(mean, log_std.exp()), 1)
    squashed = TransformedDistribution(normal, TanhTransform(cache_size=1))
    action = torch.tanh(mean + log_std.exp() * noise)
    return action, squashed.log_prob(action)


def after_adamw(loss: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights after a first step, at which the bias-corrected moments are g and g^2."""
    step = {name: g / (g.abs() + 1e-8) for name, g in zip(weights, grad(loss, list(weights.values())))}
    return {name: (p * (1 - RATE * DECAY) - RATE * step[name]).detach() for name, p in weights.items()}


def test_one_update_equals_the_reference(fidelity):
    ours, data, eps = learner(), batch(), noise()
    actor, alpha = deepcopy(ours.actor), ours.temperature().item()
    critics, targets = (dict(deepcopy(net).named_parameters()) for net in (ours.critics, ours.target))

    action, log_density = draw_action(actor, data.observations, eps[0])
    lowest = torch.minimum(*(one_critic(critics, i, data.observations, action) for i in range(2)))
    actor_loss = (alpha * log_density - lowest).mean()
    new_actor = after_adamw(actor_loss, dict(actor.named_parameters()))
    actor.load_state_dict(new_actor)
    entropy = -log_density.mean().item()
    new_log_alpha = math.log(alpha) - RATE * math.copysign(1, entropy - TARGET_ENTROPY)

    with torch.no_grad():
        following, density = draw_action(actor, data.next_observations, eps[1])
        values = torch.minimum(*(one_critic(targets, i, data.next_observations, following) for i in range(2)))
        soft = values - math.exp(new_log_alpha) * density
        wanted = data.rewards + DISCOUNT * (1 - data.terminated) * soft
    errors = [one_critic(critics, i, data.observations, data.actions) - wanted for i in range(2)]
    critic_loss = (errors[0] ** 2 + errors[1] ** 2).mean()
    new_critics = after_adamw(critic_loss, critics)

    told = update(ours, data, eps)
    assert told["actor_loss"].item() == pytest.approx(actor_loss.item(), rel=1e-9)
    assert told["critic_loss"].item() == pytest.approx(critic_loss.item(), rel=1e-9)
    assert ours.temperature.log_alpha.item() == pytest.approx(new_log_alpha, rel=1e-6)
    slow = {name: (1 - TAU) * old + TAU * new_critics[name] for name, old in targets.items()}
    after = {"actor": (ours.actor, new_actor), "critics": (ours.critics, new_critics)}
    for what, (net, wanted) in (after | {"target critics": (ours.target, slow)}).items():
        differences = [(p - wanted[name]).abs().max().item() for name, p in net.named_parameters()]
        what = f"{what} after one update, against a second implementation"
        fidelity("reference", "fig4b", what, max(differences), 1e-8)


def test_a_method_sees_the_gradients_before_each_step_with_those_of_its_penalty_and_may_change_them():
    """Under a penalty c/2 ||p||^2 each gradient is c p greater. Zeroed before the step, it moves nothing."""
    found = []
    for coefficient in (0.0, 0.25):
        ours, seen = learner(), {}
        start = deepcopy([p for name in ("actor", "critics") for p in ours.trained[name]])

        def before_step(name: str, ours: Learner = ours, seen: dict = seen) -> None:
            seen[name] = [p.grad.clone() for p in ours.trained[name]]
            ours.optimizers[name].param_groups[0]["weight_decay"] = 0.0
            for p in ours.trained[name]:
                p.grad.zero_()

        both = ours.trained["actor"] + ours.trained["critics"]
        update(ours, batch(), noise(), 0.5 * coefficient * sum(p.square().sum() for p in both), before_step)
        assert list(seen) == ["actor", "critics"] and all(map(torch.equal, both, start))
        assert all(p.grad is not None for p in both)
        found.append(seen["actor"] + seen["critics"])
    for without, under, p in zip(*found, start, strict=True):
        torch.testing.assert_close(under, without + 0.25 * p)
        assert without.any() or p.ndim == 1


def test_bf16_updates_stay_near_float32_ones_and_keep_large_values_apart():
    """Values near 80, as late in a run: bfloat16 has steps of 0.5 there."""

    def updated(precision: str) -> tuple[dict[str, Tensor], Learner]:
        half = learner()
        for net in half.nets().values():
            net.float()
        for net in (half.critics, half.target):
            net.head[-1].bias.data.fill_(80.0)
        half.precision = precision
        half.optimizers = half.new_optimizers()
        return update(half, Batch(*(x.float() for x in batch() if x is not None)), noise().float()), half

    (exact, ours), (rounded, theirs) = updated("fp32"), updated("bf16")
    for name, value in exact.items():
        assert rounded[name].dtype == torch.float32
        assert rounded[name].item() == pytest.approx(value.item(), rel=5e-4, abs=0.02), name
    assert any(rounded[name].item() != exact[name].item() for name in exact)
    for name, net in theirs.nets().items():
        assert all(p.dtype == torch.float32 for p in net.parameters()), name
    gaps = [(a - b).abs().max() for a, b in zip(ours.critics.parameters(), theirs.critics.parameters())]
    assert max(gaps) <= 2.1 * RATE  # Adam's first step is at most one rate in either direction


def over_a_boundary(ours: Learner, method: str, number: int = 0) -> list[dict]:
    """Figures of three updates before a method's boundary and three after it, with batches and noise of this number."""
    nets, followers = {"actor": ours.actor, "critics": ours.critics}, [(ours.target, ours.critics)]
    how = {"followers": followers, "optimizer_state": "keep", "renew": ours.new_optimizers}
    treatment = attach(method, nets, ours.optimizers, **how)
    ours.optimizers, figures = treatment.optimizers, []
    for step in range(6):
        if step in (0, 3):
            treatment.boundary(step // 3)
        if step == 4 and method == "none":  # as a method may that replaces weights
            for parameter in ours.actor.parameters():
                parameter.data = 0.9 * parameter.data
        data, eps = batch(100 * number + step), noise(100 * number + step)
        figures.append(update(ours, data, eps, treatment.penalty(), treatment.before_step))
        treatment.after_step()
    return figures


@pytest.mark.parametrize("method", ["plasticity_injection", "muon", "l2_init", "none"])
def test_traced_passes_follow_a_method_across_the_boundary(method):
    plain, traced = learner(), learner()
    traced.passes = [captured(f, torch.device("cpu"), backend="aot_eager") for f in (actor_pass, critic_pass)]
    for each in (plain, traced):
        over_a_boundary(each, method)
    for net, values in plain.nets().items():
        torch.testing.assert_close(dict(traced.nets()[net].state_dict()), dict(values.state_dict()))
