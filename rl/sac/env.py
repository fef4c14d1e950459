"""Tasks of gymnasium and our own H1 tasks with a common interface: actions in [-1, 1], action repeat, saved state."""

import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, flatdim, flatten

import rl.sac.humanoid  # noqa: F401 (registers the H1 tasks)
from fire_core.errors import UserError, first_line


class Task:
    """One environment. Observations are flat float64 vectors, actions arrays in [-1, 1]; `observation` is the latest.

    One `step` repeats the action up to `action_repeat` times, adds up the rewards and stops at the end of the episode.
    Raises UserError unless the environment exists and its actions are a bounded box.
    """

    def __init__(self, name: str, action_repeat: int = 1):
        self.environment, self.action_repeat = open_environment(name), action_repeat
        space = self.environment.action_space
        if not isinstance(space, Box) or not space.is_bounded():
            raise UserError(f"env {name!r} has actions {space}; SAC needs a bounded box of real numbers")
        self.seed = 0
        self.low, self.half_range = space.low, 0.5 * (space.high - space.low)
        self.action_size = flatdim(space)
        self.observation_size = flatdim(self.environment.observation_space)
        self.observation = np.zeros(self.observation_size)

    def reset(self, seed: int) -> np.ndarray:
        """Start an episode that depends on `seed` alone and return its first observation (observation_size,)."""
        self.seed = seed
        self.observation = self._flat(self.environment.reset(seed=seed)[0])
        return self.observation

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """Return observation, summed reward, terminated, truncated."""
        total = 0.0
        scaled = self.low + (np.reshape(action, self.low.shape) + 1) * self.half_range
        for _ in range(self.action_repeat):
            observation, reward, terminated, truncated, _ = self.environment.step(scaled)
            total += float(reward)
            if terminated or truncated:
                break
        self.observation = self._flat(observation)
        return self.observation, total, bool(terminated), bool(truncated)

    def _flat(self, observation: Any) -> np.ndarray:
        return np.asarray(flatten(self.environment.observation_space, observation), dtype=np.float64)

    def state_dict(self) -> dict:
        """Return all that the next step depends on. Randomness is drawn at resets alone. Raises UserError without MuJoCo.

        Heights and forces that a task reads are one step of physics older than positions, so all arrays are stored.
        """
        data, observation = physics(self.environment), torch.from_numpy(self.observation.copy())
        arrays = {name: torch.from_numpy(array.copy()) for name, array in arrays_of(data).items()}
        counts = [getattr(holder, name) for holder, name in counters(self.environment)]
        now = {"seed": self.seed, "observation": observation, "time": data.time}
        return now | {"arrays": arrays, "counters": counts}

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned, bit for bit."""
        # Some tasks draw a part of the model, such as a goal, at the start of an episode.
        self.reset(state["seed"])
        self.observation = state["observation"].numpy().copy()
        data = physics(self.environment)
        data.time = state["time"]
        for name, array in arrays_of(data).items():
            if name in state["arrays"] and state["arrays"][name].shape == array.shape:
                array[...] = state["arrays"][name].numpy()
        for (holder, name), value in zip(counters(self.environment), state["counters"], strict=True):
            setattr(holder, name, value)


def open_environment(name: str) -> gymnasium.Env:
    """Return the environment of a registered id. Raises UserError if it cannot be made."""
    say_warnings_once()
    # older versions of MuJoCo tasks still run as they are
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        try:
            return gymnasium.make(name)
        except (ImportError, gymnasium.error.Error) as error:
            raise UserError(f"env {name!r} cannot be made: {first_line(error)}") from error


@lru_cache
def say_warnings_once() -> None:
    """Print each MuJoCo warning once, as one line. By default MuJoCo prints more, and writes a log where it is started."""
    from rl.sac.humanoid.environment import mujoco

    said = lru_cache(maxsize=1000)(lambda text: print(f"MuJoCo: {text}", file=sys.stderr))
    mujoco.set_mju_user_warning(lambda text: said(text.partition(" Time = ")[0]))


def physics(environment: gymnasium.Env) -> Any:
    """Return the MjData of a MuJoCo environment. Raises UserError for other environments."""
    inner = environment.unwrapped
    if not hasattr(inner, "data"):
        remedy = "it runs only with run.trunk=false run.checkpoint_seconds=1e9 run.checkpoint_steps=0"
        wrong = f"{type(inner).__name__} is not a MuJoCo task, so its state cannot be saved"
        raise UserError(f"{wrong}: {remedy}, and is lost if it is stopped")
    return inner.data


def arrays_of(data: Any) -> dict[str, np.ndarray]:
    """Return the writable float64 arrays of MjData by name, without those of constraints, which each step recomputes."""
    values = {name: getattr(data, name) for name in dir(data) if not name.startswith(("_", "efc_", "iefc_"))}
    arrays = {name: v for name, v in values.items() if isinstance(v, np.ndarray) and v.dtype == np.float64}
    return {name: array for name, array in arrays.items() if array.flags.writeable and array.size}


def counters(environment: gymnasium.Env) -> list[tuple[Any, str]]:
    """Return (object, attribute) of every step counter of the episode, in the wrappers and the environment."""
    layers = [environment]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    return [(layer, n) for layer in layers for n in ("_elapsed_steps", "_has_reset") if n in vars(layer)]


class EvaluationTasks:
    """`count` tasks for `rl.evaluate.play_episodes`, which step together and play one episode each.

    A task whose episode has ended is not simulated until the next `reset`; its reward is 0.
    """

    def __init__(self, count: int, name: str, action_repeat: int):
        self.tasks, self.count = [Task(name, action_repeat) for _ in range(count)], count
        self.seeds = list(range(count))

    def use_seeds(self, seeds: Sequence[int]) -> None:
        """Set the seed of the next episode of each task."""
        self.seeds = list(seeds)

    def reset(self) -> np.ndarray:
        """Start all episodes and return observations (count, size)."""
        self.observations = np.stack([task.reset(seed) for task, seed in zip(self.tasks, self.seeds)])
        self.ended = np.zeros(self.count, dtype=bool)
        return self.observations.copy()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step every episode that has not ended. Return observations, rewards, terminated, truncated of all."""
        rewards = np.zeros(self.count)
        terminated, truncated = np.zeros((2, self.count), bool)
        for index in np.flatnonzero(~self.ended):
            outcome = self.tasks[index].step(actions[index])
            self.observations[index], rewards[index], terminated[index], truncated[index] = outcome
        self.ended |= terminated | truncated
        return self.observations.copy(), rewards, terminated, truncated
