"""Controls that tell what FIRE's gain is made of: the norm alone, or the flat spectrum alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fire_core.fire import Treated, apply_to_targets, scales
from fire_core.methods import Method, register
from fire_core.methods.fire import check_rules, combine
from fire_core.methods.full_reset import restore
from fire_core.phases import Phase, State
from fire_core.polar import polar
from fire_core.report import Report
from fire_core.targets import Target, find_targets


@dataclass
class _Control(Method):
    targets: str | list[str] = "all"
    reset: str | list[str] | None = None
    degenerate: str = "skip"

    def check(self, state: State) -> None:
        for net in state.nets.values():
            check_rules(net, self.targets, self.reset)

    def at_boundary(self, state: State, phase: Phase) -> Report:
        if phase.index < self.first_phase:
            return Report(method=self.name)
        self.check(state)
        reports = {}
        for name, net in state.nets.items():
            initial = state.initial.get(name, {})
            reset = restore(net, initial, self.reset) if self.reset else Report()
            report = apply_to_targets(
                net,
                find_targets(net, self.targets),
                lambda stack, group: self.treat(stack, group, state),
                action=self.name,
                degenerate=self.degenerate,
                initial=initial,
            )
            reports[name] = combine(report, reset)
        return Report.merge(reports, self.name)

    def treat(self, stack: Tensor, group: list[Target], state: State) -> Treated:
        """What takes the place of a stack of matrices; each control is this one function."""
        raise NotImplementedError


@register
@dataclass
class Rescale(_Control):
    """Every target keeps its directions and its spectrum's shape, but gets the Frobenius norm that `fire` would give it.

    If this does as well as FIRE, the gain was the norm. Cost: as FIRE.
    """

    iterations: int = 10
    normalize: str = "frobenius"

    name: ClassVar[str] = "rescale"
    summary: ClassVar[str] = "control: the norm that FIRE would give, old directions kept"
    source: ClassVar[str] = "control of this suite"

    def treat(self, stack: Tensor, group: list[Target], state: State) -> Treated:
        goal = polar(stack, "newton_schulz", iterations=self.iterations, normalize=self.normalize).factor
        norm = torch.linalg.matrix_norm(goal * scales(group, stack), keepdim=True)
        return Treated(stack * (norm / torch.linalg.matrix_norm(stack, keepdim=True)))


@register
@dataclass
class RandomOrthogonal(_Control):
    """Every target becomes a random orthogonal matrix with the scale of `fire_exact`: its spectrum, no memory of W.

    If this does as well as FIRE, the old directions were worth nothing. Drawn from `state.generator` (Haar measure: QR
    of a Gaussian with positive diagonal). Cost: one QR per target.
    """

    name: ClassVar[str] = "random_orthogonal"
    summary: ClassVar[str] = "control: random orthogonal matrix with FIRE's spectrum, nothing kept"
    source: ClassVar[str] = "control of this suite; Saxe et al. 2014 (orthogonal initialisation)"

    def treat(self, stack: Tensor, group: list[Target], state: State) -> Treated:
        count, rows, columns = stack.shape
        tall = (count, max(rows, columns), min(rows, columns))
        q, r = torch.linalg.qr(torch.randn(tall, generator=state.generator, dtype=torch.float64))
        q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        factor = (q if rows >= columns else q.mT).to(stack)
        return Treated(factor * scales(group, stack), factor)
