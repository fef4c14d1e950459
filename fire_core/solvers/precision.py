"""Precision of float32 matrix products inside a block of code, whatever the caller has set globally."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def matmul_precision(device: torch.device, precision: str) -> Iterator[None]:
    """Compute float32 products in IEEE float32 ("fp32") or let CUDA use TF32 ("tf32"); autocast is off inside.

    The caller's settings are restored at the end, also after an error. They are global to the process, so another
    thread sees the changed settings while the block runs.
    """
    before = _settings()
    _set("tf32" if precision == "tf32" else "ieee", "ieee")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _set(*before)


if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    _backends: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]

    def _settings() -> tuple[str, str]:
        """Return the precision of float32 products on CUDA and on the CPU."""
        return _backends[0].fp32_precision, _backends[1].fp32_precision

    def _set(cuda: str, cpu: str) -> None:
        _backends[0].fp32_precision, _backends[1].fp32_precision = cuda, cpu

else:  # torch below 2.9 has one setting for both, with other names

    def _settings() -> tuple[str, str]:
        return torch.get_float32_matmul_precision(), ""

    def _set(cuda: str, cpu: str) -> None:
        torch.set_float32_matmul_precision({"ieee": "highest", "tf32": "high"}.get(cuda, cuda))
