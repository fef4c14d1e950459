"""Plasticity injection: a fresh head beside the frozen old one, without changing a single prediction."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fire_core.errors import UserError
from fire_core.methods import Method, register
from fire_core.methods.full_reset import initial_of
from fire_core.phases import Phase, State
from fire_core.report import Report, Row


class InjectedHead(nn.Module):
    """old(x) + new(x) - new_at_start(x), where only `new` is trained.

    At the moment of injection the last two terms are the same numbers, so the output is that of the old head up to
    float rounding. Heads that return several tensors are combined entry by entry.
    """

    def __init__(self, old: nn.Module, new: nn.Module) -> None:
        super().__init__()
        self.old = _frozen(old)
        self.new = new
        self.new_at_start = _frozen(deepcopy(new))

    def forward(self, *inputs: Any) -> Any:
        old, new, start = self.old(*inputs), self.new(*inputs), self.new_at_start(*inputs)
        if isinstance(old, tuple):
            return tuple(a + (b - c) for a, b, c in zip(old, new, start, strict=True))
        return old + (new - start)


@register
@dataclass
class PlasticityInjection(Method):
    """The head of every net becomes an `InjectedHead`; the part before it stays shared and trainable.

    The new head starts from the run's own initial draw, as in FIRE's baseline; Nikishin et al. draw afresh. Followers
    (target networks) get the same structure. The number of parameters of the head triples, a third of them is trained;
    the script must build a new optimizer (`changes_structure`). A second boundary injects once more on top.

    head: attribute of the nets that holds the head, dots allowed.
    """

    head: str = "head"

    name: ClassVar[str] = "plasticity_injection"
    summary: ClassVar[str] = "frozen old head plus a trainable new one that starts at zero contribution"
    source: ClassVar[str] = "Nikishin et al. 2023 (Deep RL with Plasticity Injection), section 3"
    changes_structure: ClassVar[bool] = True
    domains: ClassVar[tuple[str, ...]] = ("dqn", "sac")  # needs an encoder and a head

    def check(self, state: State) -> None:
        """Also that every net has the head."""
        super().check(state)
        for name, net in state.nets.items():
            self._head(net, name)

    def at_boundary(self, state: State, phase: Phase) -> Report:
        if phase.index < self.first_phase:
            return Report(method=self.name)
        reports = {}
        for name, net in state.nets.items():
            initial = initial_of(state, name)
            prefix = f"{self.head}."
            start = {k.removeprefix(prefix): v for k, v in initial.items() if k.startswith(prefix)}
            new = deepcopy(_trainable_part(self._head(net, name)))
            new.load_state_dict(start)
            self._inject(net, name, new)
            for follower in (f for f, source in state.followers if source is net):
                self._inject(follower, name, deepcopy(new))
            reports[name] = self._report(net, name)
        return Report.merge(reports, self.name)

    def rebuild(self, state: State) -> None:
        """Repeat the injections of the boundaries passed, values aside: they come with the checkpoint."""
        for _ in range(max(1, self.first_phase), state.phase + 1):
            for name, net in state.nets.items():
                for module in (net, *(f for f, source in state.followers if source is net)):
                    self._inject(module, name, deepcopy(_trainable_part(self._head(module, name))))

    def _inject(self, net: nn.Module, name: str, new: nn.Module) -> None:
        old = self._head(net, name)
        path, _, attribute = self.head.rpartition(".")
        setattr(net.get_submodule(path), attribute, InjectedHead(old, new.requires_grad_(True)))

    def _head(self, net: nn.Module, name: str) -> nn.Module:
        try:
            return net.get_submodule(self.head)
        except AttributeError:
            known = ", ".join(child for child, _ in net.named_children())
            raise UserError(
                f"plasticity_injection: net {name!r} has no module {self.head!r}; set method.head to one of {known}"
            ) from None

    def _report(self, net: nn.Module, name: str) -> Report:
        """One row for each parameter of the new head; the old head's are kept and frozen."""
        report = Report(method=self.name)
        head = self._head(net, name)
        for key, parameter in head.named_parameters():
            part = key.split(".")[0]
            full = f"{self.head}.{key}"
            action, reason = ("injected", "") if part == "new" else ("frozen", f"{part} part of the head")
            report.rows.append(Row(full, full, tuple(parameter.shape), action, reason))
            if part == "new":
                report.changed.add(full)
        return report


def _frozen(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.requires_grad_(
            False
        ).grad = None  # a gradient left behind would count in norms and clipping
    return module


def _trainable_part(head: nn.Module) -> nn.Module:
    while isinstance(head, InjectedHead):
        head = head.new
    return head
