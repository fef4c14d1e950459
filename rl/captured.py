"""Compilation of an update's forward and backward pass into one graph, which saves kernel launches and memory traffic."""

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo


def captured(function: Callable, device: torch.device, backend: str = "inductor") -> Callable:
    """Return `function`, which may call `torch.autograd.grad`, compiled by torch.compile as one graph.

    On a GPU it records CUDA graphs, whose outputs are overwritten by the next call; only short runs have been made there.
    """
    torch._dynamo.config.recompile_limit = 64  # a graph for each number of members of a stack, and each shape
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):  # later releases of torch may drop this switch
        torch._dynamo.config.trace_autograd_ops = True
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    compiled = torch.compile(function, fullgraph=True, dynamic=False, mode=mode, backend=backend)

    def run(*args: Any) -> Any:
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        return compiled(*args)

    return run
