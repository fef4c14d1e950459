"""DASH as the authors' FIRE code runs it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fire_core.engine import observe
from fire_core.methods.dash import Dash, biases_beside, coming, descent, shrink, shrink_factor
from fire_core.methods.method import register
from fire_core.report import Report
from fire_core.state import State
from fire_core.targets import find_targets


@register
@dataclass
class OfficialDash(Dash):
    """DASH with one cosine for a whole bias, and with gradients in the mode that the net has at the boundary."""

    variant: ClassVar[str] = "official"
    fixed: ClassVar[tuple[str, ...]] = ("kernels", "biases", "evaluation_mode", "every_steps", "rate")

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        batches, loss = coming(name, state)
        table = find_targets(net, self.targets)
        parameters = dict(net.named_parameters())
        initial = state.initial.get(name)
        with observe(net, action="shrunk", method=self.name, initial=initial) as report, torch.no_grad():
            direction = descent(net, batches, loss, alpha=self.alpha, training=net.training)
            shrink(net, direction, table, floor=self.floor, biases=False)
            for key in biases_beside(table):
                if key in direction:
                    parameters[key].mul_(shrink_factor(parameters[key], direction[key], self.floor))
        return report
