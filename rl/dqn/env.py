"""Atari games and Catch as the DQN agent sees them: stacked frames, sticky actions, raw rewards.

The protocol of Han et al. 2026 (after Machado et al. 2018): frame skip 4 with the maximum of the last two frames, grey,
resized, stack of 4, no no-op start, no fire on reset, no end at a lost life, at most 27,000 agent steps, and the previous
executed action repeated for a whole agent step with probability 0.25.
"""

from typing import NamedTuple

import numpy as np
import torch

from rl.dqn.games import CATCH, AtariBackend, CatchBackend

# average scores of a random policy and of a human tester (Mnih et al. 2015; Wang et al. 2016), where known
SCORES = {
    "asterix": (210.0, 8503.3),
    "beam_rider": (363.9, 16926.5),
    "breakout": (1.7, 30.5),
    "demon_attack": (152.1, 1971.0),
    "freeway": (0.0, 29.6),
    "pong": (-20.7, 14.6),
    "seaquest": (68.4, 42054.7),
    "space_invaders": (148.0, 1668.7),
    CATCH: (-5 / 7, 1.0),  # a random policy catches one ball in 7
}

COUNTERS = ("executed", "scores", "lengths")  # attributes of `Games`, one number for each


class Step(NamedTuple):
    """Result of one step of all n environments."""

    observations: np.ndarray  # (n, stack, h, w) uint8, already of the next episode where one ended
    rewards: np.ndarray  # (n,) float32, raw
    terminated: np.ndarray  # (n,) bool
    truncated: np.ndarray  # (n,) bool
    final_frames: np.ndarray  # (n, h, w) uint8: newest frame before any reset
    finished: list[tuple[float, int]]  # raw return and length in agent steps of each episode that ended


class Games:
    """n copies of one game that step together, after `reset()`. All randomness comes from `seed`.

    An ended episode restarts inside `step`, and its first stack repeats the first frame. `threads` and `grey_last` are for
    Atari. Raises UserError for an unknown game.
    """

    def __init__(
        self,
        game: str,
        count: int,
        frame_shape: tuple[int, int] = (84, 84),
        *,
        seed: int,
        sticky: float = 0.25,
        threads: int = 1,
        grey_last: bool = False,
    ):
        if game == CATCH:
            self.backend = CatchBackend(count, frame_shape, seed)
        else:
            self.backend = AtariBackend(game, count, frame_shape, seed, threads, grey_last)
        self.count, self.actions, self.sticky = count, self.backend.actions, sticky
        self.generator = np.random.default_rng([seed, 1])
        self.observations = np.zeros((count, 4, *frame_shape), np.uint8)
        self.executed = np.zeros(count, np.int64)
        self.scores = np.zeros(count)
        self.lengths = np.zeros(count, np.int64)

    def reset(self) -> np.ndarray:
        """Restart all episodes and return observations (n, stack, h, w) uint8. Running episodes are dropped."""
        self.executed[:], self.scores[:], self.lengths[:] = 0, 0.0, 0
        self.observations[:] = self.backend.reset()[:, None]
        return self.observations.copy()

    def step(self, actions: np.ndarray) -> Step:
        """Execute `actions` (n,) int, or the previous executed action where the sticky draw says so."""
        self.executed = np.where(self.generator.random(self.count) < self.sticky, self.executed, actions)
        frames, rewards, terminated, truncated = self.backend.step(self.executed)
        self.scores += rewards
        self.lengths += 1
        self.observations[:, :-1] = self.observations[:, 1:]
        self.observations[:, -1] = frames
        ended = terminated | truncated
        finished = list(zip(self.scores[ended].tolist(), self.lengths[ended].tolist()))
        if finished:
            self.observations[ended] = self.backend.reset(ended)[ended][:, None]
            self.executed[ended], self.scores[ended], self.lengths[ended] = 0, 0.0, 0
        return Step(self.observations.copy(), rewards, terminated, truncated, frames, finished)

    def state_dict(self) -> dict:
        """Return the exact state as plain values and tensors: game states, stacks, sticky actions, generator."""
        counters = {name: getattr(self, name).tolist() for name in COUNTERS}
        stacks, draws = torch.from_numpy(self.observations.copy()), self.generator.bit_generator.state
        return counters | {"backend": self.backend.state_dict(), "observations": stacks, "generator": draws}

    def load_state_dict(self, state: dict) -> None:
        self.backend.load_state_dict(state["backend"])
        self.observations[:] = state["observations"].numpy()
        for name in COUNTERS:
            getattr(self, name)[:] = state[name]
        self.generator.bit_generator.state = state["generator"]
