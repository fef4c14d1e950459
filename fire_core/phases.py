"""What a method may see and change at a phase boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Phase:
    """A stretch of training on one data distribution. The boundary of phase k > 0 is the moment before it."""

    index: int
    name: str = ""


@dataclass
class State:
    """Everything the four calls of a method work on. The script fills it in; methods change it in place.

    Attributes:
        nets: name -> module to treat.
        optimizers: name -> optimizer; methods leave their state alone (see optim_state), some replace them.
        followers: (target network, its source) pairs; `copy_followers` runs after the treatment.
        initial: net name -> CPU copy of the starting parameters and buffers (`snapshot`).
        batches: fresh iterator of (inputs, targets) of the coming phase, for methods that need gradients.
        loss: (net output, targets) -> scalar, for the same methods.
        test_inputs: count -> inputs of the last `count` test samples, for methods that follow the official code.
        last_inputs: count -> inputs of the batches that the phase before the coming one ended with, in their order and
            `count` samples or more where there are as many, for the same methods.
        generator: CPU generator of this method's own randomness.
        phase: index of the current phase.
        compiled: whether the nets are trained through torch.compile; methods then compile their own passes too.
    """

    nets: dict[str, nn.Module]
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    followers: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    initial: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    test_inputs: Callable[[int], Tensor] | None = None
    last_inputs: Callable[[int], Iterable[Tensor]] | None = None
    generator: torch.Generator | None = None
    phase: int = 0
    compiled: bool = False

    def copy_followers(self) -> None:
        """Give every follower its source's weights and buffers (a target network after its source was treated)."""
        for follower, source in self.followers:
            follower.load_state_dict(source.state_dict())


def snapshot(nets: dict[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    """CPU copy of every net's parameters and buffers, for `State.initial`."""
    return {
        name: {key: value.detach().cpu().clone() for key, value in net.state_dict().items()}
        for name, net in nets.items()
    }
