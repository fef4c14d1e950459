"""Controls that change no weight at a boundary: nothing, the optimizer's memory cleared, or kept with a new warm-up."""

from dataclasses import dataclass
from typing import Any

from fire_core.errors import check_settings
from fire_core.methods.method import Method, register
from fire_core.report import Report
from fire_core.state import State


@register
@dataclass
class NoReset(Method):
    """Does nothing. Cost: nothing."""

    name = "none"
    title = "none (continue)"
    summary = "no intervention: train on from the old weights"
    source = "baseline"
    off = {}


@register
@dataclass
class Clear(Method):
    """Clears the optimizers' memory at the boundary, whatever `optimizer_state` is, and keeps the weights.

    If it does as well as a method whose runs clear the memory too, that method's treatment explains nothing. Where
    `optimizer_state` is "clear", `none` clears it too: then compare `clear` with `none` and optimizer_state "keep".
    """

    name = "clear"
    summary = "control: Adam's moments cleared, weights kept"
    source = "control of this suite"
    optimizer_state = "clear"


@register
@dataclass
class Rewarm(Method):
    """Keeps weights and optimizer memory at the boundary, and lets the learning rate rise again.

    In the first `steps` optimizer steps after a boundary, step t has t / steps of the rate that the loop has set, which it
    gets back in `after_step`: call that before a scheduler's step. Where the loop's own schedule starts each phase with a
    warm-up, use steps=1: the memory is then all that differs from `clear`.
    """

    steps: int = 500

    name = "rewarm"
    summary = "control: learning rate warmed up again, moments and weights kept"
    source = "2025 (arXiv 2507.20057)"
    off = {"steps": 1}
    optimizer_state = "keep"
    needs = frozenset({"gradients", "optimizers"})
    remembers = ("done",)

    def __post_init__(self) -> None:
        check_settings(self, steps="[1, inf)")
        self.done = self.steps  # since the last boundary
        self._rates: dict[int, tuple[dict[str, Any], float]] = {}  # before the first update of a step

    def boundary(self, state: State) -> Report:
        self.done = 0
        return Report()

    def before_step(self, state: State) -> None:
        if self.done < self.steps:
            named = [state.optimizers[name] for name in state.nets if name in state.optimizers]
            for group in (group for optimizer in named for group in optimizer.param_groups):
                _, rate = self._rates.setdefault(id(group), (group, group["lr"]))
                group["lr"] = rate * ((self.done + 1) / self.steps)  # not in place: it may be a tensor

    def after_step(self, state: State) -> None:
        self.after_skip(state)
        self.done = min(self.done + 1, self.steps)

    def after_skip(self, state: State) -> None:
        for group, rate in self._rates.values():
            group["lr"] = rate
        self._rates = {}
