"""DASH: shrink each weight vector the more, the less it points along the loss's descent direction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fire_core.errors import UserError
from fire_core.measure.inputs import call
from fire_core.measure.modes import undisturbed
from fire_core.methods import Method, register
from fire_core.methods._units import inputs_of
from fire_core.phases import State
from fire_core.placement import observe
from fire_core.report import Report
from fire_core.targets import TargetTable, find_targets


def dash(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    *,
    alpha: float = 0.3,
    floor: float = 0.05,
    kernels: bool = True,
    biases: bool = True,
    training: bool = True,
    targets: Any = "all",
    initial: Mapping[str, Tensor] | None = None,
) -> Report:
    """Direction-aware shrinking of `model`, in place: `descent` over `batches`, then `shrink` along it.

    Args:
        batches: (inputs, targets) of the coming data, read once. loss: (output, targets) -> scalar.
        kernels, biases, targets: as in `shrink`. training: take the gradients in training mode.
        initial: starting weights by parameter name, only to report the distance moved relative to a full reset.
    """
    table = find_targets(model, targets)
    with observe(model, action="shrunk", method="dash", initial=initial) as report:
        direction = descent(model, batches, loss, alpha=alpha, training=training)
        shrink(model, direction, table, floor=floor, kernels=kernels, biases=biases)
    return report


def descent(
    model: nn.Module,
    batches: Iterable[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    *,
    alpha: float,
    training: bool = True,
) -> dict[str, Tensor]:
    """G <- (1 - alpha) G - alpha gradient over one pass, from 0, of every parameter that the loss depends on.

    Buffers, mode and the CPU's random state are put back.
    """
    parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
    found: dict[str, Tensor] = {}
    with undisturbed(model, training=training), torch.enable_grad():
        for inputs, targets in batches:
            gradients = torch.autograd.grad(
                loss(call(model, inputs), targets), list(parameters.values()), allow_unused=True
            )
            for key, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    found.setdefault(key, torch.zeros_like(gradient)).lerp_(-gradient, alpha)
    return found


@torch.no_grad()
def shrink(
    model: nn.Module,
    direction: Mapping[str, Tensor],
    table: TargetTable,
    *,
    floor: float,
    kernels: bool = True,
    biases: bool = True,
    strength: float = 1.0,
) -> None:
    """Multiply weight vectors by 1 - strength * (1 - max(floor, cos)), cos between vector and `direction`, in place.

    A vector is a row of a Linear, and in a convolution one (out, in) kernel (kernels=False: all weights of an output
    channel); with `biases` also every single entry of the biases beside them, whose cosine is 1 or -1. Parameters
    without a direction stay as they are.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    start = 2 if kernels else 1
    for key in dict.fromkeys(t.parameter for t in table.included if t.kind == "conv"):
        if key in direction:
            weight = parameters[key]
            shrunk = shrink_factor(weight.flatten(start), direction[key].flatten(start), floor, strength)
            weight.mul_(shrunk.view(*shrunk.shape, *[1] * (weight.ndim - start)))
    for target in table.included:
        if target.parameter in direction and target.kind != "conv":
            rows = target.matrix(parameters)
            shrunk = shrink_factor(rows, target.matrix(direction), floor, strength)
            target.write(parameters, rows * shrunk.unsqueeze(-1))
    if biases:
        for key in biases_beside(table):
            if key in direction:
                entries, along = parameters[key].unsqueeze(-1), direction[key].unsqueeze(-1)
                parameters[key].mul_(shrink_factor(entries, along, floor, strength))


def biases_beside(table: TargetTable) -> list[str]:
    """The biases of the modules whose weights are targets."""
    modules = {target.module for target in table.included}
    return [target.parameter for target in table if target.kind == "bias" and target.module in modules]


