"""A pass through networks as one compiled graph, its gradients included where it computes them itself.

For devices that wait for the next launch more than they compute; on a CPU, what backward needs is kept in fewer places.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo


def captured(
    function: Callable[..., Any], device: torch.device, backend: str = "inductor"
) -> Callable[..., Any]:
    """`function` of networks and tensors, which may call `torch.autograd.grad`, through torch.compile as one graph.

    What has been differentiated inside is returned detached. On a GPU mode="reduce-overhead" records CUDA graphs and
    replays them; their outputs live in fixed memory until the next call, so they are valid for one update. On a CPU it
    only fuses. Not run on a GPU by us.
    """
    # Releases of torch that trace gradients without being asked may drop the switch.
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):
        torch._dynamo.config.trace_autograd_ops = True
    mode = "reduce-overhead" if device.type == "cuda" else "default"
    compiled = torch.compile(function, fullgraph=True, dynamic=False, mode=mode, backend=backend)

    def run(*args: Any) -> Any:
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        return compiled(*args)

    return run
