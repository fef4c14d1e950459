"""Tasks behind the SAC script: scaling, action repeat, saved simulator state, mistakes."""

import numpy as np
import pytest

pytest.importorskip("mujoco")
import gymnasium
from gymnasium.spaces import Box

from harness.runs import checkpoint
from rl.evaluate import play_episodes
from rl.sac import env
from rl.sac.env import EvaluationTasks, Task


class Counter(gymnasium.Env):
    """Pays the third of its four scaled actions, which it takes as a square, and ends after five steps."""

    observation_space, action_space = Box(-10, 10, (1,), np.float64), Box(0.0, 4.0, (2, 2), np.float64)

    def reset(self, *, seed=None, options=None):
        self.age = 0
        return np.array([float(seed or 0)]), {}

    def step(self, action):
        self.age += 1
        return np.array([float(self.age)]), float(action[1, 0]), self.age == 5, False, {}


@pytest.fixture(autouse=True)
def environments(monkeypatch):
    make = env.open_environment
    monkeypatch.setattr(env, "open_environment", lambda name: Counter() if name == "counter" else make(name))


def test_actions_are_scaled_and_shaped_rewards_summed_and_the_repeat_stops_at_the_end():
    task = Task("counter", action_repeat=3)
    task.reset(0)
    observation, reward, terminated, _ = task.step(np.array([0.0, 0.25, 0.5, 0.75]))
    assert (observation.tolist(), reward, terminated) == ([3.0], 9.0, False)
    observation, reward, terminated, _ = task.step(np.full(4, -1.0))
    assert (observation.tolist(), reward, terminated) == ([5.0], 0.0, True)


def test_evaluation_counts_one_whole_episode_a_task_and_lets_ended_ones_rest():
    tasks = EvaluationTasks(2, "counter", action_repeat=1)
    tasks.tasks[1].environment.step = lambda action: (np.array([1.0]), 1.0, False, False, {})
    result = play_episodes(tasks, lambda o: np.ones((2, 4)), 2, max_steps=8)
    assert sorted(result.returns) == [8.0, 20.0] and tasks.tasks[0].environment.age == 5
    assert result.unfinished == 1


@pytest.mark.parametrize("name", ["Hopper-v5", "Humanoid-v5", "Pusher-v5", "h1-balance_simple-primitive-v0"])
def test_a_restored_task_goes_on_bit_for_bit(name, tmp_path):
    def play(task: Task, steps: range) -> list:
        outcomes = []
        for step in steps:
            observation, *others = task.step(np.random.default_rng(step).uniform(-1, 1, task.action_size))
            outcomes.append((observation.tolist(), *others))
            if True in others[1:]:  # terminated or truncated
                task.reset(seed=step)
        return outcomes

    task, other = Task(name), Task(name)
    task.reset(seed=3)
    other.reset(seed=99)
    play(task, range(8))
    checkpoint.save(tmp_path, 0, task.state_dict(), name="task")
    play(other, range(100, 103))
    other.load_state_dict(checkpoint.load(tmp_path / "task.pt"))
    counted = [getattr(holder, name) for holder, name in env.counters(other.environment)]
    assert 8 in counted  # to the time limit
    assert play(other, range(8, 40)) == play(task, range(8, 40))
