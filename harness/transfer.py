"""Copies of tensors from the CPU to the device that trains."""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_PINNED_MEMORY = ("cpu", "mps")


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on `device`. Copies from the CPU to a GPU go through pinned memory, so that they are asynchronous."""
    if torch.device(device).type in WITHOUT_PINNED_MEMORY or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
