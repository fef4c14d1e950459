"""FIRE as a method, its exact form, interpolation towards it, and FIRE on all layers."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import nn

from fire_core.errors import UserError
from fire_core.methods.full_reset import reset_layers
from fire_core.methods.method import FIXTURE, TEXT, Method, added, register, start_of
from fire_core.projection import FireSettings, fire
from fire_core.report import Report
from fire_core.state import State
from fire_core.targets import find_targets, match_parameters
from fire_core.wrapped_models import is_sharded, unwrap


@dataclass
class Projection(Method):
    """Base class of FIRE and its controls, each of which names its `function` of a model and of the other settings.

    Args:
        targets: the matrices to project, a rule of `find_targets`.
        reset: a rule for layers that return to their initial values instead (DQN: the linear ones).
        degenerate, min_norm: see `FireSettings`; degenerate is "skip" by default here.
    """

    targets: str | list[str] = "all"
    reset: str | list[str] | None = None
    degenerate: str = "skip"
    min_norm: float = added(FireSettings.min_norm)

    function: ClassVar[Callable[..., Report]]
    off = {"min_norm": 1e30}

    def __post_init__(self) -> None:
        known = {f.name for f in fields(FireSettings)}
        FireSettings(**{name: value for name, value in self.settings().items() if name in known})

    def check(self, state: State) -> None:
        """Raise UserError for targets that a net does not have, and for layers both projected and reset."""
        for name, net in {name: unwrap(net) for name, net in state.nets.items()}.items():
            table = find_targets(net, self.targets)
            found = [net.get_parameter(key) for key in table.parameters if len(state.nets) > 1]
            if not is_sharded(found) and not all(p.is_meta or p.isfinite().all() for p in found):
                raise UserError(f"NaN or infinite values in net {name!r}: no net was changed")
            if self.reset and (both := {*table.parameters} & {*match_parameters(net, self.reset)}):
                wrong = f"`targets` and `reset` both name {', '.join(sorted(both))}"
                raise UserError(f"{wrong}: let them name different layers")

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        """Project the targets, which may fail, then reset the layers of `reset`, and return one report of both."""
        initial = state.initial.get(name)
        if self.reset:
            start_of(net, initial, match_parameters(unwrap(net), self.reset))
        report = self.project(net, state, initial=initial, **self.settings("reset"))
        return combine(report, reset_layers(net, initial, self.reset))

    def project(self, net: nn.Module, state: State, **settings: Any) -> Report:
        """Treat one net and return the report."""
        return type(self).function(net, **settings)


def combine(report: Report, reset: Report) -> Report:
    """Return `report` with the rows of `reset` for the targets that `reset` changed."""
    rows = {row.name: row for row in reset.rows if row.parameter in reset.changed}
    report.rows = [rows.get(row.name, row) for row in report.rows]
    report.changed |= reset.changed
    report.parameters += reset.parameters
    report.seconds += reset.seconds
    return report


@register
@dataclass
class Fire(Projection):
    """FIRE as published: `iterations` cubic Newton-Schulz steps on every target, times the official scale.

    The settings are those of `FireSettings`. Cost: two matrix products per iteration and weight at each boundary.
    """

    solver: str = FireSettings.solver
    iterations: int = FireSettings.iterations
    normalize: str = FireSettings.normalize
    scale: str = FireSettings.scale
    variance_factor: float = added(FireSettings.variance_factor)
    strength: float = FireSettings.strength

    name = "fire"
    title = "FIRE"
    summary = "nearest orthogonal matrix, published Newton-Schulz iterations"
    source = "Han et al. 2026 (FIRE), Eq. 4-5, Algorithm 1"
    proven_by = FIXTURE
    function = fire


@register
@dataclass
class FireExact(Fire):
    """FIRE with the exact orthogonal polar factor, whose DfI is 0 up to float32 rounding."""

    solver: str = "exact"

    name = "fire_exact"
    title = "FIRE exact"
    summary = "nearest orthogonal matrix to a tolerance, whatever the conditioning"
    source = "Schoenemann 1966 (orthogonal Procrustes); Han et al. 2026, Eq. 5"
    proven_by = TEXT


@register
@dataclass
class Interpolate(Fire):
    """Moves every target W part of the way to FIRE's result, to W + strength * (fire(W) - W)."""

    strength: float = 0.5

    name = "interpolate"
    summary = "part of the way from the old weights to FIRE's"
    source = "ablation; cf. the strength argument of an early version of the official code"


@register
@dataclass
class FireAll(Fire):
    """FIRE on every layer, to compare with `fire` in DQN, whose official rule resets the linear layers instead."""

    name = "fire_all"
    title = "FIRE, all layers"
    summary = "published FIRE on every layer, nothing reset"
    source = "ablation of Han et al. 2026, DQN setting"
    proven_by = FIXTURE
