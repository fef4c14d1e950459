"""DASH: shrink each weight vector, the more so the less it agrees with the direction in which the loss descends."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fire_core.engine import observe, table_of
from fire_core.errors import UserError, check_settings
from fire_core.methods._units import as_pair, inputs_of
from fire_core.methods.method import TEXT, Method, register
from fire_core.passes import call, placed, undisturbed
from fire_core.report import Report
from fire_core.state import State
from fire_core.targets import TargetTable
from fire_core.wrapped_models import average_over_ranks, unwrap

Batches = Iterable[tuple[Any, Any]]  # (inputs, targets)
Loss = Callable[[Any, Any], Tensor]  # (output, targets) -> scalar


def dash(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    *,
    alpha: float = 0.3,
    floor: float = 0.05,
    kernels: bool = True,
    biases: bool = True,
    training: bool = True,
    targets: Any = "all",
    initial: Mapping[str, Tensor] | None = None,
) -> Report:
    """Shrink the weights of `model` that disagree with the gradient of new data, in place, and return the report.

    Args:
        batches: (inputs, targets) of the coming data, read once.
        loss: (output, targets) -> scalar.
        alpha: weight of the newest gradient in the running average of `descent`.
        floor, kernels, biases: see `shrink`.
        training: take the gradients in training mode, else in evaluation mode.
        targets: rule for the matrices, as in `fire`; of a part, all of the bias shrinks, and of a convolution all of it.
        initial: starting weights by parameter name, only to report the distance moved relative to a full reset.
    Raises: UserError for settings out of range, targets that do not exist, no batches, and a sharded model.
    """
    Dash(alpha=alpha, floor=floor)  # checks both
    table = table_of(model, targets)
    with observe(model, action="shrunk", method="dash", initial=initial) as report:
        direction = descent(model, batches, loss, alpha=alpha, training=training)
        shrink(unwrap(model), direction, table, floor=floor, kernels=kernels, biases=biases)
    return report


def descent(
    model: nn.Module, batches: Batches, loss: Loss, *, alpha: float, training: bool = True
) -> dict[str, Tensor]:
    """Return the running average of the negative gradient over one pass, by parameter name.

    G <- (1 - alpha) G - alpha * gradient, starting from 0, for every parameter that the loss depends on. Under
    DistributedDataParallel it is the mean over the ranks, of which each reads its own batches. Buffers, mode and the
    CPU's random state are restored.
    """
    parameters = {key: p for key, p in unwrap(model).named_parameters() if p.requires_grad}
    found: dict[str, Tensor] = {}
    with undisturbed(model, training=training), torch.enable_grad():
        for inputs, targets in batches:
            value = loss(call(model, inputs), placed(model, targets))
            gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
            for key, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    found.setdefault(key, torch.zeros_like(gradient)).lerp_(-gradient, alpha)
    average_over_ranks(model, found, parameters)
    if not found:  # on any rank
        raise UserError("dash needs at least one batch, with a loss that depends on the weights")
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
) -> None:
    """Multiply each weight vector by max(floor, cos), in place.

    cos is the cosine between the vector and `direction`. A vector is a row of a Linear, or one (out, in) kernel of a
    convolution (with kernels=False, all weights of an output channel; of an input channel if transposed). With `biases`,
    each entry of the biases beside them is a vector too, with cosine 1, -1 or 0. Other parameters stay as they are.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    chosen = [target for target in table.included if target.parameter in direction]
    start = 2 if kernels else 1
    for key in dict.fromkeys(target.parameter for target in chosen if target.kind == "conv"):
        weight = parameters[key]
        factor = shrink_factor(weight.flatten(start), direction[key].flatten(start), floor)
        weight.mul_(factor.view(*weight.shape[:start], *[1] * (weight.ndim - start)))
    for target in chosen:
        if target.kind != "conv":
            rows = target.matrix(parameters)
            target.write(parameters, rows * shrink_factor(rows, target.matrix(direction), floor))
    for key in biases_beside(table) if biases else ():
        if key in direction:
            entries = parameters[key].unsqueeze(-1)
            entries.mul_(shrink_factor(entries, direction[key].unsqueeze(-1), floor))


def biases_beside(table: TargetTable) -> list[str]:
    """Return the names of the biases of the modules whose weights are targets."""
    modules = {target.module for target in table.included}
    return [target.parameter for target in table if target.kind == "bias" and target.module in modules]


def shrink_factor(vectors: Tensor, directions: Tensor, floor: float) -> Tensor:
    """Return the factor of each vector: (..., n) vectors and directions give (..., 1) factors."""
    cosine = cosine_similarity(vectors.float(), directions.float(), dim=-1)
    return cosine.clamp(floor, 1.0).to(vectors.dtype).unsqueeze(-1)


def coming(name: str, state: State) -> tuple[Batches, Loss]:
    """Return the batches of the coming phase for net `name`, and the loss."""
    assert state.batches is not None and state.loss is not None  # `needs` asks for both
    pairs = map(as_pair, state.batches())
    return ((inputs_of(name, inputs), targets) for inputs, targets in pairs), state.loss


@register
@dataclass
class Dash(Method):
    """Calls `dash` at every boundary, with one pass over the coming phase's data.

    Where the gradient is zero, so is the cosine: a boundary multiplies the weights of a dead unit by `floor`. Cost: one
    epoch of gradients per boundary, and one copy of the weights.

    Args:
        evaluation_mode: take the gradients in evaluation mode.
        every_steps, rate: of a form that acted during training and is gone; they are part of the identity of runs.
    """

    alpha: float = 0.3
    floor: float = 0.05
    kernels: bool = True
    biases: bool = True
    evaluation_mode: bool = False
    every_steps: int = 0
    rate: float = 1.0
    targets: str | list[str] = "all"

    name = "dash"
    title = "DASH"
    summary = "direction-aware shrinking by the gradient of the new data"
    source = "Shin et al. 2024 (DASH, arXiv 2410.23495), Algorithm 1"
    off = {"floor": 1.0}
    proven_by = TEXT
    needs = frozenset({"batches", "loss"})
    fixed = ("every_steps", "rate")

    def __post_init__(self) -> None:
        check_settings(self, alpha="(0, 1]", floor="[0, 1]")

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        settings = self.settings("evaluation_mode", "every_steps", "rate")
        settings |= {"training": not self.evaluation_mode, "initial": state.initial.get(name)}
        return dash(net, *coming(name, state), **settings)
