"""Shrink & perturb: part of the way back to the starting weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fire_core.errors import UserError
from fire_core.fire import observe
from fire_core.methods import Method, register
from fire_core.methods.fire import combine
from fire_core.methods.full_reset import initial_of, restore
from fire_core.phases import Phase, State
from fire_core.report import Report
from fire_core.targets import match_parameters


@register
@dataclass
class ShrinkPerturb(Method):
    """W <- (1 - shrink) W + shrink W_initial for every parameter, biases and norms included; buffers are kept.

    The perturbation is the run's own initial draw, as in FIRE's baselines; Ash & Adams draw fresh noise.
    `parameters` limits it to layers (any target rule), `reset` names layers that go back to their initial values
    altogether (DQN: the linear ones, "SR"). Cost: one CPU copy of the starting weights.
    """

    shrink: float = 0.8
    parameters: str | list[str] = "all"
    reset: str | list[str] | None = None

    name: ClassVar[str] = "shrink_perturb"
    summary: ClassVar[str] = "weighted mean of old and initial weights"
    source: ClassVar[str] = "Ash & Adams 2020; D'Oro et al. 2023 (SR)"

    def __post_init__(self) -> None:
        if not 0.0 <= self.shrink <= 1.0:
            raise UserError(f"shrink={self.shrink} is outside [0, 1]: 0 keeps the weights, 1 is a full reset")

    def at_boundary(self, state: State, phase: Phase) -> Report:
        if phase.index < self.first_phase:
            return Report(method=self.name)
        reports = {}
        for name, net in state.nets.items():
            start = initial_of(state, name)
            reset = restore(net, start, self.reset) if self.reset else Report()
            parameters: dict[str, Any] = dict(net.named_parameters())
            chosen = list(parameters) if self.parameters == "all" else match_parameters(net, self.parameters)
            with observe(net, action="shrunk", method=self.name, initial=start) as report, torch.no_grad():
                for key in chosen:
                    parameters[key].lerp_(start[key].to(parameters[key]), self.shrink)
            reports[name] = combine(report, reset)
        return Report.merge(reports, self.name)
