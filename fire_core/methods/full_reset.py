"""Full reset: return to the starting weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fire_core.engine import observe
from fire_core.errors import UserError
from fire_core.methods.method import FIXTURE, Method, register, start_of
from fire_core.report import Report
from fire_core.state import State, load_values
from fire_core.targets import match_parameters, shorten
from fire_core.wrapped_models import unwrap, unwrap_with


def full_reset(model: nn.Module, initial: Mapping[str, Tensor]) -> Report:
    """Set all parameters and buffers of `model` to `initial`, in place, and return the report.

    Args:
        initial: a copy of the model's state dict. UserError where a key or a shape differs.
    """
    model, initial = unwrap_with(model, initial or {})
    states = (model.state_dict(), initial)
    own, start = ({key: getattr(value, "shape", 0) for key, value in each.items()} for each in states)
    if wrong := sorted({key for key, _ in own.items() ^ start.items() if not key.endswith("_extra_state")}):
        raise UserError(f"initial and the model differ in {shorten(wrong)}: give a copy of state_dict()")
    with observe(model, action="reset", method="full_reset", initial=initial) as report:
        load_values(model, initial)
    return report


def reset_layers(model: nn.Module, initial: Mapping[str, Tensor] | None, rule: Any) -> Report:
    """Set all parameters of the layers that `rule` names, if there is one, to their initial values, in place.

    Raises UserError if the rule names nothing, or a parameter that `initial` does not have.
    """
    if not rule:
        return Report()
    names = match_parameters(unwrap(model), rule)
    model, start = start_of(model, initial, names)
    with observe(model, action="reset", method="reset", initial=start) as report, torch.no_grad():
        for name in names:
            model.get_parameter(name).copy_(start[name])
    return report


@register
@dataclass
class FullReset(Method):
    """Sets all parameters and buffers to their values at the start of the run; nothing is drawn anew.

    Cost: one CPU copy of the starting state.
    """

    name = "full_reset"
    summary = "back to the initial weights and buffers"
    source = "baseline"
    needs = frozenset({"initial"})
    proven_by = FIXTURE

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        return full_reset(net, state.initial[name])
