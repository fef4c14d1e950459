"""The SAC script as a user runs it: forks of one midpoint, what is renewed, what is measured."""

from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from training_scripts import Script, compose_config, killed, metrics_of

pytest.importorskip("mujoco")

from harness.naming import label
from rl.replay import Batch
from rl.sac.policy import RunningNormaliser, exploit, explore
from rl.sac.update import build

SCRIPT = Script("rl/sac/train.py", "rl.sac.humanoid.environment")


def test_fair_counts_every_observation_and_renews_the_run_without_intervention_too(root, fair):
    untreated = after_one_update(root, "none")
    for saved in (fair, untreated):
        assert saved["at"]["step"] == 61
        assert saved["kept"]["normaliser"]["count"] == pytest.approx(1e-4 + 61 + saved["at"]["episode"] + 1)
    assert steps_of(untreated, "actor") == steps_of(untreated, "temperature") == {1}
    assert untreated["at"]["episode"] == fair["at"]["episode"]  # the one that ran at the midpoint goes on


def test_killed_after_the_last_step_the_results_are_still_there(tmp_path):
    line = ["experiment=fig4b_hopper", "method=none", "run.checkpoint_steps=30"]
    SCRIPT.train(tmp_path, *line, before=killed("step >= 120"), expect=9)
    SCRIPT.train(tmp_path, *line)
    (summary,) = tmp_path.glob("fig4b_hopper/smoke/none*/seed_1/summary.json")
    assert "eval_return" in summary.read_text()


def after_one_update(root: Path, method: str, *more: str, before: str = "") -> dict:
    """The checkpoint of a Hopper run one step, and one update, after the midpoint at step 60."""
    line = ["experiment=fig4b_hopper", "run.checkpoint_steps=1", f"method={method}", *more]
    SCRIPT.train(root, *line, before=before + killed("step >= 61"), expect=9)
    path = f"fig4b_hopper/smoke/{label(method, list(more))}/seed_1/checkpoint/step_000000000061.pt"
    return torch.load(root / path, weights_only=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def fair(root) -> dict:
    return after_one_update(root, "fire")


def steps_of(saved: dict, name: str) -> set[float]:
    """How often each parameter's moments in an optimizer have been updated."""
    return {float(memory["step"]) for memory in saved["treatment"]["optimizers"][name]["state"].values()}


def test_at_the_boundary_the_target_is_a_copy_and_optimizers_are_as_the_policy_says(root, fair):
    """One update moves a weight by a learning rate of 1e-3 at most, FIRE moves most by far more. It moves the temperature's
    logarithm by one learning rate, and thirty in one direction by thirty."""
    for name, critic in fair["treatment"]["nets"]["critics"].items():
        assert (fair["kept"]["target"][name] - critic).abs().max() < 2e-3, name
    assert steps_of(fair, "critics") == steps_of(fair, "actor") == steps_of(fair, "temperature") == {1}
    keep = ["boundary.normaliser=renew", "boundary.temperature=keep", "optimizer_state=keep"]
    kept = after_one_update(root, "fire", *keep)
    assert steps_of(kept, "critics") == steps_of(kept, "actor") == {31}  # updates begin after step 30
    gone = [abs(run["kept"]["temperature"]["log_alpha"].item() - np.log(0.01)) for run in (fair, kept)]
    rate = compose_config("sac", ["experiment=fig4b_hopper", "size=smoke"]).learning_rate
    assert gone[0] <= 1.01 * rate and gone[1] > 10 * rate
    changed = after_one_update(root, "fire", "optimizer_state=clear_changed")
    assert steps_of(changed, "critics") == {1, 31} and steps_of(changed, "temperature") == {1}
    # renewed from the 60 stored observations; then the one of step 61, and a new episode's if it ended there
    assert kept["kept"]["normaliser"]["count"] - 1e-4 == pytest.approx(60 + 1, abs=1)


def test_steps_and_returns_are_those_of_the_environment(tmp_path):
    SCRIPT.train(tmp_path, "experiment=fig4b_balance_simple_primitive", "method=none")
    [path] = tmp_path.glob("trunks/*/checkpoint/end.pt")
    kept = torch.load(path, weights_only=True)["kept"]
    rows, observations = kept["replay"]["rows"][:60].numpy(), len(kept["normaliser"]["mean"])
    # ... reward, next observation, terminated
    episodes = np.split(rows[:, -observations - 2], np.flatnonzero(rows[:, -1]) + 1)
    returns = [rewards.sum() for rewards in episodes[:-1]]
    assert len(returns) >= 2
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines] == [0, 120, 120, 240]
    assert lines[1]["train_return"] == pytest.approx(np.mean(returns), rel=1e-5)
    assert lines[1]["eval_normalized"] == pytest.approx((lines[1]["eval_return"] - 9.391) / (800 - 9.391))


