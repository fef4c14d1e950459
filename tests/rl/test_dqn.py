"""DQN: one update by hand, network, exploration, settings that do not fit, experiments."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tiny_nets import largest, linear
from training_scripts import compose_config

import rl.dqn.learn
from fire_core import State, UserError, snapshot
from fire_core.methods import create
from rl.captured import captured
from rl.dqn.learn import Learner, epsilon, gradients, td_targets, update
from rl.dqn.measure import Window, measure_network
from rl.dqn.network import DQN
from rl.dqn.play import act, random_play
from rl.replay import Batch


def two_transitions():
    before, after = torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [5.0]])
    actions, rewards, terminated = torch.tensor([0, 1]), torch.tensor([1.0, -1.0]), torch.tensor([0.0, 1.0])
    return Batch(before, actions, rewards, after, terminated)


def random_batch(count, size):
    observations, following = torch.randint(0, 256, (2, count, 4, size, size), dtype=torch.uint8)
    actions = torch.randint(0, 3, (count,))
    return Batch(observations, actions, torch.randn(count), following, torch.zeros(count))


def learner(weights=((1.0,), (2.0,)), **changes):
    """Two networks of one layer each, whose inputs and outputs are worked out below."""
    return Learner(linear(weights), linear([[3.0], [4.0]]), 0.9, **changes)


def with_sgd(net, penalty=lambda: 0.0):
    """What `update` needs of an attached method."""
    known = ["optimizer", "penalty", "before_step", "after_step"]
    return Mock(spec=known, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), penalty=penalty)


def test_one_update_by_hand(fidelity):
    """Targets 1 + 0.9 * max(6, 8) = 8.2 and -1; values 1 and 4; Huber 6.7 and 4.5; slopes -1 and 1. The second update is
    one with a method's penalty, the sum of the weights."""
    ours, batch = learner(), two_transitions()
    torch.testing.assert_close(td_targets(ours, batch), torch.tensor([8.2, -1.0]))
    loss, mean = update(ours, with_sgd(ours.net), batch)
    torch.testing.assert_close(torch.stack([loss, mean]), torch.tensor([5.6, 3.6]))
    difference = largest(ours.net.weight[:, 0], torch.tensor([1 + 0.1 * 0.5, 2 - 0.1 * 1.0]))
    fidelity("reference", "fig4a", "weights after one update, by hand", difference, 1e-6)
    assert ours.target.weight.grad is None and ours.target.weight[:, 0].tolist() == [3.0, 4.0]
    update(ours, with_sgd(ours.net, lambda: ours.net.weight.sum()), batch)
    torch.testing.assert_close(ours.net.weight[:, 0], torch.tensor([1.05 + 0.05 - 0.1, 1.9 - 0.1 - 0.1]))


def test_double_targets_take_the_action_of_the_trained_network_and_the_discount_of_their_steps():
    """At 2 the trained net prefers action 0, worth 6 in the target net and not 8; two steps later: 1 + 0.81 * 6."""
    batch = two_transitions()._replace(steps=torch.tensor([2, 1]))
    targets = td_targets(learner(((2.0,), (1.0,)), double=True), batch)
    torch.testing.assert_close(targets, torch.tensor([1 + 0.81 * 6, -1.0]))


def test_the_pass_compiles_without_a_graph_break_and_gives_the_same_update(monkeypatch):
    results = []
    monkeypatch.setattr(rl.dqn.learn, "captured", partial(captured, backend="aot_eager"))
    for compiled in (False, True):
        ours = learner(double=True, compile=compiled)
        treatment = with_sgd(ours.net, lambda net=ours.net: net.weight.square().sum())
        figures = [*update(ours, treatment, two_transitions())]
        ours.target.load_state_dict(ours.net.state_dict())
        figures += update(ours, treatment, two_transitions())
        results.append([*figures, ours.net.weight.detach()])
    torch.testing.assert_close(*results)


def small_update(precision: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of one small network and batch, the last layer's outputs scaled to about 100."""
    torch.manual_seed(0)
    last = torch.channels_last
    net, target = (DQN(3, (21, 21), [(8, 6, 3), (8, 2, 2)], 32).to(memory_format=last) for _ in range(2))
    for each in (net, target):
        each.head[-1].bias.data.fill_(100)
    ours = Learner(net, target, 0.99, double=True, precision=precision)
    loss, _, slopes = gradients(ours, list(net.parameters()), random_batch(32, 21))
    return loss, [slope.contiguous() for slope in slopes]


def test_bf16_updates_stay_near_float32_ones_and_keep_large_values_apart():
    """Values near 100 in bfloat16 are multiples of one half; the last layer's own precision keeps the loss right."""
    (loss, slopes), (again, others) = small_update("fp32"), small_update("bf16")
    assert 0 < abs(again - loss) < 0.02
    for slope, other in zip(slopes, others, strict=True):
        assert other.dtype == torch.float32 and (other - slope).norm() < 0.1 * slope.norm()


def test_network_is_the_published_one():
    net = DQN(18)
    shapes = [tuple(p.shape) for p in net.parameters() if p.ndim > 1]
    assert shapes == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136), (18, 512)]
    for name, p in net.named_parameters():
        bound = (6 / (p.shape[0] + p.shape[1]) / p[0, 0].numel()) ** 0.5 if p.ndim > 1 else 0
        assert 0.95 * bound <= p.abs().max() <= bound, name
    pixels = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    assert torch.equal(net(pixels), net.head(net.encoder(pixels.float() / 255)))
    with pytest.raises(UserError, match="too small"):
        DQN(3, (20, 20))


