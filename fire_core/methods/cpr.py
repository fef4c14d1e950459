"""CPR: the less gradient a hidden unit gets, the more of its weights is replaced, a little at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fire_core.errors import check_settings
from fire_core.methods._units import LayerMethod, gradient_scores
from fire_core.methods.method import FIXTURE, register
from fire_core.state import State
from fire_core.units import UnitLayer, draw, incoming, outgoing


@register
@dataclass
class CPR(LayerMethod):
    """Mixes new values into the weights of hidden units with little gradient, every `every_steps` steps.

    The utility of a unit is a running average U <- decay U + (1 - decay) a from 1, where a is the mean |gradient| of its
    incoming weights over the mean of its layer. The first mixing comes after step `every_steps` + 1. It replaces the share
    rate * min(2 sigmoid(-sharpness (U - 1)), 1) of the unit's incoming weights by He's uniform draw, and takes the same
    share from its outgoing weights; layers follow each other in forward order. Then U is 1 again.

    Biases, norm layers and the optimizer's state stay, and so do the output layer and layers whose units are mixed with
    others, as in a residual stream. The gradients are those before clipping. Cost: a pass over the gradients per step.

    Args:
        rate: the largest share. The authors take 0.015 in reinforcement learning, 0.01 on MNIST and incremental CIFAR.
        every_steps: 1000 in the authors' code, 100 for its image tasks.
    """

    rate: float = 0.01
    every_steps: int = 100
    decay: float = 0.99
    sharpness: float = 16.0

    name = "cpr"
    title = "CPR"
    summary = "mix new weights into units with little gradient, a small share at a time"
    source = "2026 (CPR, arXiv 2607.24996)"
    proven_by = FIXTURE
    needs = frozenset({"gradients", "batches"})
    off = {"rate": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, rate="[0, 1]", every_steps="[1, inf)", decay="[0, 1)", sharpness="(0, inf)")

    def start_memory(self, layer: UnitLayer, device: torch.device) -> dict[str, Tensor]:
        """Return utilities of 1, (units,)."""
        return {"utility": torch.ones(layer.units, dtype=torch.float32, device=device)}

    def before_step(self, state: State) -> None:
        self._start(state)
        for name, net in state.nets.items():
            memory = self.memory[name]
            self.pending += [(memory[each.name], gradient_scores(net, each)) for each in self.layers[name]]

    def after_step(self, state: State) -> None:
        for memory, scores in self.pending:
            memory["utility"] = torch.lerp(scores, memory["utility"].to(scores.device), self.decay)
        self.pending = []
        if self.counts["steps"] and self.counts["steps"] % self.every_steps == 0:
            for name, net in state.nets.items():
                for layer in self.layers[name]:
                    memory = self.memory[name][layer.name]
                    mix(net, layer, self.share(memory["utility"]), self.stream(state))
                    memory["utility"] = torch.ones_like(memory["utility"])
        self.counts["steps"] += 1

    def share(self, utility: Tensor) -> Tensor:
        """Return the share of each unit that is replaced, (units,)."""
        return self.rate * (2 * torch.sigmoid(-self.sharpness * (utility - 1))).clamp_max(1.0)


@torch.no_grad()
def mix(net: nn.Module, layer: UnitLayer, share: Tensor, generator: torch.Generator) -> None:
    """Replace a share (units,) of the incoming weights of each unit, and take it from the outgoing ones, in place."""
    for entries in incoming(net, layer):
        weight = entries.read()
        if weight.ndim > 1:
            fresh = draw("he_uniform", weight.shape, generator).to(weight)
            entries.write(weight.lerp(fresh, share.to(weight).view(-1, *[1] * (weight.ndim - 1))))
    for entries in outgoing(net, layer):
        weight = entries.read()
        entries.write(weight * (1 - share.to(weight)).view(-1, *[1] * (weight.ndim - 1)))