def test_a_truncated_step_is_stored_as_one_that_goes_on(tmp_path):
    limit = "import gymnasium, rl.sac.env as env; make = env.open_environment; "
    limit += "env.open_environment = lambda name: gymnasium.wrappers.TimeLimit(make(name), 7)"
    saved = after_one_update(tmp_path, "none", before=limit)
    assert saved["at"]["episode"] >= 8 and saved["kept"]["replay"]["rows"][:, -1].sum() < 3


def test_the_policy_reads_normalised_observations_and_explores_around_its_mean():
    cfg = compose_config("sac", ["experiment=fig4b_hopper", "size=smoke"])
    learner, normaliser = build(cfg, 11, 3, torch.device("cpu")), RunningNormaliser(11)
    assert learner.target_entropy == -1.5
    before, *observations = np.random.default_rng(3).normal(3.0, 5.0, (3, 100, 11))
    normaliser.update(before)
    inputs, following = (torch.from_numpy(normaliser.normalise(each)) for each in observations)
    with torch.no_grad():
        mean, log_std = learner.actor(inputs)
    greedy = exploit(learner, normaliser, observations[0])
    np.testing.assert_allclose(greedy, mean.tanh(), rtol=1e-6)
    noise = torch.randn(1, 3, generator=torch.Generator().manual_seed(5))
    action = explore(learner, normaliser, observations[0][0], torch.Generator().manual_seed(5))
    np.testing.assert_allclose(action, (mean[0] + log_std[0].exp() * noise[0]).tanh(), rtol=1e-5)
    assert np.abs(action - greedy[0]).max() > 1e-3
    raw, later = (torch.from_numpy(each).float() for each in observations)
    batch = normaliser.batch(Batch(raw, raw, raw, later, raw))
    torch.testing.assert_close((batch.observations, batch.next_observations), (inputs, following))


def test_a_task_whose_state_cannot_be_saved_runs_without_trunk_and_checkpoints(tmp_path):
    line = ["experiment=fig4b_hopper", "env.name=Pendulum-v1", "method=fire"]
    never = "run.trunk=false run.checkpoint_seconds=1e9"
    assert f"only with {never}" in SCRIPT.train(tmp_path, *line, expect=2)
    SCRIPT.train(tmp_path, *line, *never.split())


@pytest.mark.parametrize("task", ["walk", "balance_simple", "run"])
def test_paper_settings_number_by_number(task, fidelity):
    cfg = compose_config("sac", [f"experiment=fig4b_{task}", "size=paper"])
    released = {
        "env.name": f"h1-{task}-v0", "env.action_repeat": 2, "steps": 500_000, "midpoint": 250_000,
        "learning_starts": 5000, "updates_per_step": 2, "batch_size": 256, "replay": 1_000_000,
        "learning_rate": 1e-4, "weight_decay": 0.01, "tau": 0.005, "discount": 0.99, "temperature": 0.01,
        "target_entropy": 0.5, "actor.width": 128, "actor.blocks": 1, "critic.width": 512,
        "critic.blocks": 2, "critic.count": 2, "eval_every": 10_000, "eval_episodes": 10,
        "compat": "official", "method.name": "fire", "method.iterations": 10, "method.targets": "all",
    }  # fmt: skip
    differing = [key for key, value in released.items() if OmegaConf.select(cfg, key) != value]
    fidelity("reference", f"fig4b_{task}", "settings that differ from the released script", len(differing), 0)
