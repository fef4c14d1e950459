"""The H1 tasks as gymnasium environments, single and vectorised.

One step is ten physics steps of 2 ms, an episode at most 1000 steps (registered time limit). Observation: joint
positions and velocities, not scaled (51 numbers, 64 with the board). Action in [-1, 1]^19, mapped linearly to the
servo ranges. As in HumanoidBench there is no extra forward pass after the physics: heights, forces, velocity and
contacts that reward and termination read are those at the start of the last physics step, 2 ms old.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from .errors import UserError
from .model import PHYSICS_STEP, mjcf
from .rendering import Camera
from .simulator import mujoco
from .tasks import STEPS_PER_EPISODE, find_task, reward_terms

PHYSICS_STEPS = 10
START_NOISE = 0.01
FRAMES_PER_SECOND = round(1 / (PHYSICS_STEPS * PHYSICS_STEP))


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

    def controls(self, actions: np.ndarray, space: Box) -> np.ndarray:
        """Return servo positions, rad, for actions in [-1, 1], both of the space's shape (..., 19). Raises UserError
        for another shape or numbers that are not finite."""
        actions = np.asarray(actions, dtype=np.float64)
        if actions.shape != space.shape:
            raise UserError(
                f"actions have shape {actions.shape}: give {space.shape}, one number for each servo"
            )
        if not np.isfinite(actions).all():
            raise UserError(f"actions hold a number that is not finite: {actions.tolist()}")
        return self.low + (actions + 1) * self.half_range

    def step(self, controls: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...], bool]:
        """Take ten physics steps with constant servo positions (19,); MuJoCo releases the interpreter lock meanwhile.

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


def observation_space(simulation: Simulation) -> Box:
    """Return an unbounded float64 box for positions and velocities."""
    return Box(-np.inf, np.inf, (simulation.model.nq + simulation.model.nv,), np.float64)


def action_space(simulation: Simulation) -> Box:
    """Return the box [-1, 1] for each servo, float32."""
    return Box(-1.0, 1.0, (simulation.model.nu,), np.float32)


