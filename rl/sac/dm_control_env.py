"""DeepMind control suite tasks ("humanoid-walk") as gymnasium environments."""

from importlib.metadata import version
from typing import Any

import gymnasium
import numpy as np
from dm_control import suite
from gymnasium.spaces import Box

from fire_core.errors import UserError


class DmControl(gymnasium.Env):
    """One suite task: observations concatenated in the suite's order, 1000 steps, rewards in [0, 1] per step.

    An episode that ends by its time limit is truncated; one that the task ends with discount 0 is terminated. Raises
    UserError for an unknown task, and where dm_control and MuJoCo do not fit together.
    """

    def __init__(self, name: str):
        domain, _, task = name.partition("-")
        if (domain, task) not in suite.ALL_TASKS:
            known = (
                ", ".join(sorted(f"{d}-{t}" for d, t in suite.ALL_TASKS if d == domain))
                or "humanoid-walk, ..."
            )
            raise UserError(f"dm_control task {name!r} does not exist; known: {known}")
        self.domain, self.task = domain, task
        self._load(seed=0)
        actions = self.suite.action_spec()
        self.action_space = Box(actions.minimum, actions.maximum, dtype=np.float64)
        size = sum(int(np.prod(spec.shape)) for spec in self.suite.observation_spec().values())
        self.observation_space = Box(-np.inf, np.inf, (size,), np.float64)

    def _load(self, seed: int) -> None:
        try:
            self.suite = suite.load(
                self.domain, self.task, task_kwargs={"random": np.random.RandomState(seed)}
            )
        except AttributeError as error:
            pair = f"dm-control {version('dm-control')} does not fit mujoco {version('mujoco')}"
            raise UserError(f"{pair} ({error}): make install-control") from error

    @property
    def model(self) -> Any:
        """The MjModel inside the suite's wrapper."""
        return self.suite.physics.model.ptr

    @property
    def data(self) -> Any:
        """The MjData inside the suite's wrapper."""
        return self.suite.physics.data.ptr

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Start an episode and return (observation, {}). Without `seed`, the task's random stream continues."""
        super().reset(seed=seed)
        if seed is not None:
            self.suite.task.random.seed(seed % 2**32)
        return flat(self.suite.reset().observation), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Return observation, reward, terminated, truncated and an empty dict."""
        moment = self.suite.step(action)
        terminated = moment.last() and moment.discount == 0.0
        return (
            flat(moment.observation),
            float(moment.reward),
            terminated,
            moment.last() and not terminated,
            {},
        )


def flat(observation: dict[str, Any]) -> np.ndarray:
    """Return all entries of an observation one after the other, float64."""
    return np.concatenate([np.ravel(value) for value in observation.values()]).astype(np.float64)
