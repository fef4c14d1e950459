"""Muon: train hidden matrices with orthogonalised momentum instead of treating them at boundaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError
from fire_core.methods import Method, register, stacked_weights
from fire_core.phases import Phase, State
from fire_core.solvers.schedules import MUON_QUINTIC
from fire_core.targets import find_targets


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Muon's quintic Newton-Schulz in bfloat16: (..., m, n) -> (..., m, n) with singular values in about [0.7, 1.2].

    Not a projection: the coefficients trade accuracy for speed (Jordan et al. 2024).
    """
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    a, b, c = MUON_QUINTIC
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class ConvMuon(Optimizer):
    """Muon for weights of more than two dimensions: each is one (out, everything else) matrix, or with `stacked` a stack of
    (out, in) matrices.

    The same update as `torch.optim.Muon`, which takes matrices only; in Nesterov form, factor sqrt(max(1, rows/cols)).
    """

    def __init__(
        self, params: Any, lr: float = 1e-2, momentum: float = 0.95, *, stacked: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "stacked": stacked})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; returns what `closure` returns, which is called first."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])
                update = update if group["stacked"] else update.flatten(1)
                change = orthogonalize(update).view_as(parameter)
                parameter.add_(change, alpha=-group["lr"] * self.factor(parameter, update))
        return loss

    def factor(self, parameter: Tensor, matrices: Tensor) -> float:
        """What an orthogonalised update is multiplied by, given the parameter and the matrices it was taken as."""
        rows, columns = matrices.shape[-2:]
        return max(1.0, rows / columns) ** 0.5


class Together(Optimizer):
    """Present several optimizers as one. Schedules, checkpoints and state policies see shared groups and state."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        start = 0
        for part in self.parts:
            count = len(part.param_groups)
            part.param_groups = self.param_groups[start : start + count]
            part.state = self.state
            start += count

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; returns what `closure` returns, which is called first."""
        loss = _evaluate(closure)
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def _evaluate(closure: Callable[[], float] | None) -> float | None:
    """The loss of a closure, which computes gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@register
@dataclass
class Muon(Method):
    """From phase `first_phase` on: Muon for the targets' weights, Adam for everything else (gains, biases, head).

    Rates are relative to the default optimizer's: matrices learn at `rate_factor` times it (paper: 0.01 = 10 x 1e-3).
    Adam's epsilon is the default's; nothing decays, whatever the default does.
    2-D weights go to `torch.optim.Muon`, convolutions to `ConvMuon`. Which are hidden is a target rule; embeddings,
    positions and class tokens stay with Adam. Cost: one buffer per matrix instead of two, and about 5 * 3 matrix products
    per weight and step.
    """

    rate_factor: float = 10.0
    momentum: float = 0.95
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    targets: str | list[str] = "no_head"

    name: ClassVar[str] = "muon"
    summary: ClassVar[str] = "optimizer choice: orthogonalised momentum for hidden matrices"
    source: ClassVar[str] = "Jordan et al. 2024 (Muon)"
    changes_optimizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rate_factor <= 0.0 or not 0.0 <= self.momentum < 1.0 or len(self.adam_betas) != 2:
            raise UserError(
                f"rate_factor={self.rate_factor}, momentum={self.momentum}, adam_betas={self.adam_betas}: use e.g. "
                "10, 0.95, [0.9, 0.95]"
            )
        self._made: WeakKeyDictionary[nn.Module, Optimizer] = WeakKeyDictionary()

    def check(self, state: State) -> None:
        for net in state.nets.values():
            find_targets(net, self.targets)

    def optimizer(self, net: nn.Module, default: Optimizer, phase: Phase) -> Optimizer:
        if phase.index < self.first_phase:
            return default
        if net not in self._made:
            self._made[net] = self.build(net, default)
        return self._made[net]

    def build(self, net: nn.Module, default: Optimizer) -> Optimizer:
        """The optimizer of `net`, with the rates of `default`."""
        hidden = {target.parameter for target in find_targets(net, self.targets).included}
        weights = [p for name, p in net.named_parameters() if name in hidden]
        rest = [p for name, p in net.named_parameters() if name not in hidden]
        rate = default.param_groups[0]["lr"]
        stacks = {id(weight) for weight in stacked_weights(net).values()}
        stacked = [p for p in weights if id(p) in stacks]
        # dimensions that torch's own takes, which came with 2.9
        most = 2 if hasattr(torch.optim, "Muon") else 0
        matrices = [p for p in weights if p.ndim <= most]
        convolutions = [p for p in weights if p.ndim > most and id(p) not in stacks]
        parts: list[Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr=rate * self.rate_factor, momentum=self.momentum, weight_decay=0.0
            )
            parts.append(muon)
        if convolutions:
            parts.append(ConvMuon(convolutions, lr=rate * self.rate_factor, momentum=self.momentum))
        if stacked:
            parts.append(ConvMuon(stacked, lr=rate * self.rate_factor, momentum=self.momentum, stacked=True))
        for part in parts:
            part.param_groups[0]["rate_factor"] = self.rate_factor
        if rest:
            betas = self.adam_betas[0], self.adam_betas[1]
            epsilon = default.param_groups[0].get("eps", 1e-8)
            parts.append(torch.optim.Adam(rest, lr=rate, betas=betas, eps=epsilon))
        return Together(parts)
