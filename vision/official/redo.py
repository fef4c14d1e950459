"""ReDo as the authors' FIRE code runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fire_core.methods.method import register
from fire_core.methods.redo import ReDo
from fire_core.state import State
from fire_core.units import UnitLayer
from vision.official.outputs import (
    AfterTest,
    OutputRecorder,
    ResetsRows,
    by_channel,
    chain,
    inputs_for,
    is_attention,
)


@register
@dataclass
class OfficialReDo(AfterTest, ResetsRows, ReDo):
    """ReDo that measures the outputs of layers, before their norms, on the last 512 test images after every test.

    The last two layers are never reset. Outgoing weights and Adam's moments stay.
    """

    variant: ClassVar[str] = "official"
    fixed: ClassVar[tuple[str, ...]] = ("every_steps", "samples", "fresh", "reset_moments")

    def after_step(self, state: State) -> None:
        """Do nothing: the method acts after the test."""

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
