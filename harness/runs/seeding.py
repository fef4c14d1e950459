"""Random generators of a run, each seeded by the run's seed and its purpose (see `fire_core.seeding`)."""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from fire_core import seeding


def generator(seed: int, purpose: str, *position: int | str) -> torch.Generator:
    """Return a CPU generator for `purpose`, e.g. generator(seed, "data", phase, epoch)."""
    return torch.Generator().manual_seed(seeding.derive(seed, purpose, *position))


def numpy_generator(seed: int, purpose: str, *position: int | str) -> np.random.Generator:
    """Return a numpy generator for `purpose`."""
    return np.random.default_rng(seeding.derive(seed, purpose, *position))


def seeded(seed: int, purpose: str, *position: int | str) -> AbstractContextManager[None]:
    """Return a context in which all global generators are seeded, as for initial weights; afterwards they are as before."""
    return seeding.seeded(seeding.derive(seed, purpose, *position))


class NumpyStreams(dict[str, np.random.Generator]):
    """Generators by purpose that are drawn from one after the other, and saved with a run."""

    def __init__(self, seed: int, *purposes: str) -> None:
        super().__init__({purpose: numpy_generator(seed, purpose) for purpose in purposes})

    def state_dict(self) -> dict[str, Any]:
        return {purpose: stream.bit_generator.state for purpose, stream in self.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for purpose, stream in self.items():
            stream.bit_generator.state = saved[purpose]
