"""Compilation of an update's forward and backward pass into one graph.

This helps on devices that spend more time waiting for kernel launches than computing; on a CPU it saves memory
traffic.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo


def captured(
    function: Callable[..., Any], device: torch.device, backend: str = "inductor"
) -> Callable[..., Any]:
    """Return `function`, which may call `torch.autograd.grad`, compiled by torch.compile as one graph.

    Outputs that were differentiated inside `function` come back detached. On a GPU, mode="reduce-overhead" records
    CUDA graphs and replays them; their outputs live in fixed memory and are overwritten by the next call. On a CPU,
    operations are fused only. On a GPU, only short runs have been made.
    """
    # Later releases of torch may trace gradients by default and drop this switch.
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):
        torch._dynamo.config.trace_autograd_ops = True
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    compiled = torch.compile(function, fullgraph=True, dynamic=False, mode=mode, backend=backend)

    def run(*args: Any) -> Any:
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        return compiled(*args)

    return run
