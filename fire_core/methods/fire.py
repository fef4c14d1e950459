"""FIRE, its exact form, and interpolation towards it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import nn

from fire_core.errors import UserError
from fire_core.methods import Method, added, register
from fire_core.methods.full_reset import restore
from fire_core.phases import State
from fire_core.projection import fire
from fire_core.report import Report
from fire_core.settings import FireSettings
from fire_core.targets import find_targets, match_parameters


@dataclass
class Projection(Method):
    """Base of FIRE and its controls: `project` what `targets` names.

    `reset` names layers that go back to their initial values instead (DQN: the linear ones). degenerate and min_norm: see
    `FireSettings`.
    """

    targets: str | list[str] = "all"
    reset: str | list[str] | None = None
    degenerate: str = "skip"
    min_norm: float = added(FireSettings.min_norm)

    treats_shards: ClassVar[bool] = True

    def check(self, state: State) -> None:
        for net in state.nets.values():
            table = find_targets(net, self.targets)
            if self.reset:
                _check_disjoint(set(table.parameters), set(match_parameters(net, self.reset)))

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        initial = state.initial.get(name)
        reset = restore(net, initial or {}, self.reset) if self.reset else Report()
        return combine(self.project(net, state, {"targets": self.targets, "initial": initial}), reset)

    def settings(self) -> dict[str, Any]:
        """The settings of `fire` that this method has."""
        return {f.name: getattr(self, f.name) for f in fields(FireSettings) if hasattr(self, f.name)}

    def __post_init__(self) -> None:
        FireSettings.of(**self.settings())

    def project(self, net: nn.Module, state: State, where: dict[str, Any]) -> Report:
        """Treats one net. where: targets and initial weights, as arguments of `fire`."""
        raise NotImplementedError


@register
@dataclass
class Fire(Projection):
    """The published algorithm: N cubic Newton-Schulz steps on every target, times the official scale.

    Settings as in `FireSettings`. Cost: a few matrix products per weight, once per phase; no extra state.
    """

    solver: str = FireSettings.solver
    iterations: int = FireSettings.iterations
    normalize: str = FireSettings.normalize
    scale: str = FireSettings.scale
    variance_factor: float = added(FireSettings.variance_factor)
    strength: float = FireSettings.strength

    name: ClassVar[str] = "fire"
    summary: ClassVar[str] = "nearest orthogonal matrix, published Newton-Schulz iterations"
    source: ClassVar[str] = "Han et al. 2026 (FIRE), Eq. 4-5, Algorithm 1"

    def project(self, net: nn.Module, state: State, where: dict[str, Any]) -> Report:
        return fire(net, **where, **self.settings())


def _check_disjoint(treated: set[str], reset: set[str]) -> None:
    """Raise UserError where two rules name the same parameter."""
    if both := treated & reset:
        raise UserError(
            f"parameters both treated and reset: {', '.join(sorted(both))}; make the rules disjoint"
        )


def combine(report: Report, reset: Report) -> Report:
    """`report` with the rows that `reset` changed put in their place; no parameter may be in both."""
    _check_disjoint(report.changed, reset.changed)
    by_name = {row.name: row for row in reset.rows if row.parameter in reset.changed}
    rows = [by_name.pop(row.name, row) for row in report.rows]
    return Report(
        rows,
        report.changed | reset.changed,
        parameters=[*report.parameters, *reset.parameters],
        seconds=report.seconds + reset.seconds,
        method=report.method,
    )


@register
@dataclass
class FireExact(Fire):
    """FIRE with the true orthogonal polar factor: DfI of every factor is zero to float32 rounding."""

    solver: str = "exact"

    name: ClassVar[str] = "fire_exact"
    summary: ClassVar[str] = "nearest orthogonal matrix to a tolerance, whatever the conditioning"
    source: ClassVar[str] = "Schoenemann 1966 (orthogonal Procrustes); Han et al. 2026, Eq. 5"


@register
@dataclass
class Interpolate(Fire):
    """W + strength * (fire(W) - W): how much of the way to FIRE is needed."""

    strength: float = 0.5

    name: ClassVar[str] = "interpolate"
    summary: ClassVar[str] = "part of the way from the old weights to FIRE's"
    source: ClassVar[str] = "ablation; cf. the strength argument of an early version of the official code"


@register
@dataclass
class FireAll(Fire):
    """`fire` under a name of its own, so that "project everything, reset nothing" runs beside the experiment's rule.

    In DQN the official method resets the linear layers to their initial values and projects the convolutions only.
    """

    name: ClassVar[str] = "fire_all"
    summary: ClassVar[str] = "published FIRE on every layer, nothing reset"
    source: ClassVar[str] = "ablation of Han et al. 2026, DQN setting"
