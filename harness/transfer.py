"""Tensors on their way to the device that trains."""

from __future__ import annotations

import torch
from torch import Tensor

WITHOUT_PINNED_MEMORY = ("cpu", "mps")


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor of the CPU on `device`: to a GPU through pinned memory, so that neither side waits for the other."""
    if torch.device(device).type in WITHOUT_PINNED_MEMORY:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
