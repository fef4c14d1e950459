"""Games: the protocol step by step, stacks against the gymnasium wrappers, and resume to the exact moment."""

from functools import partial

import numpy as np
import pytest
import torch

from fire_core.errors import UserError
from rl.dqn.env import Games
from rl.dqn.games import CatchBackend


def play(games, steps, seed=0):
    generator = np.random.default_rng(seed)
    return [games.step(generator.integers(games.actions, size=games.count)) for _ in range(steps)]


def test_frames_rewards_scores_and_ends_equal_the_gymnasium_wrapper_stack():
    """Same actions through ALE's own gymnasium environment, skip and max and grey and resize done by the wrappers."""
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    plain, rules = gymnasium.make("BreakoutNoFrameskip-v4"), {"noop_max": 0, "terminal_on_life_loss": False}
    processed = gymnasium.wrappers.AtariPreprocessing(plain, frame_skip=4, **rules)
    reference = gymnasium.wrappers.FrameStackObservation(processed, 4, padding_type="reset")
    games, generator = Games("breakout", 1, (84, 84), seed=0, sticky=0.0), np.random.default_rng(4)
    expected, observed, scores, rewards = reference.reset(seed=0)[0], games.reset(), [], 0.0
    near = partial(np.testing.assert_allclose, rtol=0, atol=1)
    for _ in range(900):
        near(observed[0].astype(int), expected)
        action = int(generator.integers(games.actions))
        expected, reward, terminated, _, _ = reference.step(action)
        step = games.step(np.array([action]))
        observed = step.observations
        assert (step.rewards[0], step.terminated[0]) == (reward, terminated)
        rewards += reward
        if terminated:
            scores, rewards = [*scores, rewards], 0.0
            assert step.finished[0][0] == scores[-1]
            near(step.final_frames[0].astype(int), expected[-1])
            expected, _ = reference.reset()
    assert len(scores) >= 2 and max(scores) > 0


def test_sticky_actions_repeat_the_executed_action_a_quarter_of_the_time():
    games = Games("catch", 50, (7, 7), seed=3)
    games.reset()
    kept = total = 0
    for number in range(300):
        before, chosen = games.executed.copy(), np.full(50, number % 3)
        step = games.step(chosen)
        running = ~(step.terminated | step.truncated)
        differs = running & (before != chosen)
        kept += (games.executed[differs] == before[differs]).sum()
        total += differs.sum()
        assert (games.executed[~running] == 0).all()
    assert total > 5000 and abs(kept / total - 0.25) < 0.025


@pytest.mark.parametrize("game, reseed_after", [("demon_attack", 60), ("demon_attack", 5000), ("catch", 60)])
def test_state_dict_returns_to_the_exact_moment(game, reseed_after, monkeypatch, tmp_path):
    monkeypatch.setattr("rl.dqn.games.RESEED_AFTER", reseed_after)
    games = Games(game, 2, (42, 42), seed=5)
    games.reset()
    play(games, 1300)
    torch.save(games.state_dict(), tmp_path / "state")
    expected, again = play(games, 150, seed=2), Games(game, 2, (42, 42), seed=99)
    again.reset()
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    np.testing.assert_equal(play(again, 150, seed=2), expected)


def test_catch_rewards_by_hand():
    backend = CatchBackend(1, (7, 7), seed=0)
    backend.reset()
    backend.ball[0], backend.paddle[0] = (0, 2), 4
    rewards = [backend.step(np.array([action]))[1:3] for action in (0, 0, 1, 1, 1, 1)]
    assert [float(r[0]) for r, _ in rewards] == [0, 0, 0, 0, 0, 1.0]
    assert [bool(t[0]) for _, t in rewards] == [False] * 5 + [True]
    backend.ball[0], backend.paddle[0] = (5, 2), 4
    frames, reward, terminated, _ = backend.step(np.array([0]))
    assert reward[0] == -1 and terminated[0]
    assert frames[0, 6, 2] == frames[0, 6, 3] == 255 and frames.sum() == 2 * 255
    with pytest.raises(UserError, match="catch needs at least 7"):
        Games("catch", 1, (5, 5), seed=0)


def test_an_episode_at_the_limit_of_frames_is_truncated_not_terminated(monkeypatch):
    monkeypatch.setattr("rl.dqn.games.LONGEST", 100)
    short = Games("freeway", 1, (42, 42), seed=0)
    short.reset()
    steps = play(short, 101)
    ends = [i for i, step in enumerate(steps) if step.truncated[0]]
    assert ends == [99] and not any(step.terminated[0] for step in steps)
