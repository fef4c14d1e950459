"""Hare & Tortoise: an averaged network is evaluated, and from time to time the trained one returns to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fire_core.errors import check_settings
from fire_core.methods.method import FIXTURE, Method, register
from fire_core.report import Report
from fire_core.state import State, load_values
from fire_core.targets.model_targets import unwrapped
from fire_core.wrapped_models import unwrap

WIDER = dict.fromkeys((torch.float16, torch.bfloat16), torch.float32)  # small steps would round to nothing


@register
@dataclass
class HareTortoise(Method):
    """Keeps an exponential average of the weights (the tortoise), evaluates it, and copies it into the net (the hare).

    The tortoise starts as a copy of the net before its first step in phase `first_phase` (in phase 0, of the starting
    weights), and goes on over phases. After every optimizer step, tortoise <- momentum * tortoise + (1 - momentum) * hare;
    now and then, hare <- tortoise. Floating-point buffers, such as the running statistics of batch norm, are averaged and
    copied too; counts are taken from the hare. The optimizer's state stays at a copy.

    Args:
        momentum: share of the tortoise that stays in each step.
        passes: the copies come at the end of the first pass over the data of each phase and every `passes` passes after
            it, as in the authors' code, where that is every 200 to 3,910 steps.
        period: number of optimizer steps between copies instead, counted over all phases; 0: `passes` holds.

    In the authors' code, hare and tortoise share their memory after a copy, so that the average starts again from the
    hare one step later; that is not done here. In reinforcement learning, which their code does not have, the hare acts
    and the target networks stay those of the script. A finished run saves the tortoise. Cost: one copy of the weights.
    """

    momentum: float = 0.999
    period: int = 0
    passes: int = 10

    name = "hare_tortoise"
    title = "Hare & Tortoise"
    summary = "averaged weights are evaluated, and training restarts from them at intervals"
    source = "Lee et al. 2024 (Hare & Tortoise, arXiv 2406.02596)"
    proven_by = FIXTURE
    off = {"momentum": 0.0}
    remembers = ("count", "tortoise")

    def __post_init__(self) -> None:
        check_settings(self, momentum="[0, 1)", period="[0, inf)", passes="[1, inf)")
        self.count = 0  # of steps, or without a period of passes over the data of this phase
        self.tortoise: dict[str, dict[str, Tensor]] = {}
        self._hare: dict[str, dict[str, Tensor]] = {}  # during an evaluation

    def boundary(self, state: State) -> Report:
        """Count the passes from 0, and at the first boundary start the tortoise."""
        self.count = self.count if self.period else 0
        for name, net in state.nets.items():
            self._follow(name, _tensors(net), {})
        return Report()

    @torch.no_grad()
    def after_step(self, state: State) -> None:
        """Follow the hare, and at the end of a period copy the tortoise into it."""
        for name, net in state.nets.items():
            hare = _tensors(net)
            tortoise = self._follow(name, hare, state.initial.get(name, {}))
            averaged = [key for key, value in hare.items() if value.is_floating_point() or value.is_complex()]
            precise = [hare[key].to(tortoise[key].dtype) for key in averaged]
            torch._foreach_lerp_([tortoise[key] for key in averaged], precise, 1.0 - self.momentum)
            for key in hare.keys() - averaged:
                tortoise[key].copy_(hare[key])
        if self.period:
            self.count += 1
            if self.count % self.period == 0:
                self._copy(state)

    def after_pass(self, state: State) -> None:
        """Copy the tortoise into the hare after the passes that are due."""
        if not self.period:
            if self.count % self.passes == 0:
                self._copy(state)
            self.count += 1

    def _follow(self, name: str, hare: dict[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tortoise of a net. Without one for these layers, it begins at `start`, or where the hare is."""
        if _shapes(self.tortoise.get(name, {})) != _shapes(hare):
            start = start if start.keys() >= hare.keys() else {unwrapped(key): v for key, v in start.items()}
            first = start if name not in self.tortoise and _shapes(start) == _shapes(hare) else hare
            self.tortoise[name] = {
                key: first[key].to(value.device, WIDER.get(first[key].dtype), copy=True)
                for key, value in hare.items()
            }
        return self.tortoise[name]

    def _copy(self, state: State) -> None:
        for name, tortoise in self.tortoise.items():
            load_values(unwrap(state.nets[name]), tortoise)

    def before_evaluation(self, state: State) -> None:
        for name, tortoise in self.tortoise.items():
            hare = _tensors(state.nets[name])
            if _shapes(tortoise) == _shapes(hare):  # else it has other layers since the last step
                self._hare[name] = {key: value.clone() for key, value in hare.items()}
                load_values(unwrap(state.nets[name]), tortoise)

    def after_evaluation(self, state: State) -> None:
        for name, hare in self._hare.items():
            load_values(unwrap(state.nets[name]), hare)
        self._hare = {}


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in unwrap(net).state_dict().items() if isinstance(value, Tensor)}


def _shapes(weights: Mapping[str, Any]) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in weights.items() if isinstance(value, Tensor)}
