"""Uniform replay for off-policy agents: FrameReplay for stacked images, FlatReplay for vectors.

Both are rings over `environments` copies that step together: one row of the ring is one step of all of them. Frames lie
in a memory-mapped file, everything else in memory. A checkpoint flushes the file and holds the rest, with checksums of
the frames. The file has `reserve` spare rows, so that new frames do not overwrite those that the last `checkpoints`
checkpoints need; `must_save` says when the next checkpoint is due for this reason.
"""

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fire_core.errors import UserError
from harness.transfer import send
from rl.frame_file import create_frames, free_memory, open_frames

FILE = "frames.npy"
BLOCK = 256  # rows of frames that have a checksum of their own


class Batch(NamedTuple):
    """A uniform sample of B transitions. Images are uint8 and are scaled by the network."""

    observations: Tensor  # (B, stack, height, width) uint8, or (B, size) float32
    actions: Tensor  # (B,) int64, or (B, size) float32
    rewards: Tensor  # (B,) float32
    next_observations: Tensor  # like observations
    terminated: Tensor  # (B,) float32: 1 at the end of an episode, but 0 where it was truncated
    steps: Tensor | None = None  # (B,) int64: steps between the observations, where they are not all 1

    def split(self, size: int) -> "list[Batch]":
        """Return the same transitions as several batches of `size`."""
        fields = {name: values.split(size) for name, values in self._asdict().items() if values is not None}
        return [Batch(**dict(zip(fields, part))) for part in zip(*fields.values())]


