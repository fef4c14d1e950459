"""Full reset: return to the starting weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fire_core.errors import UserError
from fire_core.methods.method import FIXTURE, Method, register
from fire_core.report import Report
from fire_core.state import State
from fire_core.targets import match_parameters, shorten
from fire_core.wrapped_models import observe, unwrap_with


def full_reset(model: nn.Module, initial: Mapping[str, Tensor]) -> Report:
    """Set all parameters and buffers of `model` to `initial`, in place, and return the report.

    Args:
        initial: a copy of the model's state dict; a missing or unknown key raises RuntimeError as in `load_state_dict`.
    """
    model, initial = unwrap_with(model, initial)
    with observe(model, action="reset", method="full_reset", initial=initial) as report:
        model.load_state_dict(initial)
    return report


def reset_layers(model: nn.Module, initial: Mapping[str, Tensor], rule: Any) -> Report:
    """Set all parameters of the layers that `rule` names to their initial values, in place, and return the report.

    Raises UserError if the rule names nothing, or a parameter that `initial` does not have.
    """
    model, initial = unwrap_with(model, initial)
    names = match_parameters(model, rule)
    check_initial(initial, names)
    parameters = dict(model.named_parameters())
    watched = observe(model, action="reset", method="reset", initial=initial)
    with watched as report, torch.no_grad():
        for name in names:
            parameters[name].copy_(initial[name])
    return report


def check_initial(initial: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Raise UserError if `initial` has no value for some of the parameters `names`."""
    if missing := [name for name in names if name not in initial]:
        raise UserError(
            f"initial has no values for {shorten(missing)}, and nothing was changed: give a copy of state_dict()"
        )


def initial_of(state: State, net: str) -> Mapping[str, Tensor]:
    """Return the starting weights of the net named `net`. Raises UserError if the script kept none."""
    if net not in state.initial:
        raise UserError(
            f"no initial weights of net {net!r} in State.initial; set state.initial = snapshot(nets)"
        )
    return state.initial[net]


@register
@dataclass
class FullReset(Method):
    """Sets all parameters and buffers to their values at the start of the run; nothing is drawn anew.

    Cost: one CPU copy of the starting state.
    """

    name: ClassVar[str] = "full_reset"
    summary: ClassVar[str] = "back to the initial weights and buffers"
    source: ClassVar[str] = "baseline"
    needs: ClassVar[frozenset[str]] = frozenset({"initial"})
    proven_by: ClassVar[str] = FIXTURE

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        return full_reset(net, initial_of(state, name))
