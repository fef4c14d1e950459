"""The H1 tasks of HumanoidBench as data and pure functions: start pose, reward and termination height.

Source: Sferrazza et al. (2024), arXiv 2403.10506, and the benchmark's own reward code, in closed form.
"""

from dataclasses import dataclass

import numpy as np

STEPS_PER_EPISODE = 1000
GEOMETRIES = ("mesh", "primitive")
# Sigma of a gaussian that is 0.1 at one margin: 0.1 ** (x / margin) ** 2.
STAND_MARGIN = 1.65 / 4
LEGS = (0.0, 0.0, -0.4, 0.8, -0.4)


@dataclass(frozen=True)
class Task:
    """One task.

    stand_height: head height (m) from which the reward for standing is 1. speed: forward speed (m/s) at which the
    reward for moving is 1, or None where standing still is rewarded. lowest_pelvis: height (m) of the pelvis below
    which an episode ends. random_return, success_return: the benchmark's own scores, for normalised returns.
    """

    stand_height: float
    speed: float | None
    lowest_pelvis: float
    board: bool
    random_return: float
    success_return: float

    @property
    def start(self) -> np.ndarray:
        """Joint positions at the start: 26, or 33 with the board's free joint at the end."""
        pelvis = (-0.1, 0.0, 1.38) if self.board else (0.0, 0.0, 0.98)
        board = (0.0, 0.0, 0.37, 1.0, 0.0, 0.0, 0.0) if self.board else ()
        return np.array([*pelvis, 1.0, 0.0, 0.0, 0.0, *LEGS, *LEGS, *([0.0] * 9), *board])


TASKS = {
    "h1-walk": Task(1.65, 1.0, 0.2, False, 2.377, 700.0),
    "h1-run": Task(1.65, 5.0, 0.2, False, 2.02, 700.0),
    "h1-balance_simple": Task(2.02, None, 0.8, True, 9.391, 800.0),
}


def reward_terms(
    task: Task, head_height: np.ndarray, torso_upright: np.ndarray, forces: np.ndarray, velocity: np.ndarray
) -> dict[str, np.ndarray]:
    """Return standing, upright, small_control, and move or still, each (...) in [0, 1], and their product `reward`.

    head_height: (...) m. torso_upright: (...) vertical component of the torso's vertical axis. forces: (..., 19) torques
    of the servos, N m. velocity: (..., 3) of the whole robot's centre of mass, world frame, m/s.
    """
    standing = np.power(0.1, np.square(np.maximum(0.0, task.stand_height - head_height) / STAND_MARGIN))
    upright = np.clip(1 - (0.9 - torso_upright) / 1.9, 0.0, 1.0)
    small_control = (4 + np.maximum(0.0, 1 - np.square(forces / 10)).mean(axis=-1)) / 5
    if task.speed is None:
        name, moving = "still", np.power(0.1, np.square(velocity[..., :2] / 2)).mean(axis=-1)
    else:
        name, moving = "move", (5 * np.clip(velocity[..., 0] / task.speed, 0.0, 1.0) + 1) / 6
    terms = {"standing": standing, "upright": upright, "small_control": small_control, name: moving}
    return terms | {"reward": standing * upright * small_control * moving}
