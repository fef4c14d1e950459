"""Muon: an optimizer that orthogonalises the momentum of hidden matrices, in place of a treatment at boundaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError, check_range
from fire_core.methods.method import TEXT, MatrixView, Method, find_weights, register
from fire_core.solvers.schedules import MUON_QUINTIC


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return `matrices` (..., m, n) after `steps` of Muon's quintic Newton-Schulz iteration, computed in bfloat16.

    The singular values of the result lie in about [0.7, 1.2], not at 1, because the coefficients trade accuracy for
    speed (Jordan et al. 2024). Those that began below about 1e-2 of the Frobenius norm may be smaller.
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
    """Muon for weights of two or more dimensions; `torch.optim.Muon` takes matrices only.

    A weight is read as a `MatrixView` with `stacked` and `transposed` reads it. The update is that of `torch.optim.Muon`
    without weight decay: Nesterov momentum, factor sqrt(max(1, rows / columns)).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        momentum: float = 0.95,
        *,
        stacked: bool = False,
        transposed: bool = False,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "stacked": stacked, "transposed": transposed}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update. `closure`, if given, is called first, and its loss is returned."""
        loss = evaluate_closure(closure)
        for group in self.param_groups:
            view = MatrixView(group["stacked"], group.get("transposed", False))  # older state dicts lack it
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = view.matrices(parameter.grad.lerp(momentum, group["momentum"]))
                change = view.weight(orthogonalize(update), parameter)
                parameter.add_(change, alpha=-group["lr"] * self.factor(parameter, update))
        return loss

    def factor(self, parameter: Tensor, matrices: Tensor) -> float:
        """Return the factor of an orthogonalised update, given the parameter and its update as matrices (..., m, n)."""
        rows, columns = matrices.shape[-2:]
        return max(1.0, rows / columns) ** 0.5


class CombinedOptimizer(Optimizer):
    """Several optimizers as one, for schedules, checkpoints and state policies: groups and state are shared."""

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
        """Make one update. `closure`, if given, is called first, and its loss is returned."""
        loss = evaluate_closure(closure)
        for part in self.parts:
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the last part, which is Adam if there is one."""
        total = sum(len(part.param_groups) for part in self.parts)
        if len(self.param_groups) == total:  # the groups of the parts are all here, so this one is new
            self.parts[-1].add_param_group(param_group)
            param_group = self.parts[-1].param_groups[-1]
            self.param_groups.append(param_group)
        else:
            super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"parts": self.parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state dict, and share its groups and state with the parts."""
        super().load_state_dict(state_dict)
        self._share()


def evaluate_closure(closure: Callable[[], float] | None) -> float | None:
    """Call a closure with gradients enabled and return its loss, or None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@register
@dataclass
class Muon(Method):
    """Trains the targets with Muon and everything else (gains, biases, head) with Adam, from phase `first_phase` on.

    Two-dimensional weights go to `torch.optim.Muon` where torch has it, all others to `ConvMuon`. Embeddings,
    positions and class tokens stay with Adam, whose learning rate and epsilon are those of the default optimizer.
    Nothing has weight decay, whatever the default optimizer has.

    Args:
        rate_factor: learning rate of the targets as a multiple of the default optimizer's (paper: 0.01 = 10 x 1e-3).
        targets: the hidden weights, a rule of `find_targets`.

    Cost: one buffer per matrix instead of two, and 15 matrix products (3 for each of 5 steps) per weight and update.
    """

    rate_factor: float = 10.0
    momentum: float = 0.95
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    targets: str | list[str] = "no_head"

    name: ClassVar[str] = "muon"
    title: ClassVar[str] = "Muon"
    summary: ClassVar[str] = "optimizer choice: orthogonalised momentum for hidden matrices"
    source: ClassVar[str] = "Jordan et al. 2024 (Muon)"
    proven_by: ClassVar[str] = TEXT
    changes_optimizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range(self, "(0, inf)", "rate_factor")
        check_range(self, "[0, 1)", "momentum")
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise UserError(f"adam_betas={self.adam_betas} must be two numbers in [0, 1), as in [0.9, 0.95]")

    def build(self, net: nn.Module, default: Optimizer) -> Optimizer:
        weights, rate = find_weights(net, self.targets), default.param_groups[0]["lr"]
        # torch.optim.Muon, new in torch 2.9, takes two dimensions
        most = 2 if hasattr(torch.optim, "Muon") else 0
        matrices, rest = [], []
        others: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, parameter in net.named_parameters():
            view = weights.get(name)
            if view is None:
                rest.append(parameter)
            elif parameter.ndim <= most and not view.transposed:
                matrices.append(parameter)
            else:
                others.setdefault((view.stacked, view.transposed), []).append(parameter)
        parts: list[Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr=rate * self.rate_factor, momentum=self.momentum, weight_decay=0.0
            )
            parts.append(muon)
        for (stacked, transposed), chosen in sorted(others.items()):
            how = {"stacked": stacked, "transposed": transposed}
            parts.append(ConvMuon(chosen, rate * self.rate_factor, self.momentum, **how))
        for part in parts:
            part.param_groups[0]["rate_factor"] = self.rate_factor
        if rest:
            betas = self.adam_betas[0], self.adam_betas[1]
            epsilon = default.param_groups[0].get("eps", 1e-8)
            parts.append(torch.optim.Adam(rest, lr=rate, betas=betas, eps=epsilon))
        return CombinedOptimizer(parts)
