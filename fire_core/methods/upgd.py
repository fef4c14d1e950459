"""UPGD: an optimizer that protects useful weights and perturbs the others."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import check_settings
from fire_core.methods.method import FIXTURE, Method, rates_of, register
from fire_core.methods.muon import AdamBased
from fire_core.seeding import derive


class PerturbedDescent(AdamBased):
    """w <- (1 - lr * weight_decay) w - lr * (d + noise) (1 - U), for every weight w with gradient g.

    U = sigmoid(u / largest), where u is the bias-corrected average of -g w: the first-order utility, scaled globally.
    `largest` is the maximum of the averages over all weights: of the uncorrected ones (`maximum` "raw", the authors' code)
    or of the corrected ones ("corrected", the paper's algorithm as others read it). It may be negative; U then protects
    the least useful weights most. A maximum of exactly 0 counts as 1e-30.

    d is g, or with `adaptive` Adam's bias-corrected m / (sqrt(v) + eps). The noise is normal with deviation `sigma`, a
    function of `seed`, the device and the number of updates alone.
    """

    never_cleared = ("drawn",)  # the number of updates: no noise comes twice

    def __init__(self, params: Any, **settings: Any) -> None:
        """settings: lr, and those of `UPGD`: sigma, decay, weight_decay, adaptive; also maximum, seed, betas and eps."""
        super().__init__(params, {"maximum": "raw", "seed": 0, "betas": (0.9, 0.999), "eps": 1e-8} | settings)

    def update(self) -> None:
        places: dict[tuple[int, torch.device], list[Any]] = {}
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    places.setdefault((number, p.device), []).append(p)
        if not places:
            return
        counter = self.param_groups[0]
        counter["drawn"] = counter.get("drawn", 0) + 1
        seed = derive(counter["seed"], "noise", counter["drawn"])
        streams = {device: torch.Generator(device).manual_seed(seed) for _, device in places}
        parts = [(self.param_groups[n], own, self.next_steps(own)) for (n, _), own in places.items()]
        utilities, peaks = zip(*(self._utilities(*part) for part in parts), strict=True)
        largest = torch.stack([peak.to(peaks[0].device) for peak in peaks]).max()
        largest = torch.where(largest == 0.0, 1e-30, largest)
        for (group, weights, steps), ratios in zip(parts, utilities, strict=True):
            stream, device = streams[weights[0].device], weights[0].device
            directions: Any = [p.grad for p in weights]
            if group["adaptive"]:
                directions = self.adam_directions(weights, steps, group)
            noise = [torch.randn(p.shape, generator=stream, device=device, dtype=p.dtype) for p in weights]
            torch._foreach_mul_(noise, group["sigma"])
            torch._foreach_add_(noise, directions)
            torch._foreach_div_(ratios, largest.to(device))
            torch._foreach_sigmoid_(ratios)
            torch._foreach_neg_(ratios)
            torch._foreach_add_(ratios, 1.0)  # 1 - U
            torch._foreach_mul_(ratios, noise)
            torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
            rounded = [step.to(p.dtype) for step, p in zip(ratios, weights, strict=True)]
            torch._foreach_sub_(weights, rounded, alpha=group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state dict, with the averages in float32, which torch would cast to the type of the weights."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, weights, strict=True):
            if number in state_dict["state"]:
                saved = state_dict["state"][number]["utility"]
                self.state[p]["utility"] = saved.to(p.device, torch.float32, copy=True)

    def _utilities(
        self, group: dict[str, Any], weights: list[Any], steps: list[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Update the averages of -g w, and return them with bias correction, float32, and the largest."""
        for p in weights:
            if "utility" not in self.state[p]:
                self.state[p]["utility"] = torch.zeros_like(p, dtype=torch.float32)
        averages, gradients = [self.state[p]["utility"] for p in weights], [p.grad for p in weights]
        new = torch._foreach_mul(gradients, weights)  # type: ignore[arg-type]
        torch._foreach_neg_(new)
        torch._foreach_lerp_(averages, [each.float() for each in new], 1.0 - group["decay"])
        corrected = list(torch._foreach_div(averages, [1.0 - group["decay"] ** step for step in steps]))
        ranked = averages if group["maximum"] == "raw" else corrected
        return corrected, torch.stack(list(torch._foreach_max(ranked))).max()


@register
@dataclass
class UPGD(Method):
    """Trains all parameters with `PerturbedDescent` from phase `first_phase` on.

    Args:
        rate_factor: learning rate as a multiple of the default optimizer's.
        sigma: deviation of the noise.
        decay: of the average utility. weight_decay: of all parameters; the default optimizer's does not count.
        adaptive: take Adam's direction; False is the plain rule of the paper's streams, which needs a larger rate.
        maximum: see `PerturbedDescent`.

    Two versions of the authors' code, in the README and for reinforcement learning, multiply the direction by 2, but not
    the decay: `rate_factor` 2 with half the weight decay. The authors tuned the plain rule on streams of single samples:
    rate 0.01, decay 0.9 to 0.9999, sigma 0.001 to 0.1, weight decay 0 or 0.01. The defaults are those of their version for
    reinforcement learning. Cost: a third buffer per weight, and one normal number per weight and step.
    """

    rate_factor: float = 1.0
    sigma: float = 1e-3
    decay: float = 0.999
    weight_decay: float = 1e-3
    adaptive: bool = True
    maximum: str = "raw"

    name = "upgd"
    title = "UPGD"
    summary = "optimizer choice: smaller steps for useful weights, noise for the others"
    source = "Elsayed & Mahmood 2024 (UPGD, arXiv 2404.00781)"
    proven_by = FIXTURE
    changes_optimizer = True
    takes_whole_weights = True

    def __post_init__(self) -> None:
        check_settings(self, maximum="raw corrected", rate_factor="(0, inf)")
        check_settings(self, sigma="[0, inf)", weight_decay="[0, inf)", decay="[0, 1)")

    def build(self, net: nn.Module, default: Optimizer) -> Optimizer:
        """Return a new optimizer of all parameters: those without a gradient stay.

        Its seed is made from the weights, which processes of a run and repeats of a trial share. Checkpoints hold it.
        """
        trained = [p for p in net.parameters() if p.requires_grad]
        total = sum(float(p.detach().double().abs().sum()) for p in trained)
        rates = rates_of(default, self.rate_factor)
        eps = default.param_groups[0].get("eps")  # Adafactor has two
        group = {"params": list(net.parameters()), "rate_factor": self.rate_factor, **rates}
        given = {"lr": rates["lr"], "eps": eps if isinstance(eps, float | int) else 1e-8}
        seed = derive(0, "upgd", repr(total))
        return PerturbedDescent([group], seed=seed, **given, **self.settings("rate_factor"))