class HumanoidEnv(gymnasium.Env):
    """One H1 task. The `info` of a step holds the factors of the reward and the reward. `render_mode="rgb_array"`
    renders pictures of `width` x `height` pixels."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": FRAMES_PER_SECOND}

    def __init__(
        self, task: str, geometry: str, render_mode: str | None = None, width: int = 640, height: int = 480
    ):
        if render_mode not in (None, "rgb_array"):
            raise UserError(f"render_mode={render_mode!r}: choose 'rgb_array' or leave it out")
        self.render_mode = render_mode
        self.simulation = Simulation(task, geometry)
        self.model, self.data = self.simulation.model, self.simulation.data
        self.observation_space = observation_space(self.simulation)
        self.action_space = action_space(self.simulation)
        most = self.model.vis.global_
        if not (1 <= width <= most.offwidth and 1 <= height <= most.offheight):
            raise UserError(
                f"width={width}, height={height}: pictures have 1 to {most.offwidth} by 1 to {most.offheight}"
            )
        self.camera = Camera(self.model, width, height)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Start an episode and return (observation, {})."""
        super().reset(seed=seed)
        return self.simulation.reset(self.np_random), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Return observation, reward, terminated, False (gymnasium's wrapper sets the time limit), factors of the
        reward."""
        controls = self.simulation.controls(action, self.action_space)
        observation, readings, terminated = self.simulation.step(controls)
        measured = reward_terms(self.simulation.task, *readings)
        terms = {name: float(value) for name, value in measured.items()}
        return observation, terms["reward"], terminated, False, terms

    def render(self) -> np.ndarray | None:
        """Return a picture (height, width, 3) uint8, or None without a render mode."""
        return None if self.render_mode is None else self.camera.image(self.data)

    def close(self) -> None:
        self.camera.close()


class HumanoidVectorEnv(gymnasium.vector.VectorEnv):
    """`num_envs` H1 tasks that step together; each restarts in the step that ends its episode.

    `threads` > 1 simulates several environments at once (MuJoCo releases the interpreter lock); results do not depend
    on the number. `info` holds only the last observations of the episodes that ended ("final_obs"), with their mask.
    If a step is interrupted, some robots have moved and some have not, so call `reset`.
    """

    metadata: ClassVar[dict[str, Any]] = {**HumanoidEnv.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        task: str,
        geometry: str,
        num_envs: int = 1,
        threads: int = 1,
        max_episode_steps: int = STEPS_PER_EPISODE,
        render_mode: str | None = None,
    ):
        if not all(isinstance(count, int) and count >= 1 for count in (num_envs, threads)):
            raise UserError(
                f"num_envs={num_envs!r}, threads={threads!r}: both must be whole numbers, at least 1"
            )
        if render_mode is not None:
            raise UserError(
                f"render_mode={render_mode!r}: pictures come from a single environment, gymnasium.make"
            )
        self.num_envs, self.max_episode_steps, self.render_mode = num_envs, max_episode_steps, None
        self.simulations = [Simulation(task, geometry) for _ in range(num_envs)]
        self.single_observation_space = observation_space(self.simulations[0])
        self.single_action_space = action_space(self.simulations[0])
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.threads = min(threads, num_envs)
        self.pool: ThreadPoolExecutor | None = None  # created in the first step
        self.generators = [np.random.default_rng() for _ in range(num_envs)]
        self.ages = np.zeros(num_envs, dtype=np.int64)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Start all episodes and return (observations, {}). An integer seed gives environment i the seed + i."""
        if seed is not None:
            seeds = [int(seed) + i for i in range(self.num_envs)] if np.ndim(seed) == 0 else list(seed)
            if len(seeds) != self.num_envs:
                raise UserError(
                    f"{len(seeds)} seeds for {self.num_envs} environments: give one number, or one for each"
                )
            self.generators = [gymnasium.utils.seeding.np_random(one)[0] for one in seeds]
        self.ages[:] = 0
        pairs = zip(self.simulations, self.generators)
        return np.stack([simulation.reset(generator) for simulation, generator in pairs]), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Return observations, rewards, terminated, truncated and info, arrays over the environments."""
        outcomes = self._step_each(self.simulations[0].controls(actions, self.action_space))
        observed, readings, fallen = zip(*outcomes)
        observations, terminated = np.array(observed), np.array(fallen)
        rewards = reward_terms(self.simulations[0].task, *map(np.array, zip(*readings)))["reward"]
        self.ages += 1
        truncated = self.ages >= self.max_episode_steps
        ended = terminated | truncated
        info: dict[str, Any] = {}
        if ended.any():
            info = {"final_obs": observations.copy(), "_final_obs": ended}
        for index in np.flatnonzero(ended):
            observations[index] = self.simulations[index].reset(self.generators[index])
            self.ages[index] = 0
        return observations, rewards, terminated, truncated, info

    def _step_each(self, controls: np.ndarray) -> list[Any]:
        """Return the results of `Simulation.step` for every robot. This thread and those of the pool each take the
        next robot when they are free, so that a busy core does not delay the others."""
        outcomes: list[Any] = [None] * self.num_envs
        waiting = deque([*range(self.num_envs), *[None] * self.threads])  # None ends one thread

        def work() -> None:
            for index in iter(waiting.popleft, None):
                outcomes[index] = self.simulations[index].step(controls[index])

        if self.pool is None and self.threads > 1:
            self.pool = ThreadPoolExecutor(self.threads - 1)
        running = [self.pool.submit(work) for _ in range(self.threads - 1)] if self.pool else []
        try:
            work()
        finally:
            started = [share for share in running if not share.cancel()]  # the others have nothing left to do
            wait(started)
        for share in started:
            share.result()
        return outcomes

    def close_extras(self, **kwargs: Any) -> None:
        """Stop the threads."""
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the threads, for copies and other processes."""
        return vars(self) | {"pool": None}
