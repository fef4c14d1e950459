"""The H1 tasks as gymnasium environments.

One step is ten physics steps of 2 ms, an episode at most 1000 steps. Observation: joint positions and velocities, not scaled
(51 numbers, 64 with the board). Action in [-1, 1]^19, mapped linearly to the servo ranges. As in HumanoidBench there is no
extra forward pass after the physics: what reward and termination read is from the start of the last physics step.

With `geometry="mesh"` links collide as convex hulls of their meshes (robosuite-models), with "primitive" as capsules.
"""

import importlib.util
import os
from functools import lru_cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from fire_core.errors import UserError

from .tasks import TASKS, reward_terms

try:
    import mujoco
except Exception as error:  # MuJoCo opens the OpenGL library that MUJOCO_GL names as soon as it is imported
    missing = isinstance(error, ModuleNotFoundError) or "MUJOCO_GL" not in os.environ
    remedy = "make install-sac" if missing else "unset MUJOCO_GL, only pictures need it"
    raise UserError(f"MuJoCo does not load ({error}): {remedy}") from error

PHYSICS_STEPS = 10
START_NOISE = 0.01


def mesh_folder() -> Path:
    """Return the folder of the H1 STL files in the package robosuite-models, or raise UserError without it."""
    spec = importlib.util.find_spec("robosuite_models")
    if spec is None or not spec.submodule_search_locations:
        remedy = "make install-sac (or use a task with 'primitive' in its name, which needs none)"
        raise UserError(f"geometry 'mesh' needs the H1 meshes of robosuite-models: {remedy}")
    folder = Path(spec.submodule_search_locations[0]) / "assets" / "robots" / "h1" / "meshes"
    if not (folder / "pelvis.STL").exists():
        raise UserError(f"there are no H1 meshes in {folder}: delete it and run make install-sac again")
    return folder


def mjcf(geometry: str, board: bool = False) -> str:
    """Return the model as an MJCF document, with or without the balance board and its pivot."""
    root = ElementTree.parse(Path(__file__).parent / "h1.xml").getroot()
    assets, world = root.find("asset"), root.find("worldbody")
    left_out = {"mesh": ["primitive"], "primitive": ["mesh", "visual"]}[geometry]
    for body in root.iter("body"):
        for geom in body.findall("geom"):
            if geom.get("class") in left_out:
                body.remove(geom)
    if geometry == "mesh":
        root.find("compiler").set("meshdir", str(mesh_folder()))
    else:
        for mesh in assets.findall("mesh[@file]"):
            assets.remove(mesh)
    for name in () if board else ("board", "pivot"):
        world.remove(world.find(f"body[@name='{name}']"))
    return ElementTree.tostring(root, encoding="unicode")


@lru_cache
def compiled(geometry: str, board: bool) -> mujoco.MjModel:
    """Return the compiled model, which all environments of the process share: do not write to it."""
    return mujoco.MjModel.from_xml_string(mjcf(geometry, board))


class HumanoidEnv(gymnasium.Env):
    """One H1 task, without pictures. The `info` of a step holds the factors of the reward and the reward."""

    def __init__(self, task: str, geometry: str):
        self.task = TASKS[task]
        self.model = compiled(geometry, self.task.board)
        self.data = mujoco.MjData(self.model)
        self.low, high = self.model.actuator_ctrlrange.T
        self.half_range = 0.5 * (high - self.low)
        self.head, self.torso = self.model.site("head").id, self.model.body("torso_link").id
        if self.task.board:
            self.floor, self.board, self.pivot = (self.model.geom(n).id for n in ("floor", "board", "pivot"))
        self.observation_space = Box(-np.inf, np.inf, (self.model.nq + self.model.nv,), np.float64)
        self.action_space = Box(-1.0, 1.0, (self.model.nu,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Start an episode: the start pose with uniform noise of up to 0.01 on every position, and no velocity."""
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = self.task.start + self.np_random.uniform(-START_NOISE, START_NOISE, self.model.nq)
        mujoco.mj_forward(self.model, self.data)
        return self.observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Return observation, reward, terminated, False (gymnasium's wrapper sets the time limit), factors of the
        reward. Raises UserError for an action of another shape than (19,), or with numbers that are not finite."""
        action = np.asarray(action, dtype=np.float64)
        if action.shape != (self.model.nu,) or not np.isfinite(action).all():
            raise UserError(f"action {action.tolist()}: give {self.model.nu} finite numbers, one per servo")
        self.data.ctrl[:] = self.low + (action + 1) * self.half_range
        mujoco.mj_step(self.model, self.data, nstep=PHYSICS_STEPS)
        terms = {name: float(value) for name, value in reward_terms(self.task, *self.readings()).items()}
        return self.observation(), terms["reward"], self.terminated(), False, terms

    def observation(self) -> np.ndarray:
        """Return positions, then velocities, float64."""
        return np.concatenate([self.data.qpos, self.data.qvel])

    def readings(self) -> tuple[np.ndarray, ...]:
        """Return the quantities that the reward depends on: the arguments of `tasks.reward_terms` after the task."""
        heights = self.data.site_xpos[self.head, 2], self.data.xmat[self.torso, 8]
        return *heights, self.data.actuator_force, self.data.sensordata[:3]

    def terminated(self) -> bool:
        """Return whether the robot is too low or, with the board, there is a forbidden contact."""
        low = bool(self.data.qpos[2] < self.task.lowest_pelvis)
        return low or (self.task.board and any(map(self._forbidden, self.data.contact.geom)))

    def _forbidden(self, pair: np.ndarray) -> bool:
        """Return whether the pivot touches anything but floor and board, or the floor anything but the pivot."""
        allowed = {self.pivot: (self.floor, self.board), self.floor: (self.pivot,)}
        return any(one in allowed and other not in allowed[one] for one, other in (pair, pair[::-1]))
