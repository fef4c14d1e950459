"""The DQN script end to end, by the checkpoints that it leaves."""

import pytest
import torch
from training_scripts import Script, compose_config, killed, metrics_of

from rl.dqn.train import make_net

SCRIPT = Script("rl/dqn/train.py")


def train(root, last, *more):
    """One run with a checkpoint after each step of its four games, killed after that of step `last`."""
    what = ["experiment=fig4a_breakout", "run.checkpoint_steps=4", *more]
    SCRIPT.train(root, *what, before=killed(f"step >= {last}"), expect=9)


def test_rewards_are_clipped_for_learning_and_counted_raw(tmp_path):
    """Points of Asterix are 50 and more: the replay holds signs, returns the points."""
    game = ["env.game=asterix", "env.frame_size=42", "random_episodes=4", "eval_max_steps=100"]
    train(tmp_path, 404, "method=none", *game)  # after the first phase
    [end] = (tmp_path / "trunks").glob("*/checkpoint/end.pt")
    assert set(parts(end)["replay"]["facts"]["rewards"].unique().tolist()) == {0.0, 1.0}
    first = metrics_of(tmp_path)[0]
    assert first["random_return"] >= 50 and first["eval_return"] % 12.5 == 0
    score = (first["eval_return"] - 210.0) / (8503.3 - 210.0)  # of random actions, and of people
    assert first["eval_normalized"] == pytest.approx(score)


def parts(path):
    """Where a run stood, its network, optimizer, target network, games and replay."""
    saved = torch.load(path, weights_only=True)
    trained = saved["treatment"]
    own = {"net": trained["nets"]["net"], "optimizer": trained["optimizers"]["net"]}
    return {"at": saved["at"], **own, **saved["kept"]}


def adam_steps(saved):
    """How often the moments of each parameter were updated, by name."""
    names = [name for name in saved["net"] if not name.startswith("head.old")]
    return {names[key]: int(memory["step"]) for key, memory in saved["optimizer"]["state"].items()}


def test_the_loop_acts_greedily_updates_and_copies_the_target_when_it_should(tmp_path):
    train(tmp_path, 376, "method=none", "run.keep=1000", "epsilon_final=0.0", "updates_per_transition=0.5")
    found = {int(path.stem.split("_")[1]): parts(path) for path in tmp_path.rglob("step_*.pt")}
    assert sorted(found) == list(range(4, 377, 4))
    actions = found[376]["replay"]["facts"]["actions"].numpy()
    net, greedy, copies = make_net(compose_config("dqn", ["size=smoke"]), 3), {}, []
    for step, saved in sorted(found.items()):
        net.load_state_dict(saved["net"])
        with torch.no_grad():
            best = net(saved["games"]["observations"]).argmax(dim=1).numpy()
        greedy[step] = step == 376 or bool((actions[step // 4] == best).all())
        assert saved["at"]["updates"] == max(0, step - 80) // 4 * 2
        assert set(adam_steps(saved).values()) <= {saved["at"]["updates"]}
        if step > 80 and all(map(torch.equal, saved["target"].values(), saved["net"].values())):
            copies.append(step)
        elif step > 80:
            assert all(map(torch.equal, saved["target"].values(), found[step - 4]["target"].values()))
    assert copies == [120, 160, 200, 240, 280, 320, 360]
    assert all(greedy[step] for step in greedy if step >= 280)  # epsilon_steps=200 after learning_starts=80
    assert not all(greedy[step] for step in greedy if step < 80)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Of runs that share their first phase."""
    return tmp_path_factory.mktemp("runs")


POLICIES = [
    (["optimizer_state=keep"], None, 5), (["optimizer_state=clear_changed"], ".bias", 5),
    (["optimizer_state=clear"], "", 5), (["compat=official", "optimizer_state=keep"], None, 1),
]  # fmt: skip


@pytest.mark.parametrize("settings, stale, age", POLICIES)
def test_the_boundary_follows_the_target_rule_the_optimizer_policy_and_compat(root, settings, stale, age):
    """One step and one update after it. Adam has 81 updates, or one where its moments were forgotten; Catch's episodes
    last six steps, so the ones that run at step 400 are four steps old unless they were restarted."""
    train(root, 404, "method=fire", *settings)
    [path] = (root / "fig4a_breakout/smoke" / "-".join(["fire", *settings])).rglob("step_*404.pt")
    saved = parts(path)
    for name, value in saved["net"].items():
        assert (saved["target"][name] - value).abs().max() < 3e-3, name  # FIRE moves most weights by far more
    kept = {name for name, steps in adam_steps(saved).items() if steps == 81}
    if stale is None:
        assert kept == set(saved["net"])
    else:
        assert kept == {name for name in saved["net"] if stale and name.endswith(stale) and "encoder" in name}
        assert set(adam_steps(saved).values()) <= {1, 81}
    assert set(saved["games"]["lengths"]) == {age}
