"""ReDo: find dormant units on a few batches and recycle them. `dormancy` and `recycle` can also be used alone."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fire_core.errors import check_settings
from fire_core.measure.dormancy import dormancy
from fire_core.methods._units import ForgetfulUnitMethod, coming_inputs, stream_of
from fire_core.methods.method import TEXT, register
from fire_core.seeding import seeded
from fire_core.state import State


@register
@dataclass
class ReDo(ForgetfulUnitMethod):
    """Gives dormant units new incoming weights and outgoing weights 0, after every epoch or every `every_steps` steps.

    Cost: one forward pass over `samples` per check; no memory in between.

    Args:
        threshold: largest score (see `dormancy`) of a dormant unit; -1: no unit is dormant.
        every_steps: number of optimizer steps between checks; 0 checks after every epoch.
        samples: number of samples of the phase to measure on, rounded up to whole batches.
    """

    threshold: float = 0.05
    every_steps: int = 0
    samples: int = 512

    name = "redo"
    title = "ReDo"
    summary = "recycle dormant units every epoch"
    source = "Sokar et al. 2023 (ReDo), Definition 3.1, Algorithm 1"
    off = {"threshold": -1.0}
    proven_by = TEXT

    needs = frozenset({"batches"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, every_steps="[0, inf)", samples="[0, inf)", threshold="[-1, inf)")

    def after_step(self, state: State) -> None:
        self.counts["steps"] += 1
        if self.every_steps and self.counts["steps"] % self.every_steps == 0:
            self.check_units(state)

    def after_pass(self, state: State) -> None:
        if not self.every_steps:
            self.check_units(state)

    def check_units(self, state: State) -> None:
        """Measure all nets on `state.batches` and recycle their dormant units."""
        for name, net in state.nets.items():
            layers = self.find_layers(state, name)
            scores = dormancy(net, self._some_inputs(state, name), layers)
            for layer in layers:
                chosen = (scores[layer.name] <= self.threshold).nonzero().flatten().cpu()
                if len(chosen):
                    self.recycle(state, name, layer, chosen)

    def _some_inputs(self, state: State, name: str) -> list[Any]:
        taken, parts = 0, []
        # the random streams of the training stay as they are
        with seeded(stream_of(state, self.name, self.counts["steps"]).initial_seed()):
            for inputs in coming_inputs(state.batches, name, self.name):
                parts.append(inputs)
                taken += len(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))
                if taken >= self.samples:
                    break
        return parts
