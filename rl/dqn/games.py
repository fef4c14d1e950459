"""Simulators: n copies of an Atari game, or of Catch, that step together and return single frames.

Stacks and sticky actions are added by `rl/dqn/env.py`; rewards are clipped in `rl/dqn/train.py`.
"""

import numpy as np
import torch

from fire_core.errors import UserError, did_you_mean

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
CATCH = "catch"
LONGEST = 27_000  # agent steps of an Atari episode
RESEED_AFTER = 5000  # steps and resets between seeded starts of an emulator: a resume plays them again


class AtariBackend:
    """n emulators of one game (`ale_py.AtariVectorEnv`), without its stacking, sticky actions and clipping.

    The emulators turn frames grey before they take the maximum of two and resize. With `grey_last` they do both per colour,
    as the official code does, and the picture turns grey here: one or two of a hundred pixels differ, nearly always by 1.

    States of emulators cannot be read, but are a pure function of start seed, actions and resets. So `state_dict` holds
    these since the last seeded start, and `load_state_dict` plays them again. After `RESEED_AFTER`, the next episode begins
    with a seeded start, which takes 0.1 s. Raises UserError for an unknown game.
    """

    def __init__(
        self, game: str, count: int, frame_shape: tuple[int, int], seed: int, threads: int, grey_last: bool
    ):
        import ale_py

        if game not in (names := ale_py.roms.get_all_rom_ids()):
            raise UserError(f"unknown game {game!r}{did_you_mean(game, [CATCH, *names])}")
        self.count, self.frame_shape, self.seed = count, frame_shape, seed
        rules = {"frameskip": 4, "maxpool": True, "max_num_frames_per_episode": 4 * LONGEST}
        rules |= {"noop_max": 0, "use_fire_reset": False, "episodic_life": False, "reward_clipping": False}
        rules |= {"repeat_action_probability": 0.0}  # sticky actions are drawn here, for a whole agent step
        rules |= {"img_height": frame_shape[0], "img_width": frame_shape[1], "stack_num": 1}
        self.games = ale_py.AtariVectorEnv(game, count, num_threads=threads, grayscale=not grey_last, **rules)
        self.actions = int(self.games.single_action_space.n)
        self.starts = [0] * count
        # of each emulator, the actions since its last seeded start: `~action` where a reset followed
        self.history: list[list[int]] = [[] for _ in range(count)]

    def reset(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Start new episodes where `chosen` (n,) bool is true (None: everywhere, seeded). Return frames (n, h, w)
        uint8, of which only those of the new episodes are meaningful."""
        calls = [len(history) + sum(item < 0 for item in history) for history in self.history]
        seeded = np.array(calls) >= (0 if chosen is None else RESEED_AFTER)
        chosen = np.ones(self.count, bool) if chosen is None else chosen
        for index in np.flatnonzero(chosen):
            if seeded[index]:
                self.starts[index] += 1
                self.history[index] = []
            else:
                self.history[index][-1] = ~self.history[index][-1]
        return self._start(chosen & ~seeded) + self._start(chosen & seeded, seeded=True)

    def _start(self, chosen: np.ndarray, seeded: bool = False) -> np.ndarray:
        """Restart the chosen emulators, and return frames (n, h, w), which are 0 for the others."""
        frames = np.zeros((self.count, *self.frame_shape), np.uint8)
        if chosen.any():
            places = [[self.seed, i, self.starts[i]] for i in np.flatnonzero(chosen).tolist()]
            seeds = np.array([int(np.random.SeedSequence(p).generate_state(1)[0] % 2**31) for p in places])
            observations, _ = self.games.reset(seed=seeds if seeded else None, options={"reset_mask": chosen})
            frames[chosen] = _frames(observations)[chosen]
        return frames

    def step(self, actions: np.ndarray) -> Arrays:
        """Return (frames (n, h, w), raw rewards, terminated, truncated); an ended episode gives its last frame."""
        for history, action in zip(self.history, actions.tolist()):
            history.append(action)
        observations, rewards, terminated, truncated, _ = self.games.step(actions.astype(np.int64))
        return _frames(observations), rewards.astype(np.float32), terminated, truncated

    def state_dict(self) -> dict:
        """Return the counters and the history of each emulator since its last seeded start (int16 tensors)."""
        history = [torch.tensor(items, dtype=torch.int16) for items in self.history]
        return {"starts": list(self.starts), "history": history}

    def load_state_dict(self, state: dict) -> None:
        """Restore the stored state of every emulator by playing its history again, at about 2000 steps a second."""
        self.starts = list(state["starts"])
        self.history = [items.tolist() for items in state["history"]]
        lengths = np.array([len(history) for history in self.history])
        self.games.reset(seed=np.arange(self.count))
        for left in range(lengths.max(), 0, -1):  # those with fewer steps start later: all end together
            self._start(lengths == left, seeded=True)
            items = np.zeros(self.count, np.int64)
            for index in np.flatnonzero(lengths >= left):
                items[index] = self.history[index][-left]
            self.games.step(np.where(items < 0, ~items, items))
            self._start(items < 0)
        self._start(lengths == 0, seeded=True)


def _frames(observations: np.ndarray) -> np.ndarray:
    """Return grey frames (n, h, w) uint8 from observations (n, 1, h, w), or (n, 1, h, w, 3) as OpenCV turns them grey."""
    frames = observations[:, 0]
    if frames.ndim == 3:
        return frames
    red, green, blue = np.moveaxis(frames, -1, 0).astype(np.uint32)
    return ((9798 * red + 19235 * green + 3735 * blue + 16384) >> 15).astype(np.uint8)


class CatchBackend:
    """n games of Catch on a 7 x 7 board drawn at the frame size: move the paddle under the falling ball.

    Actions: left, stay, right. The ball falls one row per step from a random column; the episode ends after 6 steps
    with reward +1 (caught) or -1. The expected return is -5/7 for a random policy and 1 for a perfect one, which sticky
    actions lower to 0.875. Raises UserError for frames smaller than the board.
    """

    size = 7
    actions = 3

    def __init__(self, count: int, frame_shape: tuple[int, int], seed: int):
        if min(frame_shape) < self.size:
            raise UserError(f"env.frame_size={min(frame_shape)}: catch needs at least {self.size}")
        self.count = count
        self.generator = np.random.default_rng(seed)
        self.ball = np.zeros((count, 2), np.int64)  # row, column
        self.paddle = np.zeros(count, np.int64)
        self.rows, self.columns = (np.arange(pixels) * self.size // pixels for pixels in frame_shape)

    def reset(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Start new episodes where `chosen` (n,) bool is true (None: everywhere). Return frames (n, h, w) uint8."""
        chosen = np.ones(self.count, bool) if chosen is None else chosen
        for index in np.flatnonzero(chosen):
            self.ball[index] = 0, self.generator.integers(self.size)
            self.paddle[index] = self.generator.integers(self.size)
        return self._draw()

    def step(self, actions: np.ndarray) -> Arrays:
        """Return (frames (n, h, w), rewards, terminated, truncated); an ended episode gives its last frame."""
        self.paddle = np.clip(self.paddle + actions - 1, 0, self.size - 1)
        self.ball[:, 0] += 1
        terminated = self.ball[:, 0] == self.size - 1
        caught = np.where(self.ball[:, 1] == self.paddle, 1.0, -1.0)
        rewards = np.where(terminated, caught, 0.0).astype(np.float32)
        return self._draw(), rewards, terminated, np.zeros(self.count, bool)

    def _draw(self) -> np.ndarray:
        board, all_games = np.zeros((self.count, self.size, self.size), np.uint8), np.arange(self.count)
        board[all_games, self.size - 1, self.paddle] = 255
        board[all_games, *self.ball.T] = 255
        return board[:, self.rows][:, :, self.columns]

    def state_dict(self) -> dict:
        positions = {"ball": self.ball.tolist(), "paddle": self.paddle.tolist()}
        return positions | {"generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: dict) -> None:
        self.ball, self.paddle = np.array(state["ball"]), np.array(state["paddle"])
        self.generator.bit_generator.state = state["generator"]
