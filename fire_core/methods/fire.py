"""FIRE, its exact form, and interpolation towards it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fire_core.errors import UserError
from fire_core.fire import fire
from fire_core.methods import Method, register
from fire_core.methods.full_reset import restore
from fire_core.phases import Phase, State
from fire_core.report import Report
from fire_core.settings import check_settings
from fire_core.targets import find_targets, match_parameters


@register
@dataclass
class Fire(Method):
    """The published algorithm: N cubic Newton-Schulz steps on every target, times the official scale.

    Settings as in `fire_core.fire.fire`. `reset` names layers that go back to their initial values instead of being
    projected (DQN: the linear ones). Cost: a few matrix products per weight, once per phase; no extra state.
    """

    solver: str = "newton_schulz"
    iterations: int = 10
    normalize: str = "frobenius"
    targets: str | list[str] = "all"
    reset: str | list[str] | None = None
    scale: str = "official"
    strength: float = 1.0
    degenerate: str = "skip"

    name: ClassVar[str] = "fire"
    summary: ClassVar[str] = "nearest orthogonal matrix, published Newton-Schulz iterations"
    source: ClassVar[str] = "Han et al. 2026 (FIRE), Eq. 4-5, Algorithm 1"

    def settings(self) -> dict[str, Any]:
        """What `fire` is called with."""
        names = ("solver", "iterations", "normalize", "scale", "strength", "degenerate")
        return {name: getattr(self, name) for name in names}

    def check(self, state: State) -> None:
        check_settings(**self.settings())
        if self.solver != "newton_schulz" and (self.iterations, self.normalize) != (10, "frobenius"):
            raise UserError(
                f"iterations={self.iterations}, normalize={self.normalize!r}: solver={self.solver!r} takes neither; leave "
                "them at 10 and 'frobenius'"
            )
        for net in state.nets.values():
            check_rules(net, self.targets, self.reset)

    def at_boundary(self, state: State, phase: Phase) -> Report:
        if phase.index < self.first_phase:
            return Report(method=self.name)
        self.check(state)
        reports = {}
        for name, net in state.nets.items():
            reset = restore(net, state.initial.get(name, {}), self.reset) if self.reset else Report()
            initial = state.initial.get(name)
            report = fire(net, targets=self.targets, initial=initial, **self.settings())
            reports[name] = combine(report, reset)
        return Report.merge(reports, self.name)


def check_rules(net: nn.Module, targets: Any, reset: Any) -> None:
    """Raise UserError where a rule names nothing in `net`, or both name the same parameter."""
    table = find_targets(net, targets)
    if reset:
        _check_disjoint(set(table.parameters), set(match_parameters(net, reset)))


def _check_disjoint(treated: set[str], reset: set[str]) -> None:
    both = treated & reset
    if both:
        raise UserError(
            f"parameters both treated and reset: {', '.join(sorted(both))}; make the rules disjoint"
        )


def combine(report: Report, reset: Report) -> Report:
    """`report` with the rows that `reset` changed put in their place; no parameter may be in both."""
    _check_disjoint(report.changed, reset.changed)
    by_name = {row.name: row for row in reset.rows if row.parameter in reset.changed}
    rows = [by_name.pop(row.name, row) for row in report.rows]
    return Report(rows, report.changed | reset.changed, report.seconds + reset.seconds, report.method)


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
