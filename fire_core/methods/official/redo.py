"""ReDo as the authors' FIRE code runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fire_core.methods import register
from fire_core.methods.official import refuse_changed
from fire_core.methods.official.outputs import (
    OutputRecorder,
    ResetsRows,
    by_channel,
    chain,
    is_attention,
    watch_test,
)
from fire_core.methods.redo import ReDo
from fire_core.phases import State
from fire_core.units import UnitLayer


@register
@dataclass
class OfficialReDo(ResetsRows, ReDo):
    """Looks at the last 512 test images after every test, at what a layer itself puts out, before its norm.

    The last two layers are never reset. Outgoing weights and Adam's moments stay (`reset_rows`).
    """

    variant: ClassVar[str] = "official"

    def __post_init__(self) -> None:
        refuse_changed(self, "every_steps", "samples", "fresh", "reset_moments")
        super().__post_init__()

    def after_step(self, state: State) -> None:
        """Nothing."""

    def after_epoch(self, state: State) -> None:
        """Nothing: it acts after the test."""

    def after_test(self, state: State) -> None:
        if state.phase < self.first_phase:
            return
        for name, net in state.nets.items():
            layers = chain(net)[:-2]
            recorder = OutputRecorder(net, layers, magnitude)
            seen = watch_test(state, net, recorder, self.name)
            recorder.remove()
            for layer in layers:
                chosen = dormant(seen[layer.name], self.threshold)
                if len(chosen):
                    self.recycle(state, name, layer, chosen)


def magnitude(layer: UnitLayer, output: Tensor) -> Tensor:
    """Mean over positions of |ReLU(output)|, of |output| for queries, keys and values: (samples, units)."""
    channels = by_channel(output.float())
    return (channels if is_attention(layer.name) else torch.relu(channels)).abs().mean(dim=2)


def scores(magnitudes: Tensor) -> Tensor:
    """Dormancy of each unit from `magnitude` of all samples."""
    means = magnitudes.mean(dim=0)
    return means / (means.mean() + 1e-9)


def dormant(magnitudes: Tensor, threshold: float) -> Tensor:
    """Indices of the dormant units, on the CPU."""
    return (scores(magnitudes) <= threshold).nonzero().flatten().cpu()
