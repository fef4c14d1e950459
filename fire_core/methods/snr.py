"""Self-normalised resets: replace a unit that has been silent for longer than is usual for this unit."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fire_core.errors import check_settings
from fire_core.methods._units import UnitMethod
from fire_core.methods.method import TEXT, register
from fire_core.units import UnitLayer


@register
@dataclass
class SelfNormalizedResets(UnitMethod):
    """Resets a unit whose present silence is as long as its threshold, a percentile of its own silences.

    A unit fires in a step if any sample of the batch gives it a positive activation; its age is the number of steps
    since. A unit whose age reaches its threshold is reset: new incoming weights, outgoing weights 0, age 0. After every
    `update_every` steps, the new threshold is the `percentile` of the nonzero ages at which the unit fired or was reset
    in these steps, or 1 if there are none. If the percentile is not below the old threshold, the new one is `expansion`
    times the old one. Cost: units x (longest + 3) integers, and one transfer from the device per step.

    Args:
        longest: largest threshold and largest age that is counted, in steps; the first threshold is half of it.
    """

    percentile: float = 0.96
    update_every: int = 16
    longest: int = 78
    expansion: float = 2.0

    name = "snr"
    title = "SNR"
    summary = "self-normalised resets of units that fell silent"
    source = "Farias & Jozefiak 2024 (arXiv 2410.20098), Algorithm 1"
    off = {"update_every": 2**30, "longest": 2**14}  # nothing is silent for 2^13 steps
    proven_by = TEXT
    needs = frozenset({"activations", "batches"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, percentile="(0, 1)", update_every="[1, inf)")
        check_settings(self, expansion="[1, inf)", longest="[2, inf)")

    def measure(self, activations: Tensor) -> Tensor:
        """Return whether each unit fires, (units,) bool."""
        return (activations > 0).any(dim=0)

    def start_memory(self, layer: UnitLayer, device: torch.device) -> dict[str, Tensor]:
        """Return ages and thresholds (units,), counts of ages (units, longest + 1) and the number of steps."""

        def counter(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        return {
            "age": counter(layer.units),
            "histogram": counter(layer.units, self.longest + 1),
            "tau": counter(layer.units) + self.longest // 2,
            "steps": torch.zeros((), dtype=torch.int64, device="cpu"),
        }

    def choose(self, net: nn.Module, layer: UnitLayer, memory: dict[str, Tensor], measured: Tensor) -> Tensor:
        """Update ages and thresholds by one step, and return which units' ages have reached the threshold, (units,) bool."""
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
        return due

    def indices(self, chosen: list[Tensor]) -> list[Tensor]:
        """Return the indices of the units that are due, with one transfer from the device for all layers."""
        if not chosen:
            return []
        together = torch.cat([due.to(chosen[0].device) for due in chosen]).cpu()
        return [due.nonzero().flatten() for due in together.split([len(due) for due in chosen])]

    def new_threshold(self, histogram: Tensor, tau: Tensor) -> Tensor:
        """Return the thresholds, (units,) in [1, longest].

        Args:
            histogram: (units, longest + 1) counts of the ages at which silences ended. tau: (units,) old thresholds.
        """
        counts = histogram[:, 1:].cumsum(dim=1)
        reached = counts >= self.percentile * counts[:, -1:]
        level = reached.int().argmax(dim=1) + 1
        grown = (self.expansion * tau).to(tau.dtype)
        shrinks = (level < tau) | (counts[:, -1] == 0)
        return torch.where(shrinks, level, grown).clamp(1, self.longest).to(tau.dtype)

    def _count(self, histogram: Tensor, age: Tensor, where: Tensor) -> None:
        place = age.clamp(max=self.longest).long().unsqueeze(1)
        histogram.scatter_add_(1, place, where.to(histogram.dtype).unsqueeze(1))
