"""Shrink & perturb: move the weights part of the way back to their starting values."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fire_core.engine import observe
from fire_core.errors import check_settings
from fire_core.methods.fire import combine
from fire_core.methods.full_reset import reset_layers
from fire_core.methods.method import FIXTURE, Method, register, start_of
from fire_core.report import Report
from fire_core.state import State
from fire_core.targets import match_parameters
from fire_core.wrapped_models import unwrap


def shrink_perturb(
    model: nn.Module,
    initial: Mapping[str, Tensor] | None,
    shrink: float = 0.8,
    *,
    parameters: str | list[str] = "all",
    reset: str | list[str] | None = None,
) -> Report:
    """Set every parameter W of `model` to (1 - shrink) W + shrink W_initial, in place, and return the report.

    Args:
        initial: weights by parameter name: a copy of the state dict before training, or newly drawn ones.
        shrink: between 0, which keeps the weights, and 1, which resets them. Buffers are kept.
        parameters: rule for the layers to treat, as in `match_parameters`. reset: that for layers set to `initial`.
    Raises: UserError for `shrink` outside [0, 1], for rules that name nothing, and for values missing in `initial`.
    """
    ShrinkPerturb(shrink=shrink)  # checks it
    chosen = None if parameters == "all" else match_parameters(unwrap(model), parameters)
    model, start = start_of(model, initial, chosen)
    restored = reset_layers(model, start, reset)
    with observe(model, action="shrunk", method="shrink_perturb", initial=start) as report, torch.no_grad():
        for key, weight in model.named_parameters():
            if chosen is None or key in chosen:
                new = start[key].to(weight)
                weight.copy_(new if shrink == 1.0 else weight.lerp(new, shrink))  # lerp would keep NaN
    return combine(report, restored)


@register
@dataclass
class ShrinkPerturb(Method):
    """Calls `shrink_perturb` with the initial weights of the run, as in FIRE's baselines; Ash & Adams draw new ones.

    In DQN, `reset` names the linear layers ("SR"). Cost: one CPU copy of the starting weights.
    """

    shrink: float = 0.8
    parameters: str | list[str] = "all"
    reset: str | list[str] | None = None

    name = "shrink_perturb"
    title = "shrink & perturb"
    summary = "weighted mean of old and initial weights"
    source = "Ash & Adams 2020; D'Oro et al. 2023 (SR)"
    needs = frozenset({"initial"})
    off = {"shrink": 0.0}
    proven_by = FIXTURE

    def __post_init__(self) -> None:
        check_settings(self, shrink="[0, 1]")

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        initial = state.initial.get(name)
        return shrink_perturb(net, initial, self.shrink, parameters=self.parameters, reset=self.reset)
