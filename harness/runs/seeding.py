"""The random generators of a run, each one seeded by what it is for (see `fire_core.seeding`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fire_core.seeding import derive


def generator(seed: int, purpose: str, *position: int | str) -> torch.Generator:
    """CPU generator for `purpose`, e.g. generator(seed, "data", phase, epoch)."""
    return torch.Generator().manual_seed(derive(seed, purpose, *position))


def numpy_generator(seed: int, purpose: str, *position: int | str) -> np.random.Generator:
    """The same for numpy."""
    return np.random.default_rng(derive(seed, purpose, *position))


@contextmanager
def seeded(seed: int, purpose: str, *position: int | str) -> Iterator[None]:
    """Seed torch's global generators inside the body (weight initialisation), and restore them afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(derive(seed, purpose, *position))
        yield