def test_epsilon_follows_the_published_schedule():
    known = {0: 1, 20_000: 1, 145_000: 0.505, 270_000: 0.01, 10**6: 0.01}
    assert {step: epsilon(step, 20_000, 250_000, 0.01) for step in known} == pytest.approx(known)


@pytest.mark.parametrize("compat, together", [("official", True), ("corrected", False)])
def test_exploration_draws_once_for_all_or_for_each(compat, together):
    net = DQN(4, (12, 12), ((4, 3, 3),), 8)
    net.load_state_dict({name: torch.zeros_like(value) for name, value in net.state_dict().items()})
    net.head[-1].bias.data[3] = 1.0
    games = SimpleNamespace(count=6, actions=4, observations=np.zeros((6, 4, 12, 12), np.uint8))
    cfg, stream = OmegaConf.create({"compat": compat}), np.random.default_rng(0)
    drawn = np.stack([act(cfg, net, games, 0.5, stream) for _ in range(800)])
    greedy = (drawn == 3).mean(axis=1)
    assert abs(drawn[drawn != 3].mean() - 1) < 0.05  # the others are uniform over 0, 1, 2
    assert abs((drawn == 3).mean() - (0.5 + 0.5 / 4)) < 0.03
    assert abs((greedy == 1).mean() - (0.5 if together else 0.625**6)) < 0.05
    assert (act(cfg, net, games, 0.0, stream) == 3).all()


def trained(seed=0):
    torch.manual_seed(seed)
    net = DQN(3, (14, 14), ((8, 4, 2), (8, 3, 1)), 16)
    state = State({"net": net}, initial=snapshot({"net": net}), phase=1)
    for p in net.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return net, state


@pytest.mark.parametrize("name", ["fire", "shrink_perturb"])
def test_the_experiment_treats_convolutions_and_resets_linear_layers(name):
    net, state = trained()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    create(**compose_config("dqn", ["experiment=fig4a_asterix", f"method={name}"]).method).boundary(state)
    initial = state.initial["net"]
    for key, value in net.state_dict().items():
        if key.startswith("head"):
            assert torch.equal(value, initial[key])
        elif name == "shrink_perturb":
            torch.testing.assert_close(value, 0.2 * before[key] + 0.8 * initial[key])
        elif key.endswith("bias"):
            assert torch.equal(value, before[key])
        else:
            assert not torch.equal(value, before[key])


def test_measures_name_every_layer_and_stop_where_a_value_is_not_finite():
    (net, _), (target, _) = trained(), trained(1)
    probe, ours = random_batch(20, 14), Learner(net, target, 0.9)
    figures = measure_network(ours, probe)
    assert {"dormant_share", "feature_rank", "weight_norm", "dfi", "dfi_encoder.0.weight"} <= figures.keys()
    assert 1 <= figures["feature_rank"] <= 16 and all(p.grad is None for p in net.parameters())
    net.head[2].bias.data[0] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        measure_network(ours, probe)


def test_windows_average_since_the_last_line_and_stop_at_a_bad_loss():
    net, _ = trained()
    net(torch.zeros(1, 4, 14, 14)).sum().backward()
    window, cfg = Window(), OmegaConf.create({"precision": "fp32", "learning_rate": 0.1})
    window.episodes = [(2.0, 10), (4.0, 20)]
    window.add(torch.tensor(1.0), torch.tensor(3.0))
    window.add(torch.tensor(2.0), torch.tensor(5.0))
    figures = window.close(8, net, cfg)
    assert (figures["train_return"], figures["train_length"], figures["td_loss"]) == (3, 15, 1.5)
    assert figures["mean_target"] == 4 and window.close(9, net, cfg).keys() == {"train_episodes"}
    window.add(torch.tensor(float("nan")), torch.tensor(0.0))
    with pytest.raises(UserError, match="TD loss at step 12 is nan"):
        window.close(12, net, cfg)


def test_paper_size_is_the_published_setting(fidelity):
    cfg = compose_config("dqn", ["experiment=fig4a_asterix", "size=paper"])
    published = {
        "compat": "official", "optimizer_state": "keep", "total_steps": 2_500_000, "midpoint": 1_250_000,
        "replay_capacity": 1_000_000, "learning_starts": 20_000, "updates_per_transition": 1,
        "epsilon_steps": 250_000, "epsilon_final": 0.01, "batch_size": 32, "discount": 0.99,
        "learning_rate": 6.25e-5, "adam_epsilon": 1.5e-4, "target_every": 2000, "eval_every": 250_000,
        "eval_epsilon": 0.001, "eval_steps": 125_000,
    }  # fmt: skip
    differing = [key for key, value in published.items() if cfg[key] != value]
    fidelity("reference", "fig4a", "settings that differ from the released script", len(differing), 0)
    assert dict(cfg.env) == {"game": "asterix", "frame_size": 84, "environments": 4, "sticky": 0.25}
    assert [list(c) for c in cfg.network.convolutions] == [[32, 8, 4], [64, 4, 2], [64, 3, 1]]
    assert cfg.network.hidden == 512


def test_random_episodes_are_played_to_their_end():
    cfg = compose_config("dqn", ["size=smoke", "eval_max_steps=1"])
    assert random_play(cfg)["random_return"] != 0.0  # Catch gives nothing before its ball has come down
