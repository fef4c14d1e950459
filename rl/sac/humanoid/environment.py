"""The H1 tasks as gymnasium environments.

One step is ten physics steps of 2 ms, an episode at most 1000 steps (registered time limit). Observation: joint
positions and velocities, not scaled (51 numbers, 64 with the board). Action in [-1, 1]^19, mapped linearly to the
servo ranges. As in HumanoidBench there is no extra forward pass after the physics: heights, forces, velocity and
contacts that reward and termination read are those at the start of the last physics step, 2 ms old.
"""

from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from fire_core.errors import UserError

from .model import mjcf
from .simulator import mujoco
from .tasks import find_task, reward_terms

PHYSICS_STEPS = 10
START_NOISE = 0.01


@lru_cache
def compiled(geometry: str, board: bool) -> mujoco.MjModel:
    """Return the compiled model, which all environments of the process share: do not write to it."""
    return mujoco.MjModel.from_xml_string(mjcf(geometry, board))


class Simulation:
    """One robot in one world: physics, reward and termination, without gymnasium's bookkeeping."""

    def __init__(self, task: str, geometry: str):
        self.task = find_task(task)
        self.model = compiled(geometry, self.task.board)
        self.data = mujoco.MjData(self.model)
        self.low, high = self.model.actuator_ctrlrange.T
        self.half_range = 0.5 * (high - self.low)
        self.start = self.task.start
        self.head = self.model.site("head").id
        self.torso = self.model.body("torso_link").id
        self.floor = self.model.geom("floor").id
        if self.task.board:
            self.board, self.pivot = self.model.geom("board").id, self.model.geom("pivot").id

    def reset(self, generator: np.random.Generator) -> np.ndarray:
        """Set the start pose with uniform noise of up to 0.01 on every position (quaternion entries included) and no
        velocity; return the observation."""
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = self.start + generator.uniform(-START_NOISE, START_NOISE, self.model.nq)
        mujoco.mj_forward(self.model, self.data)
        return self.observation()

    def controls(self, actions: np.ndarray) -> np.ndarray:
        """Return servo positions (19,), rad, for actions (19,) in [-1, 1]. Raises UserError for another shape or
        numbers that are not finite."""
        actions = np.asarray(actions, dtype=np.float64)
        if actions.shape != (self.model.nu,):
            raise UserError(
                f"actions have shape {actions.shape}: give ({self.model.nu},), one number for each servo"
            )
        if not np.isfinite(actions).all():
            raise UserError(f"actions hold a number that is not finite: {actions.tolist()}")
        return self.low + (actions + 1) * self.half_range

    def step(self, controls: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...], bool]:
        """Take ten physics steps with constant servo positions (19,).

        Returns: observation, readings (views that are valid until the next step or reset), terminated.
        """
        self.data.ctrl[:] = controls
        mujoco.mj_step(self.model, self.data, nstep=PHYSICS_STEPS)
        return self.observation(), self.readings(), self.terminated()

    def observation(self) -> np.ndarray:
        """Return positions, then velocities, float64."""
        return np.concatenate([self.data.qpos, self.data.qvel])

    def readings(self) -> tuple[np.ndarray, ...]:
        """Return the quantities that the reward depends on: the arguments of `tasks.reward_terms` after the task."""
        data = self.data
        return (
            data.site_xpos[self.head, 2],
            data.xmat[self.torso, 8],
            data.actuator_force,
            data.sensordata[:3],
        )

    def terminated(self) -> bool:
        """Return whether the robot is too low or, with the board, there is a forbidden contact."""
        if self.data.qpos[2] < self.task.lowest_pelvis:
            return True
        return self.task.board and any(map(self._forbidden, self.data.contact.geom))

    def _forbidden(self, pair: np.ndarray) -> bool:
        """Return True where the pivot touches anything but floor and board, or anything but the pivot touches the
        floor."""
        for one, other in (pair, pair[::-1]):
            if one == self.pivot and other not in (self.floor, self.board):
                return True
            if one == self.floor and other != self.pivot:
                return True
        return False


class HumanoidEnv(gymnasium.Env):
    """One H1 task, without pictures. The `info` of a step holds the factors of the reward and the reward."""

    def __init__(self, task: str, geometry: str):
        self.simulation = Simulation(task, geometry)
        self.model, self.data = self.simulation.model, self.simulation.data
        self.observation_space = Box(-np.inf, np.inf, (self.model.nq + self.model.nv,), np.float64)
        self.action_space = Box(-1.0, 1.0, (self.model.nu,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Start an episode and return (observation, {})."""
        super().reset(seed=seed)
        return self.simulation.reset(self.np_random), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Return observation, reward, terminated, False (gymnasium's wrapper sets the time limit), factors of the
        reward."""
        controls = self.simulation.controls(action)
        observation, readings, terminated = self.simulation.step(controls)
        measured = reward_terms(self.simulation.task, *readings)
        terms = {name: float(value) for name, value in measured.items()}
        return observation, terms["reward"], terminated, False, terms
