"""Uniform replay for off-policy agents: FrameReplay for stacked images, FlatReplay for vectors.

Both are rings over `environments` copies that step together: one row of the ring is one step of all of them. Vectors
are small and kept in memory. Frames are kept in memory or in memory-mapped files (`folder=`). A checkpoint of mapped
files is a flush and a few counters, because the data is on disk already. Mapped rings have `reserve` spare rows, so
that new rows do not overwrite data that the last `checkpoints` checkpoints need; `must_save` says when the next
checkpoint is due for this reason.
"""

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fire_core.errors import UserError
from harness.transfer import send
from rl.columns import Columns, Specification, size_of, stored_rows

BLOCK = 256  # rows of a mapped replay that have a checksum of their own


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

    def __init__(self, capacity: int, environments: int, spare_rows: int = 0):
        if capacity <= 0 or environments <= 0 or capacity % environments:
            raise UserError(
                f"replay capacity {capacity}: give a positive multiple of {environments} environments"
            )
        self.capacity, self.environments = capacity, environments
        self.depth = capacity // environments
        self.rows = self.depth + spare_rows
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
    it, and its next observation lies as many steps later. It is shorter where the episode ends earlier, and where later
    steps have not been played yet.

    Args:
        capacity: transitions over all environments together.
        environments: environments that step together.
        frame_shape: (height, width).
        stack: frames in an observation.
        folder: where the ring is mapped; None keeps it in memory.
        checkpoints: number of latest checkpoints that remain loadable if the ring is mapped.
        reserve: spare rows, see the module. None: those of the existing files; of a new ring, if it is mapped, 1/16, at
            least 32 per checkpoint, else 0.
        existing: continue with the files in `folder` (then call `load_state_dict`).
        read_only: map these files without the right to write.
        parent: a replay that this one continues; its frames are read in place and never written. See `fork`.
        new_rows: rows of frames that will be added at most, for a fork; None: no limit.
        channels_last: samples lie in memory as (B, height, width, stack), the layout of channels-last convolutions.
        n_step, discount: steps of a transition at most, and the factor of a reward one step later.

    Raises UserError for a capacity that is not a multiple of `environments` or a reserve too small for the
    checkpoints.
    """

    def __init__(
        self,
        capacity: int,
        environments: int,
        frame_shape: tuple[int, int],
        *,
        stack: int = 4,
        folder: str | Path | None = None,
        checkpoints: int = 2,
        reserve: int | None = None,
        existing: bool = False,
        read_only: bool = False,
        parent: "FrameReplay | None" = None,
        new_rows: int | None = None,
        channels_last: bool = False,
        n_step: int = 1,
        discount: float = 1.0,
    ):
        folder = None if folder is None else Path(folder)
        if reserve is None and folder is not None and existing:
            rows = stored_rows(folder / "actions.npy") or 0
            reserve = max(checkpoints, rows - capacity // environments - stack - 1)
        elif reserve is None:
            reserve = 0 if folder is None else max(32 * checkpoints, capacity // environments // 16)
        super().__init__(capacity, environments, stack + 1 + reserve)
        if 0 < reserve < checkpoints:
            raise UserError(
                f"reserve={reserve} rows for {checkpoints} checkpoints: give at least one for each"
            )
        self.reserve, self.checkpoints = reserve, checkpoints
        self.saved_count = 0  # rows of transitions at the last checkpoint
        self.frame_shape, self.stack, self.parent = tuple(frame_shape), stack, parent
        self.channels_last, self.n_step, self.discount = channels_last, n_step, discount
        self.fork_time = 0 if parent is None else parent.count
        self.frame_rows = self.rows if new_rows is None else min(self.rows, new_rows + 1)
        options = {"existing": existing, "read_only": read_only}
        frames, facts = self._specifications()
        self.frames = Columns(frames, self.frame_rows, folder, **options)["frames"]
        self.facts = Columns(facts, self.rows, folder, **options)
        # last frames of ended episodes, by (time, environment)
        self.final_frames: dict[tuple[int, int], np.ndarray] = {}
        self.checksums: dict[tuple[int, int], int] = {}  # of rows in mapped files, (first, end) -> CRC
        if parent is not None and not existing:
            self._take_over(parent)

    @property
    def must_save(self) -> bool:
        """Whether the rows since the last checkpoint have used up their share of the reserve: save before `add`."""
        share = self.reserve // self.checkpoints
        return 0 < share <= self.count - self.saved_count and self.count > self.depth

    def _specifications(self) -> tuple[Specification, Specification]:
        """Return the columns of frames, and those of all other values."""
        n = (self.environments,)
        facts: Specification = {
            "actions": ("int16", n),
            "rewards": ("float32", n),
            "terminated": ("bool", n),
            "ended": ("bool", n),
            "age": ("uint8", n),
        }
        return {"frames": ("uint8", (*n, *self.frame_shape))}, facts

    def fork_bytes(self, new_rows: int) -> int:
        """Return the bytes that `fork(new_rows=new_rows)` will take."""
        frames, facts = self._specifications()
        return size_of(frames, min(self.rows, new_rows + 1)) + size_of(facts, self.rows)

    def fork(self, folder: str | Path | None, *, new_rows: int, existing: bool = False) -> "FrameReplay":
        """Return a replay that continues this one: old frames are read from here, new ones are written to `folder`.

        Several forks share the old frames, also in other processes that open this replay `read_only`. A fork takes
        disk space for `new_rows` rows of frames and for its other columns. This replay must not be written to
        afterwards.
        """
        return FrameReplay(
            self.capacity,
            self.environments,
            self.frame_shape,
            stack=self.stack,
            folder=folder,
            checkpoints=self.checkpoints,
            reserve=self.reserve,
            parent=self,
            new_rows=new_rows,
            existing=existing,
            channels_last=self.channels_last,
            n_step=self.n_step,
            discount=self.discount,
        )

    def _take_over(self, parent: "FrameReplay") -> None:
        for name, array in parent.facts.arrays.items():
            self.facts[name][:] = array
        self.final_frames = dict(parent.final_frames)
        self.checksums = dict(parent.checksums)
        self.count = self.saved_count = parent.count
        if self.count:
            self.frames[0] = parent.frames[self.count % parent.frame_rows]

    def start(self, frames: np.ndarray) -> None:
        """Store the first frames (environments, height, width) after a reset of all environments.

        In the middle of a run, the step before is marked as the end of a truncated episode.
        """
        if self.count:
            before = (self.count - 1) % self.rows
            for index in np.flatnonzero(~self.facts["ended"][before]):
                last = self.frames[self._slot(self.count), index]
                self.final_frames[self.count - 1, int(index)] = last.copy()
            self.facts["ended"][before] = True
            for first, end in [rows for rows in self.checksums if rows[1] == self.count]:
                self.checksums[first, end] = self._checksum(first, end)
        self.frames[self._slot(self.count)] = frames
        self.facts["age"][self.count % self.rows] = 0

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
        slot, following = time % self.rows, (time + 1) % self.rows
        facts = self.facts
        facts["actions"][slot] = actions
        facts["rewards"][slot] = rewards
        facts["terminated"][slot] = terminated if lost is None else terminated | lost
        facts["ended"][slot] = ended
        facts["age"][following] = np.where(ended, 0, np.minimum(facts["age"][slot] + 1, self.stack - 1))
        self.frames[self._slot(time + 1)] = next_frames
        for index in np.flatnonzero(ended):
            self.final_frames[time, int(index)] = np.array(final_frames[index], np.uint8)
        self.count += 1
        self._forget_old_ends()

    def _forget_old_ends(self) -> None:
        oldest = self.count - self.depth - self.reserve
        while self.final_frames and (first := next(iter(self.final_frames)))[0] < oldest:
            del self.final_frames[first]

    def _slot(self, time: int | np.ndarray) -> int | np.ndarray:
        return (time - self.fork_time) % self.frame_rows

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
            now = following = send(torch.from_numpy(self._stacks(times, environments)), device)
        else:
            both = self._stacks(np.concatenate([times, last]), np.concatenate([environments, environments]))
            now, following = send(torch.from_numpy(both), device).chunk(2)
        actions = self.facts["actions"][times % self.rows, environments].astype(np.int64)
        terminated = self.facts["terminated"][last % self.rows, environments].astype(np.float32)
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
            return self.facts["rewards"][times % self.rows, environments], times
        ahead = np.arange(self.n_step)
        later, games = times[:, None] + ahead, environments[:, None]
        slots = later % self.rows
        over = self.facts["terminated"][slots, games] | self.facts["ended"][slots, games]
        counted = later < self.count
        counted[:, 1:] &= ~np.logical_or.accumulate(over, axis=1)[:, :-1]
        weights = np.where(counted, self.discount**ahead, 0.0)
        rewards = (self.facts["rewards"][slots, games] * weights).sum(axis=1)
        return rewards.astype(np.float32), times + counted.sum(axis=1) - 1

    def _stacks(self, times: np.ndarray, environments: np.ndarray) -> np.ndarray:
        """Return the frames (B, stack + 1, height, width) of the observations at `times` and of those that follow."""
        slots = times % self.rows
        age = self.facts["age"][slots, environments].astype(np.int64)
        back = np.minimum(np.arange(self.stack - 1, -1, -1), age[:, None])  # (B, stack), oldest first
        wanted = np.concatenate([times[:, None] - back, times[:, None] + 1], axis=1)
        images = self._gather(wanted, environments[:, None])
        for row in np.flatnonzero(self.facts["ended"][slots, environments]):
            images[row, -1] = self.final_frames[int(times[row]), int(environments[row])]
        return images

    def _gather(self, times: np.ndarray, environments: np.ndarray) -> np.ndarray:
        """Return frames (B, k, height, width) at times (B, k) and environments (B, 1), laid out as samples are."""
        environments = np.broadcast_to(environments, times.shape)
        if not self.channels_last:
            return self._frames_at(times, environments)
        count, depth = times.shape
        images = np.empty((count, *self.frame_shape, depth), np.uint8).transpose(0, 3, 1, 2)
        for k in range(depth):
            images[:, k] = self._frames_at(times[:, k], environments[:, k])
        return images

    def _frames_at(self, times: np.ndarray, environments: np.ndarray) -> np.ndarray:
        """Return frames (..., height, width) at times and environments (...), those before the fork from the parent."""
        if self.parent is None:
            return self.frames[self._slot(times), environments]
        images = np.empty((*times.shape, *self.frame_shape), np.uint8)
        own = times >= self.fork_time
        images[own] = self.frames[self._slot(times[own]), environments[own]]
        images[~own] = self.parent._frames_at(times[~own], environments[~own])
        return images

    @property
    def bytes(self) -> int:
        """Bytes of all arrays of this replay, without the parent's."""
        finals = sum(frame.nbytes for frame in self.final_frames.values())
        return self.frames.nbytes + self.facts.bytes + finals

    def flush(self) -> None:
        """Write the changed pages of mapped files to the disk; does nothing in memory."""
        self.facts.flush()
        if isinstance(self.frames, np.memmap):
            self.frames.flush()

    def state_dict(self) -> dict:
        """Return the data of a checkpoint: counters and final frames if mapped (files are flushed), all the data if in
        memory. Rows that are added from now on are counted for `must_save`."""
        self.flush()
        if isinstance(self.frames, np.memmap):
            self._note_checksums()
        self.saved_count = self.count
        finals = np.zeros((len(self.final_frames), *self.frame_shape), np.uint8)
        for row, frame in enumerate(self.final_frames.values()):
            finals[row] = frame
        state = {
            "count": self.count,
            "row_checksums": dict(self.checksums),
            "fork_time": self.fork_time,
            "final_keys": torch.tensor(list(self.final_frames), dtype=torch.int64).reshape(-1, 2),
            "final_frames": torch.from_numpy(finals),
            "edge": {name: torch.from_numpy(row.copy()) for name, row in self._edge().items()},
        }
        if not isinstance(self.frames, np.memmap):
            state["frames"] = torch.from_numpy(self.frames.copy())
            state["facts"] = {k: torch.from_numpy(v.copy()) for k, v in self.facts.arrays.items()}
        return state

    def _note_checksums(self) -> None:
        """Note the checksums of the rows since the last checkpoint, and drop those of rows that cannot be drawn."""
        oldest = max(0, self.count - self.depth)
        for first in range(max(oldest, self.saved_count), self.count, BLOCK):
            rows = first, min(first + BLOCK, self.count)
            self.checksums[rows] = self._checksum(*rows)
        self.checksums = {rows: value for rows, value in self.checksums.items() if rows[0] >= oldest}

    def _checksum(self, first: int, end: int) -> int:
        """Return the CRC of what steps `first` to `end` - 1 stored. Of this, only `start` changes something later."""
        times = np.arange(first, end)
        every, value = np.arange(self.environments), 0
        for name in self.facts.arrays:
            value = zlib.crc32(self.facts[name][times % self.rows], value)
        return zlib.crc32(self._frames_at(*np.meshgrid(times, every, indexing="ij")), value)

    def _check(self, checksums: dict[tuple[int, int], int]) -> None:
        """Raise UserError if rows of the mapped files have another checksum than the checkpoint says."""
        self.checksums = dict(checksums)
        for (first, end), value in self.checksums.items():
            if self._checksum(first, end) != value:
                raise UserError(
                    f"the replay in {self.facts.folder} is damaged: steps {first} to {end - 1} differ from their checksum; "
                    "delete the run's folder, and that of its shared first phase (trunks/), to start over"
                )

    def _edge(self) -> dict[str, np.ndarray]:
        """Return the rows that `start` changes in place; a checkpoint taken right before it must hold them."""
        return {
            "ended": self.facts["ended"][(self.count - 1) % self.rows],
            "age": self.facts["age"][self.count % self.rows],
            "frame": self.frames[self._slot(self.count)],
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned. For a mapped replay, `folder` must hold the files of that run."""
        self.count = self.saved_count = int(state["count"])
        keys = [tuple(pair) for pair in state["final_keys"].tolist()]
        self.final_frames = dict(zip(keys, state["final_frames"].numpy().copy()))
        mapped = isinstance(self.frames, np.memmap)
        if not mapped:
            self.frames[:] = state["frames"].numpy()
            for name, array in state["facts"].items():
                self.facts[name][:] = array.numpy()
        for name, row in self._edge().items():
            if row.flags.writeable:
                row[:] = state["edge"][name].numpy()
        if mapped:  # checkpoints of earlier versions have other checksums, under another name
            self._check(state.get("row_checksums", {}))


class FlatReplay(_Ring):
    """Replay of vector observations and continuous actions, in memory; a checkpoint holds its data.

    Args:
        capacity: number of transitions.
        observation_size, action_size: lengths of the vectors (float32).
    """

    def __init__(self, capacity: int, observation_size: int, action_size: int):
        super().__init__(capacity, 1)
        specification = {
            "observations": ("float32", (1, observation_size)),
            "actions": ("float32", (1, action_size)),
            "rewards": ("float32", (1,)),
            "next_observations": ("float32", (1, observation_size)),
            "terminated": ("bool", (1,)),
        }
        self.columns = Columns(specification, self.rows)

    def add(
        self,
        observations: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        next_observations: np.ndarray,
        terminated: np.ndarray,
    ) -> None:
        """Store one step; `next_observations` of an ended episode is its true last observation."""
        row = self.count % self.rows
        values = (observations, actions, rewards, next_observations, terminated)
        for name, value in zip(self.columns.arrays, values):
            self.columns[name][row] = np.reshape(value, self.columns[name].shape[1:])
        self.count += 1

    def sample(self, size: int, generator: np.random.Generator, device: torch.device | str = "cpu") -> Batch:
        """Return `size` transitions, drawn uniformly with replacement from the last `capacity`."""
        times, environments = self._draw(size, generator)
        rows = times % self.rows
        picked = {name: array[rows, environments] for name, array in self.columns.arrays.items()}
        picked["terminated"] = picked["terminated"].astype(np.float32)
        tensors = {name: send(torch.from_numpy(array), device) for name, array in picked.items()}
        return Batch(
            tensors["observations"],
            tensors["actions"],
            tensors["rewards"],
            tensors["next_observations"],
            tensors["terminated"],
        )

    def state_dict(self) -> dict:
        """Return the data written so far and the counter."""
        rows = min(self.count, self.rows)
        columns = {name: torch.from_numpy(array[:rows].copy()) for name, array in self.columns.arrays.items()}
        return {"count": self.count, "columns": columns}

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        self.count = int(state["count"])
        for name, array in state["columns"].items():
            self.columns[name][: len(array)] = array.numpy()