def shrink_factor(vectors: Tensor, directions: Tensor, floor: float, strength: float = 1.0) -> Tensor:
    """What each vector (last dimension) is multiplied by."""
    cosine = cosine_similarity(vectors.float(), directions.float(), dim=-1).clamp(floor, 1.0)
    return (1.0 - strength * (1.0 - cosine)).to(vectors.dtype)


def coming(name: str, state: State) -> tuple[Iterator[tuple[Any, Any]], Callable[[Any, Any], Tensor]]:
    """Batches (inputs, targets) of the coming phase for net `name`, and the loss."""
    if state.batches is None or state.loss is None:
        raise UserError("method 'dash' needs gradients of the coming data: set state.batches and state.loss")
    return ((inputs_of(name, inputs), targets) for inputs, targets in state.batches()), state.loss


@register
@dataclass
class Dash(Method):
    """`dash` at every boundary, with one pass over the coming phase's data.

    evaluation_mode: take the gradients with running statistics. every_steps > 0 is the per-step form: no pass at the
    boundary; the direction follows the training gradients, and after every so many steps vectors are multiplied by
    1 - rate * (1 - max(floor, cos)), which lies in [1 - rate (1 - floor), 1].
    Where the gradient is zero the cosine is too: a boundary multiplies the weights of a dead unit by `floor`, and a net
    whose units have all died is shrunk away.
    Cost: one epoch of gradients per boundary (or two passes over the weights per step), and one copy of the weights.
    """

    alpha: float = 0.3
    floor: float = 0.05
    kernels: bool = True
    biases: bool = True
    evaluation_mode: bool = False
    every_steps: int = 0
    rate: float = 1.0
    targets: str | list[str] = "all"

    name: ClassVar[str] = "dash"
    summary: ClassVar[str] = "direction-aware shrinking by the gradient of the new data"
    source: ClassVar[str] = "Shin et al. 2024 (DASH, arXiv 2410.23495), Algorithm 1"

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha <= 1.0 or not 0.0 <= self.floor <= 1.0 or not 0.0 <= self.rate <= 1.0:
            raise UserError(
                f"alpha={self.alpha}, floor={self.floor}, rate={self.rate} must lie in [0, 1], alpha not 0"
            )
        if self.rate != 1.0 and not self.every_steps:
            raise UserError(
                f"rate={self.rate} is for the per-step form: give every_steps too, or leave it out"
            )
        self.steps = 0
        self.descent: dict[str, dict[str, Tensor]] = {}
        self._tables: WeakKeyDictionary[nn.Module, TargetTable] = WeakKeyDictionary()

    def check(self, state: State) -> None:
        for net in state.nets.values():
            find_targets(net, self.targets)

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        if self.every_steps:
            return Report()
        batches, loss = coming(name, state)
        settings: dict[str, Any] = {
            key: getattr(self, key) for key in ("alpha", "floor", "kernels", "biases", "targets")
        }
        training, initial = not self.evaluation_mode, state.initial.get(name)
        return dash(net, batches, loss, training=training, initial=initial, **settings)

    def after_step(self, state: State) -> None:
        if not self.every_steps or state.phase < self.first_phase:
            return
        self.steps += 1
        for name, net in state.nets.items():
            known = self.descent.setdefault(name, {})
            for key, parameter in net.named_parameters():
                if parameter.grad is not None:
                    old = known.get(key, torch.zeros_like(parameter))
                    known[key] = torch.lerp(old.to(parameter.device), -parameter.grad, self.alpha)
            if self.steps % self.every_steps == 0:
                if net not in self._tables:
                    self._tables[net] = find_targets(net, self.targets)
                which: dict[str, Any] = {"kernels": self.kernels, "biases": self.biases}
                shrink(net, known, self._tables[net], floor=self.floor, strength=self.rate, **which)

    def state_dict(self) -> dict[str, Any]:
        return {"method": self.name, "steps": self.steps, "descent": self.descent}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved.get("method") == self.name:  # else a trunk that another method trained
            self.steps, self.descent = saved["steps"], saved["descent"]
