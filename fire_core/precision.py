"""Full float32 products inside a block of code, whatever the caller has set globally."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def matmul_precision(device: torch.device, precision: str) -> Iterator[None]:
    """Compute float32 products in IEEE float32 ("fp32") or let CUDA use TF32 ("tf32"); autocast is off inside.

    The caller's settings are put back at the end, also after an error. They are global to the process: another
    thread that multiplies meanwhile sees them changed.
    """
    backends: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    backends[0].fp32_precision = "tf32" if precision == "tf32" else "ieee"
    backends[1].fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, setting in zip(backends, before, strict=True):
            backend.fp32_precision = setting
