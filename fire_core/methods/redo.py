"""ReDo: find dormant units on a few batches and recycle them. `dormancy` and `recycle` can also be used alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fire_core.errors import UserError, check_range
from fire_core.measure.dormancy import relative_to_layer
from fire_core.measure.inputs import call
from fire_core.measure.modes import in_mode
from fire_core.methods._units import UnitMethod, coming_inputs
from fire_core.methods.method import TEXT, register
from fire_core.report import Report
from fire_core.state import State
from fire_core.units import Recorder, UnitLayer, find_unit_layers, recycle

__all__ = ["ReDo", "dormancy", "recycle"]


def dormancy(
    net: nn.Module,
    batches: Iterable[Any],
    layers: list[UnitLayer] | None = None,
    *,
    compiled: bool = False,
) -> dict[str, Tensor]:
    """Return the dormancy score of every hidden unit: its mean `|activation|` over that of its layer (ReDo, Eq. 1).

    Means are over all samples. Activations are what the next layer reads: after ReLU, squared ReLU or GELU, after a
    pool, and after the product of a gated MLP. The passes run in evaluation mode without gradients, and all hooks are
    removed.

    Args:
        batches: inputs of the net: tensors, tuples of arguments, or mappings of keyword arguments.
        layers: from `find_unit_layers`; None finds them.
        compiled: run the passes through torch.compile, as one graph that also returns the sums over activations.
    Returns: layer name -> (units,) float32 with mean 1; all 0 where the whole layer is silent.
    Raises: UserError without batches, and for a net without hidden units of their own.
    """
    batches = list(batches)
    if not batches:
        raise UserError("dormancy needs at least one batch of inputs")
    if layers is None:
        layers, reasons = find_unit_layers(net, batches[0])
        if not layers:
            why = "; ".join(f"{name} {reason}" for name, reason in list(reasons.items())[:4])
            raise UserError(f"{type(net).__name__} has no hidden units that can be told apart: {why}")
    totals: dict[str, Tensor] = {}
    recorder = Recorder(net, layers, _magnitude, always=True)

    def read(inputs: Any) -> dict[str, Tensor]:
        recorder.values = {}
        call(net, inputs)
        return recorder.values

    run = torch.compile(read, fullgraph=True) if compiled else read
    with in_mode(net, training=False), torch.no_grad(), recorder:
        for inputs in batches:
            for name, value in run(inputs).items():
                totals[name] = totals[name] + value if name in totals else value
    scores = {name: total[:-1] / total[-1] for name, total in totals.items()}
    return {name: relative_to_layer(score) for name, score in scores.items()}


def _magnitude(activations: Tensor) -> Tensor:
    """Return the sum of |activation| of each unit, with the number of samples as the last entry, (units + 1,)."""
    sums = activations.float().abs().sum(dim=0)
    return torch.cat([sums, sums.new_full((1,), len(activations))])


@register
@dataclass
class ReDo(UnitMethod):
    """Gives dormant units new incoming weights and outgoing weights 0, after every epoch or every `every_steps` steps.

    Args:
        threshold: largest score (see `dormancy`) of a dormant unit.
        every_steps: number of optimizer steps between checks; 0 checks after every epoch.
        samples: number of samples of the phase to measure on, rounded up to whole batches.

    Cost: one forward pass over `samples` per check, compiled where the net is trained compiled; no memory in between.
    """

    threshold: float = 0.05
    every_steps: int = 0
    samples: int = 512

    name: ClassVar[str] = "redo"
    summary: ClassVar[str] = "recycle dormant units every epoch"
    source: ClassVar[str] = "Sokar et al. 2023 (ReDo), Definition 3.1, Algorithm 1"
    proven_by: ClassVar[str] = TEXT

    needs: ClassVar[frozenset[str]] = frozenset({"batches"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "[0, inf)", "threshold", "every_steps", "samples")

    def boundary(self, state: State) -> Report:
        """Do nothing, and return an empty report."""
        return Report(method=self.name)

    def after_step(self, state: State) -> None:
        """Check the units if `every_steps` steps have passed."""
        self.counts["steps"] += 1
        if self.every_steps and self.counts["steps"] % self.every_steps == 0:
            self.check_units(state)

    def after_pass(self, state: State) -> None:
        """Check the units, unless `every_steps` sets other times."""
        if not self.every_steps:
            self.check_units(state)

    def check_units(self, state: State) -> None:
        """Measure all nets on `state.batches` and recycle their dormant units."""
        for name, net in state.nets.items():
            layers = self.find_layers(state, name)
            scores = dormancy(net, self._some_inputs(state, name), layers, compiled=state.compiled)
            for layer in layers:
                chosen = (scores[layer.name] <= self.threshold).nonzero().flatten().cpu()
                if len(chosen):
                    self.recycle(state, name, layer, chosen)

    def _some_inputs(self, state: State, name: str) -> list[Any]:
        taken, parts = 0, []
        for inputs in coming_inputs(state.batches, name, self.name):
            parts.append(inputs)
            taken += len(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))
            if taken >= self.samples:
                break
        return parts
