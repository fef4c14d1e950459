"""UPGD: an optimizer that protects useful weights and perturbs the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError, check_range
from fire_core.methods.method import Method, register
from fire_core.methods.muon import evaluate_closure
from fire_core.seeding import derive


class PerturbedDescent(Optimizer):
    """w <- (1 - lr * weight_decay) w - lr * (d + noise) (1 - U), for every weight w with gradient g.

    U = sigmoid(u / max u), where u is the bias-corrected average of -g w, and the maximum is over all weights: the first
    order utility, scaled globally. d is g, or with `adaptive` Adam's bias-corrected m / (sqrt(v) + eps). The noise is
    normal with deviation `sigma`, and a function of `seed` and the number of updates alone, which is kept where a cleared
    state does not reach it, so that no noise comes twice.
    """

    never_cleared = ("drawn",)  # noise does not come twice

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        sigma: float,
        decay: float,
        weight_decay: float,
        adaptive: bool,
        seed: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "sigma": sigma, "decay": decay, "weight_decay": weight_decay}
        settings |= {"adaptive": adaptive, "seed": seed, "betas": betas, "eps": eps}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update. `closure`, if given, is called first, and its loss is returned."""
        loss = evaluate_closure(closure)
        found = [
            (group, p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if not found:
            return loss
        utilities = [self._utility(group, p, gradient) for group, p, gradient in found]
        first = utilities[0].device
        largest = torch.stack([utility.max().to(first) for utility in utilities]).max().clamp_min(1e-30)
        cuda = sorted({p.device.index for _, p, _ in found if p.device.type == "cuda"})
        with torch.random.fork_rng(cuda):
            counter = self.param_groups[0]
            counter["drawn"] = counter.get("drawn", 0) + 1
            torch.manual_seed(derive(counter["seed"], "noise", counter["drawn"]))
            for (group, p, gradient), utility in zip(found, utilities, strict=True):
                direction = self._adam(group, p, gradient) if group["adaptive"] else gradient
                noise = torch.randn_like(p) * group["sigma"]
                free = 1.0 - torch.sigmoid(utility / largest.to(utility.device))
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                p.sub_(((direction + noise) * free).to(p.dtype), alpha=group["lr"])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state dict, with the averages in float32, which torch would cast to the type of the weights."""
        if any("utility" not in state for state in state_dict["state"].values()):
            raise UserError(
                "this state dict is not of UPGD: it has no utilities; load it into the optimizer that wrote it"
            )
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, weights, strict=True):
            if number in state_dict["state"]:
                saved = state_dict["state"][number]["utility"]
                self.state[p]["utility"] = saved.to(p.device, torch.float32, copy=True)

    def _utility(self, group: dict[str, Any], p: Tensor, gradient: Tensor) -> Tensor:
        """Update the average of -g w, and return it with bias correction, float32."""
        memory = self.state[p]
        if not memory:
            memory["step"] = torch.zeros(())  # on the CPU: read at every step
            memory["utility"] = torch.zeros_like(p, dtype=torch.float32)
            if group["adaptive"]:
                memory["exp_avg"], memory["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        memory["step"] += 1
        memory["utility"].lerp_(-(gradient * p).float(), 1.0 - group["decay"])
        return memory["utility"] / (1.0 - group["decay"] ** int(memory["step"]))

    def _adam(self, group: dict[str, Any], p: Tensor, gradient: Tensor) -> Tensor:
        """Update Adam's moments, and return the direction of its step."""
        memory, (first, second) = self.state[p], group["betas"]
        step = int(memory["step"])
        mean = memory["exp_avg"].lerp_(gradient, 1.0 - first) / (1.0 - first**step)
        square = memory["exp_avg_sq"].lerp_(gradient.square(), 1.0 - second) / (1.0 - second**step)
        return mean / (square.sqrt() + group["eps"])


@register
@dataclass
class UPGD(Method):
    """Trains all parameters with `PerturbedDescent` from phase `first_phase` on.

    Args:
        rate_factor: learning rate as a multiple of the default optimizer's.
        sigma: deviation of the noise.
        decay: of the average utility.
        weight_decay: of all parameters; the default optimizer's does not count.
        adaptive: take Adam's direction; False is the plain rule, which needs a larger rate (`rate_factor`).

    The maximum is that of the corrected averages. Where it is not positive, so that no weight is useful, 1e-30 takes its
    place. We had summaries of the paper, not its equations: that the averages are corrected before their maximum is taken
    is our reading, and which rate, noise and decay suit a task has to be searched.

    Cost: three buffers per weight instead of two, and one normal number per weight and step.
    """

    rate_factor: float = 1.0
    sigma: float = 1e-3
    decay: float = 0.999
    weight_decay: float = 1e-3
    adaptive: bool = True

    name: ClassVar[str] = "upgd"
    summary: ClassVar[str] = "optimizer choice: smaller steps for useful weights, noise for the others"
    source: ClassVar[str] = "Elsayed & Mahmood 2024 (UPGD, arXiv 2404.00781)"
    changes_optimizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range(self, "(0, inf)", "rate_factor")
        check_range(self, "[0, inf)", "sigma", "weight_decay")
        check_range(self, "[0, 1)", "decay")

    def build(self, net: nn.Module, default: Optimizer) -> Optimizer:
        """Return a new optimizer of all trained parameters.

        Its seed is made from the weights, which all processes of a run have in common. Checkpoints hold it.
        """
        trained = [p for p in net.parameters() if p.requires_grad]
        total = sum(float(p.detach().double().abs().sum()) for p in trained)
        return PerturbedDescent(
            [{"params": trained, "rate_factor": self.rate_factor}],
            lr=default.param_groups[0]["lr"] * self.rate_factor,
            sigma=self.sigma,
            decay=self.decay,
            weight_decay=self.weight_decay,
            adaptive=self.adaptive,
            seed=derive(0, "upgd", repr(total)),
            eps=default.param_groups[0].get("eps", 1e-8),
        )
