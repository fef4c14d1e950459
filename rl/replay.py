"""Uniform replay for off-policy agents: FrameReplay for stacked images, FlatReplay for vectors, both rings in memory.

A checkpoint holds all transitions: 1,000,000 of 84 x 84 pixels take 7.1 GB, compressed 0.1 to 0.3 GB.
"""

import zlib
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from fire_core.errors import UserError
from harness.device import send

Array = np.ndarray
BLOCK = 256  # rows of frames that are compressed together


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
        return [Batch(*part) for part in zip(*(values.split(size) for values in self if values is not None))]


class FrameReplay:
    """Replay of image stacks that stores every frame once (uint8).

    A row of the ring is one step of all environments. Exactly the last `capacity` transitions can be drawn. A stack never
    reaches across the start of an episode; missing frames repeat the first one, as in the usual frame-stack wrapper. The
    next observation of an episode's last step is its true final one.

    Args:
        capacity: transitions over all environments together, a multiple of `environments`, which step together.
        frame_shape: (height, width). stack: frames in an observation.
        channels_last: samples lie in memory as (B, height, width, stack), the layout of channels-last convolutions.
        n_step: rewards that a transition sums up, discounted by their distance; its next observation lies as many steps
            later. Both are fewer where the episode ends earlier, and where later steps have not been played yet.
        discount: factor of a reward one step later.
        device: where batches are used. The frames lie there too if it is a GPU with twice as much free memory.
    Raises: UserError where memory is too small.
    """

    def __init__(
        self,
        capacity: int,
        environments: int,
        frame_shape: tuple[int, int],
        *,
        stack: int = 4,
        channels_last: bool = False,
        n_step: int = 1,
        discount: float = 1.0,
        device: torch.device | str = "cpu",
    ):
        self.environments, self.depth, self.stack = environments, capacity // environments, stack
        self.channels_last, self.n_step, self.discount = channels_last, n_step, discount
        self.count = 0  # rows of transitions ever added
        self.length = self.depth + stack + 1  # rows of the ring
        shape, place = (self.length, environments, *frame_shape), torch.device(device)
        if place.type != "cpu" and 2 * np.prod(shape) <= torch.cuda.mem_get_info(place)[0]:
            self.frames = torch.zeros(shape, dtype=torch.uint8, device=place)
        else:
            self.frames = torch.from_numpy(_zeros(shape, np.uint8))
        kinds = {"actions": np.int16, "rewards": np.float32, "terminated": np.bool_, "ended": np.bool_}
        kinds |= {"age": np.uint8}  # frames since the start of the episode, at most stack - 1
        self.facts = {name: np.zeros((self.length, environments), kind) for name, kind in kinds.items()}
        self.final_frames: dict[tuple[int, int], Array] = {}  # of ended episodes, by (time, environment)

    def __len__(self) -> int:
        return min(self.count, self.depth) * self.environments

    def start(self, frames: Array) -> None:
        """Store the first frames (environments, height, width) after a reset, which truncates the episodes before it."""
        slot = self.count % self.length
        if self.count:
            ended, last = self.facts["ended"][slot - 1], self.frames[slot].cpu().numpy()
            for index in np.flatnonzero(~ended):
                self.final_frames[self.count - 1, int(index)] = last[index].copy()
            ended[:] = True
        self.frames[slot] = torch.from_numpy(frames)
        self.facts["age"][slot] = 0

    def add(
        self, actions: Array, rewards: Array, terminated: Array, truncated: Array, frames: Array, final: Array
    ) -> None:
        """Store one step of all environments, taken from the frames that were stored last.

        All but the frames (environments, height, width) are (environments,). `frames` are what the policy sees next (the
        first after a reset); of `final`, only the last frames of episodes that ended are read.
        """
        slot, following = self.count % self.length, (self.count + 1) % self.length
        ended = terminated | truncated
        row = {"actions": actions, "rewards": rewards, "terminated": terminated, "ended": ended}
        for name, values in row.items():
            self.facts[name][slot] = values
        age = np.minimum(self.facts["age"][slot] + 1, self.stack - 1)
        self.facts["age"][following] = np.where(ended, 0, age)
        self.frames[following] = torch.from_numpy(frames)
        for index in np.flatnonzero(ended):
            self.final_frames[self.count, int(index)] = final[index].copy()
        self.count += 1
        while self.final_frames and (first := next(iter(self.final_frames)))[0] < self.count - self.depth:
            del self.final_frames[first]

    def sample(self, size: int, generator: np.random.Generator, device: torch.device | str = "cpu") -> Batch:
        """Return `size` transitions, drawn uniformly with replacement from the last `capacity`."""
        flat = generator.integers(len(self), size=size)
        return self.transitions(self.count - 1 - flat // self.environments, flat % self.environments, device)

    def transitions(self, times: Array, games: Array, device: torch.device | str = "cpu") -> Batch:
        """Return the transitions at `times` (rows since the start of the run) of the environments `games`, each (B,)."""
        rewards, last = self._rewards(times, games)  # the last of the steps that the rewards are from
        if self.n_step == 1:
            now = following = self._stacks(times, games, device)
        else:
            both = np.concatenate([times, last]), np.concatenate([games, games])
            now, following = self._stacks(*both, device).chunk(2)
        actions = self.facts["actions"][times % self.length, games]
        terminated = self.facts["terminated"][last % self.length, games]
        numbers = np.stack([actions, rewards, terminated, last - times + 1]).astype(np.float32)
        a, r, t, n = send(torch.from_numpy(numbers), device)  # together, so that a GPU needs one copy
        return Batch(now[:, :-1], a.long(), r, following[:, 1:], t, n.long() if self.n_step > 1 else None)

    def _rewards(self, times: Array, games: Array) -> tuple[Array, Array]:
        """Return the discounted sums of rewards (B,) float32 and the times (B,) of the last step of each."""
        later = times[:, None] + np.arange(self.n_step)
        slots = later % self.length, games[:, None]
        counted = later < self.count
        counted[:, 1:] &= ~np.logical_or.accumulate(self.facts["ended"][slots], axis=1)[:, :-1]
        weights = np.where(counted, self.discount ** np.arange(self.n_step), 0.0)
        rewards = (self.facts["rewards"][slots] * weights).sum(axis=1)
        return rewards.astype(np.float32), times + counted.sum(axis=1) - 1

    def _stacks(self, times: Array, games: Array, device: torch.device | str) -> Tensor:
        """Return the frames (B, stack + 1, height, width) of the observations at `times` and of those that follow."""
        slots, frames, own = (times % self.length, games), self.frames.flatten(0, 1), self.frames.device
        age = self.facts["age"][slots].astype(np.int64)
        back = np.minimum(np.arange(self.stack - 1, -1, -1), age[:, None])  # (B, stack), oldest first
        wanted = np.concatenate([times[:, None] - back, times[:, None] + 1], axis=1)
        index = torch.from_numpy(wanted % self.length * self.environments + games[:, None])
        shape = (index.numel(), *frames.shape[1:])
        # the GPU copies from pinned memory by itself
        pinned = own.type == "cpu" and torch.device(device).type == "cuda"
        images = torch.empty(shape, dtype=torch.uint8, device=own, pin_memory=pinned)
        torch.index_select(frames, 0, send(index.flatten(), own), out=images)
        images = images.unflatten(0, index.shape)
        for row in np.flatnonzero(self.facts["ended"][slots]):
            images[row, -1] = torch.from_numpy(self.final_frames[int(times[row]), int(games[row])])
        images = send(images, device)
        if not self.channels_last:
            return images
        laid = torch.empty_like(images, memory_format=torch.channels_last)
        for k in range(self.stack + 1):  # one copy of all takes 2.6 times as long on a CPU
            laid[:, k] = images[:, k]
        return laid

    def state_dict(self) -> dict[str, Any]:
        """Return all that the replay holds, with the frames that a stack can show compressed."""
        blocks = []
        for first in range(max(0, self.count - self.depth - self.stack + 1), self.count + 1, BLOCK):
            end = min(first + BLOCK, self.count + 1)
            rows = self.frames[torch.arange(first, end) % self.length].cpu().numpy()
            packed = zlib.compress(rows, level=1)  # higher levels take twice as long and save a third
            blocks.append((first, end, torch.frombuffer(bytearray(packed), dtype=torch.uint8)))
        facts = {name: torch.from_numpy(a[: self.count + 1].copy()) for name, a in self.facts.items()}
        final = torch.from_numpy(np.array(list(self.final_frames.values()), np.uint8))
        ends = {"final_keys": list(self.final_frames), "final_frames": final}
        return {"count": self.count, "facts": facts, "frames": blocks} | ends

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])
        for name, array in state["facts"].items():
            self.facts[name][: len(array)] = array.numpy()
        self.final_frames = dict(zip(state["final_keys"], state["final_frames"].numpy()))
        for first, end, packed in state["frames"]:
            rows = torch.frombuffer(bytearray(zlib.decompress(packed.numpy())), dtype=torch.uint8)
            rows = rows.view(-1, *self.frames.shape[1:]).to(self.frames.device)
            self.frames[torch.arange(first, end) % self.length] = rows


