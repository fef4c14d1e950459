"""Muon: an optimizer that orthogonalises the momentum of hidden matrices; alone, and with FIRE at boundaries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError, check_settings
from fire_core.methods.fire import Fire
from fire_core.methods.method import TEXT, MatrixView, Method, Views, find_weights, rates_of, register
from fire_core.report import Report
from fire_core.solvers.schedules import MUON_QUINTIC
from fire_core.state import State


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return `matrices` (..., m, n) after `steps` of Muon's quintic Newton-Schulz iteration, computed in bfloat16.

    The singular values of the result lie in about [0.7, 1.2], because the coefficients trade accuracy for speed (Jordan et
    al. 2024). Those that began below about 1e-2 of the Frobenius norm may be smaller.
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


class AdamBased(Optimizer):
    """Base class of optimizers that are Adam in part. All their memory is in `state`, the step of each weight too."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update. `closure`, if given, is called first, and its loss is returned."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.update()
        return loss

    def update(self) -> None:
        """Move all weights that have a gradient."""
        raise NotImplementedError

    def next_steps(self, weights: list[Any]) -> list[int]:
        """Count a step of each weight, and return the numbers of the steps, from 1."""
        first = torch.zeros((), dtype=torch.float32, device="cpu")  # read at every step
        counts = [self.state[p].setdefault("step", first.clone()) for p in weights]
        torch._foreach_add_(counts, 1.0)
        return [int(count) for count in counts]

    def adam_directions(self, weights: list[Any], steps: list[int], group: dict[str, Any]) -> Any:
        """Return the directions m / (sqrt(v) + eps) of Adam at these steps, and update its moments."""
        for p in weights:
            if "exp_avg" not in self.state[p]:
                self.state[p] |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        (first, second), gradients = group["betas"], [p.grad for p in weights]
        means, squares = ([self.state[p][key] for p in weights] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1.0 - first)
        torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1.0 - second)
        deviations = torch._foreach_div(squares, [1.0 - second**step for step in steps])
        torch._foreach_sqrt_(deviations)
        torch._foreach_add_(deviations, group["eps"])
        directions = torch._foreach_div(means, [1.0 - first**step for step in steps])
        torch._foreach_div_(directions, deviations)
        return directions


class MuonAdam(AdamBased):
    """Muon for the parameter groups that have a `momentum`, Adam for the others; neither has weight decay.

    Muon's update is that of `torch.optim.Muon`, which takes matrices only: Nesterov momentum, orthogonalised, times
    sqrt(max(1, rows / columns)). A weight is read as a `MatrixView` with the `stacked` and `transposed` of its group.
    """

    def update(self) -> None:
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if "momentum" in group:
                self._step_matrices(weights, group)
            elif weights:
                directions = self.adam_directions(weights, self.next_steps(weights), group)
                torch._foreach_add_(weights, directions, alpha=-group["lr"])

    def _step_matrices(self, weights: list[Any], group: dict[str, Any]) -> None:
        view = MatrixView(group["stacked"], group["transposed"])
        for p in weights:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            update = view.matrices(p.grad.lerp(momentum, group["momentum"]))
            p.add_(view.weight(orthogonalize(update), p), alpha=-group["lr"] * self.factor(p, update))

    def factor(self, parameter: Tensor, matrices: Tensor) -> float:
        """Return the factor of an orthogonalised update, given the parameter and its update as matrices (..., m, n)."""
        rows, columns = matrices.shape[-2:]
        return max(1.0, rows / columns) ** 0.5


@register
@dataclass
class Muon(Method):
    """Trains the targets with Muon and everything else (gains, biases, embeddings, head) with Adam.

    Adam's learning rate and epsilon are those of the default optimizer. Nothing has weight decay, whatever that has.
    Cost: one buffer per matrix instead of two, and 15 matrix products (3 for each of 5 steps) per weight and update.

    Args:
        rate_factor: learning rate of the targets as a multiple of the default optimizer's (paper: 0.01 = 10 x 1e-3).
        targets: the hidden weights, a rule of `find_targets`.
    """

    rate_factor: float = 10.0
    momentum: float = 0.95
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    targets: str | list[str] = "no_head"

    name = "muon"
    title = "Muon"
    summary = "optimizer choice: orthogonalised momentum for hidden matrices"
    source = "Jordan et al. 2024 (Muon)"
    proven_by = TEXT
    changes_optimizer = True

    def __post_init__(self) -> None:
        check_settings(self, rate_factor="(0, inf)", momentum="[0, 1)")
        betas = self.adam_betas if isinstance(self.adam_betas, Sequence) else ()
        if len(betas) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in betas):
            raise UserError(f"adam_betas={self.adam_betas} must be two numbers in [0, 1), as in [0.9, 0.95]")

    def build(self, net: nn.Module, default: Optimizer) -> Optimizer:
        epsilon = default.param_groups[0].get("eps")
        epsilon = epsilon if isinstance(epsilon, float | int) else 1e-8  # Adafactor has two
        return self.optimizer(net, find_weights(net, self.targets), default, epsilon)

    def optimizer(
        self, net: nn.Module, views: Views, default: Optimizer, epsilon: float, kind: Any = MuonAdam
    ) -> MuonAdam:
        """Return an optimizer that trains the weights of `views` with Muon, and all others with Adam."""
        rest, rates, plain = list[nn.Parameter](), rates_of(default, self.rate_factor), rates_of(default)
        own = {**rates, "rate_factor": self.rate_factor, "momentum": self.momentum}
        groups: dict[tuple[bool, bool], dict[str, Any]] = {}
        for name, parameter in net.named_parameters():
            if view := views.get(name):
                how = {"stacked": view.stacked, "transposed": view.transposed}
                group = groups.setdefault((view.stacked, view.transposed), {"params": [], **own, **how})
                group["params"].append(parameter)
            else:
                rest.append(parameter)
        adam = {"lr": plain["lr"], "betas": tuple(self.adam_betas), "eps": epsilon}
        return kind([*groups.values(), *([{"params": rest, **plain}] if rest else [])], adam)


@register
@dataclass
class FireMuon(Muon):
    """Trains as `Muon` does, and applies `fire` at each boundary: does it still help where updates are orthogonalised?

    iterations: of `fire`. projected: the matrices that `fire` projects, a rule of `find_targets`. Cost: that of both.
    """

    iterations: int = Fire.iterations
    projected: str | list[str] = "all"

    name = "fire_muon"
    title = "FIRE with Muon"
    summary = "FIRE at boundaries with Muon as the optimizer"
    source = "combination of Han et al. 2026 (FIRE) and Jordan et al. 2024 (Muon)"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._fire = Fire(targets=self.projected, iterations=self.iterations)

    def check(self, state: State) -> None:
        super().check(state)
        self._fire.check(state)

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        return self._fire.treat(name, net, state)
