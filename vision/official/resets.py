"""ReDo and self-normalised resets as the authors' FIRE code runs them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fire_core.methods.method import register
from fire_core.methods.redo import ReDo
from fire_core.methods.snr import SelfNormalizedResets
from fire_core.state import State
from fire_core.units import UnitLayer
from vision.official.watched_units import (
    AfterTest,
    OutputRecorder,
    ResetsRows,
    WatchesOutputs,
    by_channel,
    chain,
    inputs_for,
    is_attention,
    last_rows,
)

LONGEST = 20_000  # samples: the longest silence that is counted, and the highest threshold
FIRST = 10_000  # samples: the first threshold


@register
@dataclass
class OfficialReDo(AfterTest, ResetsRows, ReDo):
    """ReDo that measures the outputs of layers, before their norms, on the last 512 test images after every test.

    The last two layers are never reset. Outgoing weights and Adam's moments stay.
    """

    variant: ClassVar[str] = "official"
    fixed: ClassVar[tuple[str, ...]] = ("every_steps", "samples", "fresh", "reset_moments")

    def after_test(self, state: State) -> None:
        for name, net in state.nets.items():
            layers = chain(net)[:-2]
            recorder = OutputRecorder(net, layers, magnitude)
            [seen] = recorder.look([inputs_for(self, state, "test_inputs")], training=False)
            recorder.remove()
            for layer in layers:
                dormant = (scores(seen[layer.name]) <= self.threshold).nonzero().flatten().cpu()
                if len(dormant):
                    self.recycle(state, name, layer, dormant)


def magnitude(layer: UnitLayer, output: Tensor) -> Tensor:
    """Return the mean over positions of ReLU(output), or of |output| for queries, keys and values, (samples, units)."""
    channels = by_channel(output.float())
    return (channels if is_attention(layer.name) else torch.relu(channels)).abs().mean(dim=2)


def scores(magnitudes: Tensor) -> Tensor:
    """Return the dormancy score of each unit, (units,), from `magnitude` of all samples."""
    means = magnitudes.mean(dim=0)
    return means / (means.mean() + 1e-9)


@register
@dataclass
class OfficialSNR(WatchesOutputs, ResetsRows, SelfNormalizedResets):
    """Self-normalised resets with ages in samples, and with outputs of layers, before their norms, as units.

    At every step, the age of a unit becomes 0 if any of the kept samples makes it fire, and else grows by their number.
    The threshold is first renewed at step 0, where it falls to the number of samples kept, so a unit that is silent in
    the first batch is reset at once. The last layer is never reset. Outgoing weights and Adam's moments stay.
    """

    variant: ClassVar[str] = "official"
    fixed: ClassVar[tuple[str, ...]] = ("longest", "fresh", "reset_moments")
    off: ClassVar[dict[str, Any] | None] = None

    def find_layers(self, state: State, name: str) -> list[UnitLayer]:
        return self.layers.setdefault(name, chain(state.nets[name]))

    def reduce(self, layer: UnitLayer, output: Tensor) -> Tensor:
        """Return whether each unit fires at any position, (samples, units) bool."""
        return (by_channel(output) > 0).any(dim=2)

    def start_memory(self, layer: UnitLayer, device: torch.device) -> dict[str, Tensor]:
        """Return the memory of a layer at the start of training: no kept rows, and zero ages, silences and steps."""
        counts = {"dtype": torch.int32, "device": device}
        return {
            "kept": torch.zeros(0, layer.units, dtype=torch.bool, device=device),
            "age": torch.zeros(layer.units, **counts),
            "tau": torch.full((layer.units,), FIRST, **counts),
            # ages at which silences ended since the last update, one row per step, 0 for none
            "silences": torch.zeros(self.update_every + 1, layer.units, **counts),
            "steps": torch.zeros((), dtype=torch.int64),
        }

    def choose(self, net: nn.Module, layer: UnitLayer, memory: dict[str, Tensor], measured: Tensor) -> Tensor:
        """Update `memory` by one step and return which units are due, (units,) bool: none in the last layer."""
        kept = memory["kept"] = last_rows(memory["kept"], measured)
        for key in ("age", "tau", "silences"):
            memory[key] = memory[key].to(measured.device)
        age, silences, fires = memory["age"], memory["silences"], kept.any(dim=0)
        row = int(memory["steps"]) % self.update_every
        memory["steps"] += 1
        silences[row or self.update_every] += (age * fires).clamp(max=LONGEST)
        age.add_(len(kept)).masked_fill_(fires, 0)
        if row == 0:
            memory["tau"] = self.threshold(silences, memory["tau"], len(kept))
            silences.zero_()
        due = age >= memory["tau"]
        silences[row] += (age * due).clamp(max=LONGEST)
        age.masked_fill_(due, 0)
        return due if layer.outgoing else torch.zeros_like(due)

    def threshold(self, silences: Tensor, tau: Tensor, kept: int) -> Tensor:
        """Return the new thresholds in samples, (units,), from `kept` to LONGEST.

        They are the percentiles of each unit's silences, or `expansion` * tau where these are not below tau.
        """
        ages, _ = silences.sort(dim=0)
        count = (silences > 0).sum(dim=0)
        share = torch.arange(1, len(ages) + 1, device=tau.device)[:, None] - (len(ages) - count)
        reached = (share > 0) & (share / count.clamp_min(1) >= self.percentile)
        level = ages.gather(0, reached.int().argmax(dim=0, keepdim=True))[0].masked_fill(count == 0, 1)
        grown = (self.expansion * tau).to(tau.dtype)
        return torch.where(level < tau, level, grown).clamp(kept, LONGEST).to(tau.dtype)