class FlatReplay:
    """Replay of the last `capacity` transitions with observations and actions that are vectors of these sizes (float32)."""

    def __init__(self, capacity: int, observation_size: int, action_size: int):
        self.sizes = [observation_size, action_size, 1, observation_size, 1]  # in the order of Batch
        self.rows = _zeros((capacity, sum(self.sizes)), np.float32)
        self.count = 0  # rows ever added

    def __len__(self) -> int:
        return min(self.count, len(self.rows))

    def add(self, observed: Array, action: Array, reward: float, following: Array, terminated: bool) -> None:
        """Store one step; `following` of an ended episode is its true last observation."""
        values = observed, action, [reward], following, [terminated]
        self.rows[self.count % len(self.rows)] = np.concatenate(values, dtype=np.float32, casting="unsafe")
        self.count += 1

    def sample(self, size: int, generator: np.random.Generator, device: torch.device | str = "cpu") -> Batch:
        """Return `size` transitions, drawn uniformly with replacement from the last `capacity`."""
        rows = self.rows[(self.count - 1 - generator.integers(len(self), size=size)) % len(self.rows)]
        parts = send(torch.from_numpy(rows), device).split(self.sizes, dim=1)
        observations, actions, rewards, following, terminated = (part.contiguous() for part in parts)
        return Batch(observations, actions, rewards.squeeze(1), following, terminated.squeeze(1))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "rows": torch.from_numpy(self.rows[: len(self)].copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])
        self.rows[: len(self)] = state["rows"].numpy()


def _zeros(shape: tuple[int, ...], kind: type) -> Array:
    """Return zeros. Raises UserError where they need more memory than is available without swapping."""
    needed, free = np.prod(shape, dtype=float) * np.dtype(kind).itemsize, psutil.virtual_memory().available
    if needed > free:
        sizes = f"{needed / 1e9:.2f} GB of memory but {free / 1e9:.2f} GB are free"
        raise UserError(f"the replay needs {sizes}: give it a lower capacity")
    return np.full(shape, 0, kind)  # takes the memory at once, so that runs that start later see it
