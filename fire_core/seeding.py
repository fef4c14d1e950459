"""Seeds of random streams, pure functions of (seed, purpose, position), and blocks that keep a caller's random state."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, purpose: str, *position: int | str) -> int:
    """Return the 63-bit seed of one stream; different purposes and positions give unrelated streams."""
    text = "/".join(map(str, (seed, purpose, *position)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def kept_chance(generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Restore the states of these and of all global random generators after the block: Python's, NumPy's, CPU, CUDA."""
    own = [(generator, generator.get_state()) for generator in generators]
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=_devices()):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for generator, state in own:
                generator.set_state(state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all global generators in the block; before and after it they are the caller's."""
    with kept_chance():
        torch.default_generator.manual_seed(seed)
        if _devices():
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield


def _devices() -> list[int]:
    """Return the CUDA devices, if CUDA is in use: asking for the state of a generator would start it."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
