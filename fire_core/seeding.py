"""Seeds of random streams, each a pure function of (seed, purpose, position), so that a resumed run needs no state."""

from __future__ import annotations

import hashlib


def derive(seed: int, purpose: str, *position: int | str) -> int:
    """Return the 63-bit seed of one stream; different purposes and positions give unrelated streams."""
    text = "/".join(map(str, (seed, purpose, *position)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
