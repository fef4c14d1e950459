"""Continual backprop: replace the least useful mature units at a slow, steady rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fire_core.errors import check_range
from fire_core.methods._units import UnitMethod
from fire_core.methods.method import register
from fire_core.units import UnitLayer


@register
@dataclass
class ContinualBackprop(UnitMethod):
    """Replaces the units of least utility during training.

    The utility of a unit is a running average u <- decay u + (1 - decay) |h| sum |w_out| with bias correction, where
    |h| is the mean over the batch. At every step, a layer adds `replacement_rate` times the number of its units older
    than `maturity` steps to a quota. For every whole unit in the quota, its mature unit of least utility gets new
    incoming weights, outgoing weights 0 and age 0.

    Args:
        compensate: add a replaced unit's mean contribution to the readers' biases, where they have one, so that the
            output does not jump.

    Cost: three numbers per unit, and one pass over the outgoing weights at every step.
    """

    replacement_rate: float = 1e-4
    maturity: int = 1000
    decay: float = 0.99
    compensate: bool = True

    name: ClassVar[str] = "cbp"
    title: ClassVar[str] = "CBP"
    summary: ClassVar[str] = "continual backprop: replace the least useful units slowly"
    source: ClassVar[str] = "Dohare et al. 2024 (Nature 632), Algorithm 1"
    off: ClassVar[dict[str, Any] | None] = {"replacement_rate": 0.0}
    needs: ClassVar[frozenset[str]] = frozenset({"activations", "batches"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "[0, 1]", "replacement_rate")
        check_range(self, "[0, 1)", "decay")
        check_range(self, "[0, inf)", "maturity")

    def measure(self, activations: Tensor) -> Tensor:
        """Return mean |activation| and mean activation of each unit, (2, units)."""
        values = activations.float()
        return torch.stack([values.abs().mean(dim=0), values.mean(dim=0)])

    def start_memory(self, layer: UnitLayer, device: torch.device) -> dict[str, Tensor]:
        """Return ages, utilities and mean activations (units,) and the quota, all 0."""
        return {
            "age": torch.zeros(layer.units, dtype=torch.int64),  # on the CPU: read at every step
            "due": torch.zeros((), dtype=torch.float64),
            "utility": torch.zeros(layer.units, device=device),
            "mean": torch.zeros(layer.units, device=device),
        }

    def choose(self, net: nn.Module, layer: UnitLayer, memory: dict[str, Tensor], measured: Tensor) -> Tensor:
        """Update utilities, ages and quota, and return the mature units of least utility that the quota allows."""
        usefulness = measured[0] * outgoing_magnitude(net, layer)
        for key, value in (("utility", usefulness), ("mean", measured[1])):
            memory[key] = torch.lerp(value, memory[key].to(value.device), self.decay)
        memory["age"] += 1
        mature = memory["age"] > self.maturity
        memory["due"] += self.replacement_rate * int(mature.sum())
        count = min(int(memory["due"]), int(mature.sum()))
        memory["due"] -= count
        if count == 0:
            return torch.empty(0, dtype=torch.int64)
        utility = memory["utility"].cpu() / (1 - self.decay ** memory["age"].double())
        return utility.masked_fill(~mature, torch.inf).topk(count, largest=False).indices

    @torch.no_grad()
    def before_recycling(
        self, net: nn.Module, layer: UnitLayer, memory: dict[str, Tensor], chosen: Tensor
    ) -> None:
        """Let the readers' biases compensate for the units, and set the units' memory to 0."""
        if self.compensate:
            correction = 1 - self.decay ** memory["age"][chosen].double()
            mean = memory["mean"][chosen] / correction.to(memory["mean"])
            for name, columns in layer.outgoing:
                reader: Any = net.get_submodule(name)
                if reader.bias is not None:
                    weight = reader.weight.unflatten(1, (layer.units, columns))[:, chosen]
                    reader.bias += (weight.flatten(2).sum(dim=2) * mean.to(weight)).sum(dim=1)
        memory["age"][chosen] = 0
        memory["utility"][chosen] = 0.0
        memory["mean"][chosen] = 0.0


@torch.no_grad()
def outgoing_magnitude(net: nn.Module, layer: UnitLayer) -> Tensor:
    """Return the sum of |w| over all outgoing weights of each unit, (units,) float32."""
    total: Tensor | None = None
    for name, columns in layer.outgoing:
        reader: Any = net.get_submodule(name)
        weight = reader.weight.float().abs().unflatten(1, (layer.units, columns))
        part = weight.transpose(0, 1).flatten(1).sum(dim=1)
        total = part if total is None else part + total.to(part.device)
    assert total is not None  # every unit layer has a reader
    return total
