"""Hare & Tortoise: an averaged network is evaluated, and from time to time the trained one returns to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fire_core.errors import check_range
from fire_core.methods.method import Method, register
from fire_core.state import State


@register
@dataclass
class HareTortoise(Method):
    """Keeps an exponential average of the weights (the tortoise), evaluates it, and copies it into the net (the hare).

    After every optimizer step, tortoise <- momentum * tortoise + (1 - momentum) * hare; after every `period` steps,
    hare <- tortoise. The tortoise starts as a copy of the hare after the first step. Floating-point buffers, such as the
    running statistics of batch norm, are averaged and copied too; others, such as counts, are taken from the hare.

    The optimizer's state stays at a copy. In reinforcement learning, the hare acts and the tortoise is evaluated; the
    target networks stay those of the script. A finished run saves the weights that it evaluated, the tortoise's. The
    paper's section on these points was not available to us, nor its values: both defaults are ours.

    Cost: one copy of the weights, and one pass over them per step.
    """

    momentum: float = 0.999
    period: int = 1000

    name: ClassVar[str] = "hare_tortoise"
    title: ClassVar[str] = "Hare & Tortoise"
    summary: ClassVar[str] = "averaged weights are evaluated, and training restarts from them at intervals"
    source: ClassVar[str] = "Lee et al. 2024 (Hare & Tortoise, arXiv 2406.02596)"
    off: ClassVar[dict[str, Any] | None] = {"momentum": 0.0}

    def __post_init__(self) -> None:
        check_range(self, "[0, 1)", "momentum")
        check_range(self, "[1, inf)", "period")
        self.steps = 0
        self.tortoise: dict[str, dict[str, Tensor]] = {}
        self._hare: dict[str, dict[str, Tensor]] = {}  # during an evaluation

    @torch.no_grad()
    def after_step(self, state: State) -> None:
        """Follow the hare, and at the end of a period copy the tortoise into it."""
        self.steps += 1
        for name, net in state.nets.items():
            hare = net.state_dict()
            # the first step, or a net with other layers
            if _shapes(self.tortoise.get(name, {})) != _shapes(hare):
                self.tortoise[name] = {key: _precise(value) for key, value in hare.items()}
            tortoise = self.tortoise[name]
            for key, value in hare.items():
                if value.is_floating_point():
                    tortoise[key].lerp_(value.to(tortoise[key].dtype), 1.0 - self.momentum)
                else:
                    tortoise[key].copy_(value)
            if self.steps % self.period == 0:
                net.load_state_dict(tortoise)

    def before_evaluation(self, state: State) -> None:
        """Put the tortoise into the nets."""
        for name, tortoise in self.tortoise.items():
            net = state.nets[name]
            if _shapes(tortoise) != _shapes(net.state_dict()):
                continue  # it has other layers since the last step
            self._hare[name] = {key: value.clone() for key, value in net.state_dict().items()}
            net.load_state_dict(tortoise)

    def after_evaluation(self, state: State) -> None:
        """Put the hare back."""
        for name, hare in self._hare.items():
            state.nets[name].load_state_dict(hare)
        self._hare = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the tortoise and the number of steps."""
        return {"steps": self.steps, "tortoise": self.tortoise}

    def load_state_dict(self, saved: dict[str, Any], state: State) -> None:
        """Restore what `state_dict` returned."""
        self.steps = saved["steps"]
        for name, tortoise in saved["tortoise"].items():
            hare = state.nets[name].state_dict()
            self.tortoise[name] = {
                key: _precise(value).to(hare[key].device) for key, value in tortoise.items()
            }


def _shapes(weights: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in weights.items()}


def _precise(value: Tensor) -> Tensor:
    """Return a copy for the average: in half precision, small steps would round to nothing."""
    half = value.dtype in (torch.float16, torch.bfloat16)
    return value.to(torch.float32 if half else value.dtype, copy=True)
