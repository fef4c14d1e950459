"""Self-normalised resets: a unit that stays silent for unusually long, by its own standard, is replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fire_core.errors import UserError
from fire_core.methods import register
from fire_core.methods._units import UnitMethod
from fire_core.units import UnitLayer


@register
@dataclass
class SelfNormalizedResets(UnitMethod):
    """A test per unit: is its present silence longer than the `percentile` of its own silences?

    A unit fires in a step when any sample of the batch gives it a positive activation. Its age counts steps since. Every
    `update_every` steps the threshold tau becomes the percentile of the ages at which it fired or was reset (ages of 0,
    firing in consecutive steps, do not count; without any, 1), or doubles where that is not below tau. At age
    tau the unit is reset: fresh incoming weights, outgoing weights 0.

    Ages are in steps. The first threshold is longest / 2 until the first update.
    Cost: units x (longest + 2) integers, and one transfer from the device per layer and step.
    """

    percentile: float = 0.96
    update_every: int = 16
    longest: int = 78
    expansion: float = 2.0

    name: ClassVar[str] = "snr"
    summary: ClassVar[str] = "self-normalised resets of units that fell silent"
    source: ClassVar[str] = "Farias & Jozefiak 2024 (arXiv 2410.20098), Algorithm 1"
    watches_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.percentile < 1.0:
            raise UserError(f"percentile={self.percentile} is outside (0, 1): use e.g. 0.96")
        if self.update_every < 1 or self.longest < 2:
            raise UserError(
                f"update_every={self.update_every}, longest={self.longest}: at least 1 and 2 steps"
            )

    def measure(self, activations: Tensor) -> Tensor:
        return (activations > 0).any(dim=0)

    def start_memory(self, layer: UnitLayer, device: torch.device) -> dict[str, Tensor]:
        def counter(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        return {
            "age": counter(layer.units),
            "histogram": counter(layer.units, self.longest + 1),
            "tau": counter(layer.units) + self.longest // 2,
            "steps": torch.zeros((), dtype=torch.int64),
        }

    def choose(self, net: nn.Module, layer: UnitLayer, memory: dict[str, Tensor], measured: Tensor) -> Tensor:
        for key in ("age", "histogram", "tau"):
            memory[key] = memory[key].to(measured.device)
        age, histogram = memory["age"], memory["histogram"]
        self._count(histogram, age, measured)
        age.add_(1).masked_fill_(measured, 0)
        memory["steps"] += 1
        if memory["steps"] % self.update_every == 0:
            memory["tau"] = self.new_threshold(histogram, memory["tau"])
            histogram.zero_()
        due = age >= memory["tau"]
        self._count(histogram, age, due)
        age.masked_fill_(due, 0)
        return due.nonzero().flatten().cpu()

    def new_threshold(self, histogram: Tensor, tau: Tensor) -> Tensor:
        """(units,) thresholds in [1, longest] from counts (units, longest + 1) of ages at which a silence ended."""
        counts = histogram[:, 1:].cumsum(dim=1)
        reached = counts >= self.percentile * counts[:, -1:]
        level = reached.int().argmax(dim=1) + 1
        grown = (self.expansion * tau).to(tau.dtype)
        shrinks = (level < tau) | (counts[:, -1] == 0)
        return torch.where(shrinks, level, grown).clamp(1, self.longest).to(tau.dtype)

    def _count(self, histogram: Tensor, age: Tensor, where: Tensor) -> None:
        place = age.clamp(max=self.longest).long().unsqueeze(1)
        histogram.scatter_add_(1, place, where.to(histogram.dtype).unsqueeze(1))
