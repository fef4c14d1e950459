"""Randomness by purpose: every stream is a pure function of (seed, purpose, position), so a resumed run needs no state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, purpose: str, *position: int | str) -> int:
    """63-bit seed of one stream; different purposes and positions give unrelated streams."""
    text = "/".join(map(str, (seed, purpose, *position)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


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
