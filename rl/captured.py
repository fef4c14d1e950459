"""Losses of an update as one compiled graph each way, for devices that wait for the next launch more than they compute."""

from collections.abc import Callable
from typing import Any

import torch


def captured(
    losses: Callable[..., tuple[torch.Tensor, ...]], device: torch.device, backend: str = "inductor"
) -> Callable[..., Any]:
    """`losses` (a function of networks and tensors that returns tensors) through torch.compile, without a graph break.

    On a GPU mode="reduce-overhead" records forward and backward pass as CUDA graphs and replays them; their outputs live in
    fixed memory until the next call, so the returned tensors are valid for one update. On a CPU it only fuses.
    Not run on a GPU by us.
    """
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    compiled = torch.compile(losses, fullgraph=True, dynamic=False, mode=mode, backend=backend)

    def run(*args: Any) -> tuple[torch.Tensor, ...]:
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        return compiled(*args)

    return run