class _Ring:
    """Base of both replays: which rows are valid, and uniform sampling among them."""

    def __init__(self, capacity: int, environments: int):
        if capacity <= 0 or capacity % environments:
            raise UserError(
                f"replay capacity {capacity}: give a positive multiple of {environments} environments"
            )
        self.capacity, self.environments = capacity, environments
        self.depth = capacity // environments
        self.count = 0  # rows of transitions ever added

    def __len__(self) -> int:
        """Number of transitions that can be drawn, at most `capacity`."""
        return min(self.count, self.depth) * self.environments

    def _draw(self, size: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (times, environments) of `size` transitions, uniform with replacement over the last `capacity`."""
        if not len(self):
            raise UserError("cannot sample from an empty replay: learning_starts must be at least 1")
        flat = generator.integers(len(self), size=size)
        return self.count - 1 - flat // self.environments, flat % self.environments


class FrameReplay(_Ring):
    """Replay of image stacks that stores every frame once (uint8).

    Guarantees: exactly the last `capacity` transitions can be drawn. A stack never reaches across the start of an
    episode; missing frames repeat the first one, as in the usual frame-stack wrapper. The next observation of an
    episode's last step is its true final one, not the first of the next episode. 1,000,000 transitions of 84 x 84 take
    7.1 GB (28.2 GB if stacks of 4 were stored).

    With `n_step` above 1, a transition sums up that many rewards, each discounted by one step more than the one before
    it, and its next observation lies as many steps later. It is shorter where the episode (or what ends a target, as a
    lost life) ends earlier, and where later steps have not been played yet.

    A fork continues another replay: frames before the time `fork_time` are read from the file in `parent`, which is
    never written, and new ones go to `folder`. Several forks share one parent, also in other processes.

    Args:
        capacity: transitions over all environments together.
        environments: environments that step together.
        frame_shape: (height, width).
        folder: where the file of frames is.
        stack: frames in an observation.
        checkpoints: number of latest checkpoints that remain loadable.
        reserve: spare rows of a new file, see the module. None: 1/16 of the ring, at least 32 per checkpoint.
        existing: continue with the file in `folder` (then call `load_state_dict`).
        parent, fork_time: of a fork: the folder with the old frames, and the number of rows in it.
        most_new_rows: rows that will be added at most to a fork, whose file need not be larger; None: no limit.
        channels_last: samples lie in memory as (B, height, width, stack), the layout of channels-last convolutions.
        n_step, discount: steps of a transition at most, and the factor of a reward one step later.

    Raises UserError for a capacity that is not a multiple of `environments`, a file that is missing or damaged, and a
    disk that is too small.
    """

    def __init__(
        self,
        capacity: int,
        environments: int,
        frame_shape: tuple[int, int],
        folder: str | Path,
        *,
        stack: int = 4,
        checkpoints: int = 2,
        reserve: int | None = None,
        existing: bool = False,
        parent: Path | None = None,
        fork_time: int = 0,
        most_new_rows: int | None = None,
        channels_last: bool = False,
        n_step: int = 1,
        discount: float = 1.0,
    ):
        super().__init__(capacity, environments)
        self.frame_shape, self.stack, self.checkpoints = tuple(frame_shape), stack, checkpoints
        self.channels_last, self.n_step, self.discount = channels_last, n_step, discount
        self.path, self.fork_time = Path(folder) / FILE, fork_time
        self.saved_count = 0  # rows of transitions at the last checkpoint
        row, needed = (environments, *self.frame_shape), self.depth + stack + 1
        self.old_frames = None if parent is None else open_frames(parent / FILE, row, read_only=True)
        if existing:
            self.frames = open_frames(self.path, row)
            least = needed if most_new_rows is None else min(needed, most_new_rows + 1)
            if len(self.frames) < least:
                raise UserError(
                    f"replay file {self.path} is damaged ({len(self.frames)} rows, at least {least} are needed): delete "
                    f"{self.path.parents[1]} and run the same command again"
                )
        else:
            spare = max(32 * checkpoints, self.depth // 16) if reserve is None else reserve
            rows = needed + spare if most_new_rows is None else min(needed + spare, most_new_rows + 1)
            self.frames = create_frames(self.path, (rows, *row))
        # a file that never wraps around overwrites nothing, so it needs no reserve
        overwrites = most_new_rows is None or len(self.frames) <= most_new_rows
        self.reserve = len(self.frames) - needed if overwrites else 0
        self.facts = {
            "actions": np.zeros((self.depth + 1, environments), np.int16),
            "rewards": np.zeros((self.depth + 1, environments), np.float32),
            "terminated": np.zeros((self.depth + 1, environments), np.bool_),
            "ended": np.zeros((self.depth + 1, environments), np.bool_),
            # frames since the start of the episode, at most stack - 1
            "age": np.zeros((self.depth + 1, environments), np.uint8),
        }
        # last frames of ended episodes, by (time, environment)
        self.final_frames: dict[tuple[int, int], np.ndarray] = {}
        self.checksums: dict[tuple[int, int], int] = {}  # of the frames of rows, (first, end) -> CRC

    @property
    def must_save(self) -> bool:
        """Whether the rows since the last checkpoint have used up their share of the reserve: save before `add`."""
        share = max(1, self.reserve // self.checkpoints)
        return self.reserve > 0 and self.count - self.saved_count >= share and self.count > self.depth

    def start(self, frames: np.ndarray) -> None:
        """Store the first frames (environments, height, width) after a reset of all environments.

        In the middle of a run, the step before is marked as the end of a truncated episode.
        """
        if self.count:
            ended = self._row("ended", self.count - 1)
            for index in np.flatnonzero(~ended):
                last = self.frames[self._slot(self.count), index]
                self.final_frames[self.count - 1, int(index)] = last.copy()
            ended[:] = True
        self.frames[self._slot(self.count)] = frames
        self._row("age", self.count)[:] = 0

    def add(
        self,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        next_frames: np.ndarray,
        final_frames: np.ndarray | None = None,
        lost: np.ndarray | None = None,
    ) -> None:
        """Store one step of all environments, taken from the frames that were stored last.

        Args:
            actions, rewards, terminated, truncated: (environments,). Rewards are stored as given.
            next_frames: (environments, height, width), the frames that the policy sees next (the first after a reset).
            final_frames: the same shape, the last frame of each episode that ended; other rows are not read. None is
                enough if no episode ended.
            lost: (environments,), whether a life was lost, which counts as terminated although the episode continues.
        """
        time, ended = self.count, terminated | truncated
        self._row("actions", time)[:] = actions
        self._row("rewards", time)[:] = rewards
        self._row("terminated", time)[:] = terminated if lost is None else terminated | lost
        self._row("ended", time)[:] = ended
        age = np.minimum(self._row("age", time) + 1, self.stack - 1)
        self._row("age", time + 1)[:] = np.where(ended, 0, age)
        self.frames[self._slot(time + 1)] = next_frames
        for index in np.flatnonzero(ended):
            self.final_frames[time, int(index)] = np.array(final_frames[index], np.uint8)
        self.count += 1
        oldest = self.count - self.depth
        while self.final_frames and (first := next(iter(self.final_frames)))[0] < oldest:
            del self.final_frames[first]

    def _row(self, name: str, time: int) -> np.ndarray:
        """Return the values (environments,) of a column at `time`, as a view."""
        return self.facts[name][time % (self.depth + 1)]

    def _facts(self, name: str, times: np.ndarray, environments: np.ndarray) -> np.ndarray:
        """Return the values of a column at times and environments, which broadcast."""
        return self.facts[name][times % (self.depth + 1), environments]

    def _slot(self, time: int | np.ndarray) -> int | np.ndarray:
        return (time - self.fork_time) % len(self.frames)

    def sample(self, size: int, generator: np.random.Generator, device: torch.device | str = "cpu") -> Batch:
        """Return `size` transitions, drawn uniformly with replacement from the last `capacity`."""
        times, environments = self._draw(size, generator)
        return self.transitions(times, environments, device)

    def transitions(
        self, times: np.ndarray, environments: np.ndarray, device: torch.device | str = "cpu"
    ) -> Batch:
        """Return the transitions at given times (rows since the start of the run) and environments, each (B,)."""
        rewards, last = self._rewards(times, environments)
        if last is times:
            now = following = send(self._stacks(times, environments), device)
        else:
            both = self._stacks(np.concatenate([times, last]), np.concatenate([environments, environments]))
            now, following = send(both, device).chunk(2)
        actions = self._facts("actions", times, environments).astype(np.int64)
        terminated = self._facts("terminated", last, environments).astype(np.float32)
        return Batch(
            now[:, :-1],
            send(torch.from_numpy(actions), device),
            send(torch.from_numpy(rewards), device),
            following[:, 1:],
            send(torch.from_numpy(terminated), device),
            None if self.n_step == 1 else send(torch.from_numpy(last - times + 1), device),
        )

    def _rewards(self, times: np.ndarray, environments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the discounted sums of rewards (B,) float32 and the times (B,) of the last step of each."""
        if self.n_step == 1:
            return self._facts("rewards", times, environments), times
        ahead = np.arange(self.n_step)
        later, games = times[:, None] + ahead, environments[:, None]
        over = self._facts("terminated", later, games) | self._facts("ended", later, games)
        counted = later < self.count
        counted[:, 1:] &= ~np.logical_or.accumulate(over, axis=1)[:, :-1]
        weights = np.where(counted, self.discount**ahead, 0.0)
        rewards = (self._facts("rewards", later, games) * weights).sum(axis=1)
        return rewards.astype(np.float32), times + counted.sum(axis=1) - 1

    def _stacks(self, times: np.ndarray, environments: np.ndarray) -> Tensor:
        """Return the frames (B, stack + 1, height, width) of the observations at `times` and of those that follow."""
        age = self._facts("age", times, environments).astype(np.int64)
        back = np.minimum(np.arange(self.stack - 1, -1, -1), age[:, None])  # (B, stack), oldest first
        wanted = np.concatenate([times[:, None] - back, times[:, None] + 1], axis=1)
        images = self._frames_at(wanted, np.broadcast_to(environments[:, None], wanted.shape))
        for row in np.flatnonzero(self._facts("ended", times, environments)):
            images[row, -1] = self.final_frames[int(times[row]), int(environments[row])]
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return torch.from_numpy(images).contiguous(memory_format=layout)

    def _frames_at(self, times: np.ndarray, environments: np.ndarray) -> np.ndarray:
        """Return frames (..., height, width) at times and environments (...), those before the fork from the parent."""
        if self.old_frames is None:
            return self.frames[self._slot(times), environments]
        images = np.empty((*times.shape, *self.frame_shape), np.uint8)
        own = times >= self.fork_time
        images[own] = self.frames[self._slot(times[own]), environments[own]]
        images[~own] = self.old_frames[times[~own] % len(self.old_frames), environments[~own]]
        return images

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, those of the parent included."""
        arrays = [self.frames, *self.facts.values(), *self.final_frames.values()]
        arrays += [] if self.old_frames is None else [self.old_frames]
        return sum(array.nbytes for array in arrays)

    def state_dict(self) -> dict[str, Any]:
        """Flush the file and return the rest of a checkpoint. Rows that are added from now on are counted for
        `must_save`."""
        self.frames.flush()
        self._note_checksums()
        self.saved_count = self.count
        finals = np.array(list(self.final_frames.values()), np.uint8).reshape(-1, *self.frame_shape)
        written = self.count + 1  # rows of facts
        return {
            "count": self.count,
            "fork_time": self.fork_time,
            "checksums": dict(self.checksums),
            "facts": {name: torch.from_numpy(array[:written].copy()) for name, array in self.facts.items()},
            "final_keys": torch.tensor(list(self.final_frames), dtype=torch.int64).reshape(-1, 2),
            "final_frames": torch.from_numpy(finals),
            # `start` overwrites it, also right after a checkpoint
            "newest": torch.from_numpy(self.frames[self._slot(self.count)].copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` of this replay, or of the parent of a new fork, returned. Raises UserError if frames in
        the files have changed since then."""
        self.count = self.saved_count = int(state["count"])
        self.checksums = dict(state["checksums"])
        for name, array in state["facts"].items():
            self.facts[name][: len(array)] = array.numpy()
        keys = [tuple(pair) for pair in state["final_keys"].tolist()]
        self.final_frames = dict(zip(keys, state["final_frames"].numpy().copy()))
        self.frames[self._slot(self.count)] = state["newest"].numpy()
        for (first, end), value in self.checksums.items():
            if self._checksum(first, end) != value:
                raise UserError(
                    f"the replay in {self.path.parent} is damaged: steps {first} to {end - 1} differ from their checksum; "
                    "delete the run's folder, and that of its shared first phase (trunks/), to start over"
                )

    def _note_checksums(self) -> None:
        """Note the checksums of the rows since the last checkpoint, and drop those of rows that no stack shows."""
        oldest = max(0, self.count - self.depth - self.stack + 1)
        for first in range(max(oldest, self.saved_count), self.count, BLOCK):
            rows = first, min(first + BLOCK, self.count)
            self.checksums[rows] = self._checksum(*rows)
        for first, end in [rows for rows in self.checksums if rows[0] < oldest]:
            del self.checksums[first, end]
            if end > oldest:
                self.checksums[oldest, end] = self._checksum(oldest, end)

    def _checksum(self, first: int, end: int) -> int:
        """Return the CRC of the frames at times `first` to `end` - 1, which nothing changes any more."""
        times = np.arange(first, end)
        return zlib.crc32(self._frames_at(*np.meshgrid(times, np.arange(self.environments), indexing="ij")))


class FlatReplay(_Ring):
    """Replay of vector observations and continuous actions, in memory; a checkpoint holds its data.

    Args:
        capacity: number of transitions.
        observation_size, action_size: lengths of the vectors (float32).

    Raises UserError where memory is too small.
    """

    def __init__(self, capacity: int, observation_size: int, action_size: int):
        super().__init__(capacity, 1)
        needed, free = capacity * (4 * (2 * observation_size + action_size + 1) + 1), free_memory()
        if needed > free:
            sizes = f"{needed / 1e9:.2f} GB of memory but {free / 1e9:.2f} GB are free"
            raise UserError(f"the replay needs {sizes}: lower replay")
        self.columns = {
            "observations": np.zeros((capacity, observation_size), np.float32),
            "actions": np.zeros((capacity, action_size), np.float32),
            "rewards": np.zeros(capacity, np.float32),
            "next_observations": np.zeros((capacity, observation_size), np.float32),
            "terminated": np.zeros(capacity, np.bool_),
        }

    def add(
        self,
        observations: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_observations: np.ndarray,
        terminated: np.ndarray,
    ) -> None:
        """Store one step; `next_observations` of an ended episode is its true last observation."""
        values = (observations, actions, rewards, next_observations, terminated)
        for column, value in zip(self.columns.values(), values):
            column[self.count % self.capacity] = value
        self.count += 1

    def sample(self, size: int, generator: np.random.Generator, device: torch.device | str = "cpu") -> Batch:
        """Return `size` transitions, drawn uniformly with replacement from the last `capacity`."""
        times, _ = self._draw(size, generator)
        picked = {name: column[times % self.capacity] for name, column in self.columns.items()}
        picked["terminated"] = picked["terminated"].astype(np.float32)
        return Batch(**{name: send(torch.from_numpy(array), device) for name, array in picked.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the data written so far and the counter."""
        rows = min(self.count, self.capacity)
        columns = {name: torch.from_numpy(column[:rows].copy()) for name, column in self.columns.items()}
        return {"count": self.count, "columns": columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.count = int(state["count"])
        for name, column in state["columns"].items():
            self.columns[name][: len(column)] = column.numpy()
