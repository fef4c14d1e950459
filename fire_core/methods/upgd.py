"""UPGD: an optimizer that protects useful weights and perturbs the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError, check_range
from fire_core.methods.method import FIXTURE, Method, register
from fire_core.methods.muon import evaluate_closure
from fire_core.seeding import derive


class PerturbedDescent(Optimizer):
    """w <- (1 - lr * weight_decay) w - lr * (d + noise) (1 - U), for every weight w with gradient g.

    U = sigmoid(u / largest), where u is the bias-corrected average of -g w: the first-order utility, scaled globally.
    `largest` is the maximum of the averages over all weights: of the uncorrected ones (`maximum` "raw", the authors' code)
    or of the corrected ones ("corrected", the paper's algorithm as others read it). It may be negative; U then protects
    the least useful weights most. A maximum of exactly 0 counts as 1e-30.

    d is g, or with `adaptive` Adam's bias-corrected m / (sqrt(v) + eps). The noise is normal with deviation `sigma`, and a
    function of `seed`, the device and the number of updates alone, which is kept where a cleared state does not reach it,
    so that no noise comes twice.
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
        maximum: str = "raw",
        seed: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        settings: dict[str, Any] = {"lr": lr, "sigma": sigma, "decay": decay, "weight_decay": weight_decay}
        settings |= {"adaptive": adaptive, "maximum": maximum, "seed": seed, "betas": betas, "eps": eps}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update. `closure`, if given, is called first, and its loss is returned."""
        loss = evaluate_closure(closure)
        places: dict[tuple[int, torch.device], list[Tensor]] = {}
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    places.setdefault((number, p.device), []).append(p)
        if not places:
            return loss
        counter = self.param_groups[0]
        counter["drawn"] = counter.get("drawn", 0) + 1
        seed = derive(counter["seed"], "noise", counter["drawn"])
        streams = {device: torch.Generator(device).manual_seed(seed) for _, device in places}
        parts = [(self.param_groups[number], weights) for (number, _), weights in places.items()]
        utilities, peaks = zip(*(self._utilities(group, weights) for group, weights in parts), strict=True)
        largest = torch.stack([peak.to(peaks[0].device) for peak in peaks]).max()
        largest = torch.where(largest == 0.0, 1e-30, largest)
        for (group, weights), ratios in zip(parts, utilities, strict=True):
            stream, device = streams[weights[0].device], weights[0].device
            directions: Any = self._adam(group, weights) if group["adaptive"] else [p.grad for p in weights]
            noise = [torch.randn(p.shape, generator=stream, device=device, dtype=p.dtype) for p in weights]
            torch._foreach_mul_(noise, group["sigma"])
            steps = torch._foreach_add(noise, directions)
            torch._foreach_div_(ratios, largest.to(device))
            torch._foreach_sigmoid_(ratios)
            torch._foreach_neg_(ratios)
            torch._foreach_add_(ratios, 1.0)  # 1 - U
            torch._foreach_mul_(ratios, steps)
            torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
            rounded = [step.to(p.dtype) for step, p in zip(ratios, weights, strict=True)]
            torch._foreach_sub_(weights, rounded, alpha=group["lr"])
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

    def _utilities(self, group: dict[str, Any], weights: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Update the averages of -g w, and return them with bias correction, float32, and the largest."""
        for p in weights:
            if not self.state[p]:
                memory = self.state[p]
                memory["step"] = torch.zeros(())  # on the CPU: read at every step
                memory["utility"] = torch.zeros_like(p, dtype=torch.float32)
                if group["adaptive"]:
                    memory["exp_avg"], memory["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        memories = [self.state[p] for p in weights]
        torch._foreach_add_([memory["step"] for memory in memories], 1.0)
        averages = [memory["utility"] for memory in memories]
        gradients: Any = [p.grad for p in weights]
        new = torch._foreach_mul(gradients, weights)
        torch._foreach_neg_(new)
        torch._foreach_lerp_(averages, [each.float() for each in new], 1.0 - group["decay"])
        corrections = [1.0 - group["decay"] ** int(memory["step"]) for memory in memories]
        corrected = list(torch._foreach_div(averages, corrections))
        ranked = averages if group["maximum"] == "raw" else corrected
        return corrected, torch.stack(list(torch._foreach_max(ranked))).max()

    def _adam(self, group: dict[str, Any], weights: list[Tensor]) -> list[Tensor]:
        """Update Adam's moments, and return the directions of its step."""
        gradients: Any = [p.grad for p in weights]
        memories, (first, second) = [self.state[p] for p in weights], group["betas"]
        counts = [int(memory["step"]) for memory in memories]
        means, squares = ([memory[key] for memory in memories] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1.0 - first)
        torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1.0 - second)
        deviations = torch._foreach_div(squares, [1.0 - second**count for count in counts])
        torch._foreach_sqrt_(deviations)
        torch._foreach_add_(deviations, group["eps"])
        directions = torch._foreach_div(means, [1.0 - first**count for count in counts])
        torch._foreach_div_(directions, deviations)
        return list(directions)


@register
@dataclass
class UPGD(Method):
    """Trains all parameters with `PerturbedDescent` from phase `first_phase` on.

    Args:
        rate_factor: learning rate as a multiple of the default optimizer's.
        sigma: deviation of the noise.
        decay: of the average utility.
        weight_decay: of all parameters; the default optimizer's does not count.
        adaptive: take Adam's direction; False is the plain rule of the paper's streams, which needs a larger rate.
        maximum: see `PerturbedDescent`.

    The authors' code agrees in every step that was recorded from it. Two of its versions, in the README and for
    reinforcement learning, multiply the direction by 2, but not the decay: `rate_factor` 2 with half the weight decay. The
    authors tuned the plain rule on streams of single samples: rate 0.01, decay 0.9 to 0.9999, sigma 0.001 to 0.1, weight
    decay 0 or 0.01. The defaults here are those of their version for reinforcement learning.

    Cost: three buffers per weight instead of two, and one normal number per weight and step.
    """

    rate_factor: float = 1.0
    sigma: float = 1e-3
    decay: float = 0.999
    weight_decay: float = 1e-3
    adaptive: bool = True
    maximum: str = "raw"

    name: ClassVar[str] = "upgd"
    title: ClassVar[str] = "UPGD"
    summary: ClassVar[str] = "optimizer choice: smaller steps for useful weights, noise for the others"
    source: ClassVar[str] = "Elsayed & Mahmood 2024 (UPGD, arXiv 2404.00781)"
    proven_by: ClassVar[str] = FIXTURE
    changes_optimizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.maximum not in ("raw", "corrected"):
            raise UserError(f"maximum={self.maximum!r}: choose 'raw' (the authors' code) or 'corrected'")
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
            maximum=self.maximum,
            seed=derive(0, "upgd", repr(total)),
            eps=default.param_groups[0].get("eps", 1e-8),
        )
