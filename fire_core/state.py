"""What the calls of a method work on: networks, optimizers, data, and where training stands."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass
class State:
    """Everything that the calls of a method work on. `fire_core.attach` fills it in; methods change it in place.

    Attributes:
        nets: name -> module to treat.
        optimizers: name -> optimizer. Methods may clear moments of entries that they change, no more.
        followers: (target network, its source) pairs; a follower is copied from its source after a treatment.
        initial: net name -> CPU copy of the starting parameters and buffers (`snapshot`).
        batches: returns a new iterator of (inputs, targets) of the coming phase, for methods that look at data.
        loss: (net output, targets) -> scalar, for methods that need gradients.
        generator: CPU generator of the method's own randomness in this phase.
        phase: index of the current phase (with a trigger: number of acts so far).
        compiled: whether the nets are trained through torch.compile, which hides activations from hooks.
    """

    nets: dict[str, nn.Module]
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    followers: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    initial: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    generator: torch.Generator | None = None
    phase: int = 0
    compiled: bool = False


def snapshot(nets: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    """Return a CPU copy of every net's parameters and buffers, net name -> state dict, for `State.initial`."""
    return {
        n: {k: v.cpu().clone() if isinstance(v, Tensor) else deepcopy(v) for k, v in net.state_dict().items()}
        for n, net in nets.items()
    }


def load_values(net: nn.Module, values: Mapping[str, Any]) -> None:
    """Load values that were taken from `net` as a plain dict, which lacks the versions of modules that state dicts have."""
    held = net.state_dict()
    held.update(values)
    net.load_state_dict(held)
