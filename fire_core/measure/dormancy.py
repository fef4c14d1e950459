"""Dormancy scores of hidden units: the mean absolute activation of a unit relative to the mean over its layer.

    score(unit) = mean |activation| of the unit / mean of that over the layer       (ReDo, Sokar et al. 2023, Eq. 1)

The activations of a layer are what the next matrix product or convolution reads of it, after a nonlinear function. A pool
after that function and the product of a gated block are therefore part of them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fire_core.errors import UserError
from fire_core.passes import call, eager, in_mode
from fire_core.targets.labels import core, is_mixed
from fire_core.targets.trace import Source
from fire_core.units import Recorder, UnitLayer, find_unit_layers
from fire_core.units.trace import UnitTrace

THRESHOLD = 0.025


def relative_to_layer(magnitudes: Tensor) -> Tensor:
    """Return the scores (units,) of a layer from the mean |activation| of each unit: with mean 1, or all 0 if all are 0."""
    return magnitudes / magnitudes.mean().clamp_min(torch.finfo(magnitudes.dtype).tiny)


def dormancy_of(
    net: nn.Module, inputs: Any, counted: Callable[[nn.Module | None], bool] = lambda module: True
) -> tuple[list[Tensor], int, Tensor | None]:
    """Return the scores of each hidden layer in one pass of `inputs` through `net`, in its present mode.

    A layer counts once, where it is first read. Branches of one layer with a nonlinear function each (CReLU) are units of
    their own. The sum of two layers, as on a residual stream, counts as the later. If no layer is read, the output counts.

    Args:
        counted: function of the module that runs; where it returns False, the layer is left out.
    Returns: the scores (units,) of each layer that was measured; the number of hidden layers that were not, because a
        product reads their activations after they were mixed; what the Linear that runs last reads, (samples, units).
    """
    scores: dict[int, list[Tensor]] = {}
    lost: set[int] = set()
    features: Tensor | None = None
    seen: list[Tensor] = []  # labels that have been scored

    def counts(number: int) -> bool:
        group = trace.groups[number]
        return group.active and counted(trace.layers[group.place].owner)

    def note(activations: Tensor, source: Source, reader: str | None, *_: Any) -> None:
        nonlocal features
        module = net.get_submodule(reader) if reader is not None else None
        if isinstance(module, nn.Linear) and counted(module):
            features = activations.flatten(0, -2)
        active = [n for n in trace.groups_in(source) if counts(n)]
        mixed = trace.places(filter(counts, source.lost if is_mixed(source.labels) else ()))
        lost.update(mixed)
        if source.labels is None or not active:
            return
        labels, magnitudes = by_label(activations, source.labels)
        fresh = ~torch.isin(labels, torch.cat([labels[:0], *(each.to(labels.device) for each in seen)]))
        for place in sorted(trace.places(active) - mixed):
            of_layer = [labels >> 32 == n for n in active if trace.groups[n].place == place]
            new = fresh & torch.stack(of_layer).any(dim=0)
            if new.any():
                scores.setdefault(place, []).append(relative_to_layer(magnitudes[new]))
                seen.append(labels[new])

    trace = UnitTrace(note)
    output = trace.run(net, inputs)
    for tensor, source in trace.sources(output) if not scores else ():
        note(tensor, source, None)
    return [each for layer in scores.values() for each in layer], len(lost - scores.keys()), features


def by_label(activations: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels (units,) that occur, and the mean |activation| (units,) of the entries with each."""
    small = core(labels)
    repeated = [dim for dim, size in enumerate(small.shape) if size == 1]
    a = (activations if activations.dtype == torch.float64 else activations.float()).abs()
    means = a.mean(dim=repeated, keepdim=True) if repeated else a
    found, place, count = small.flatten().unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(found), dtype=torch.float64, device=a.device)
    return found, (sums.index_add_(0, place, means.flatten().double()) / count).to(a.dtype)


def dormancy(
    net: nn.Module, batches: Iterable[Any], layers: list[UnitLayer] | None = None
) -> dict[str, Tensor]:
    """Return the dormancy score of every hidden unit: its mean `|activation|` over that of its layer (ReDo, Eq. 1).

    Means are over all samples. Activations are what the next layer reads: after ReLU, squared ReLU or GELU, after a pool,
    and after the product of a gated MLP. The passes run in evaluation mode without gradients, and all hooks are removed.

    Args:
        batches: inputs of the net: tensors, tuples of arguments, or mappings of keyword arguments.
        layers: from `find_unit_layers`; None finds them.
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
    totals: dict[str, Any] = {}
    with in_mode(net, training=False), torch.no_grad(), eager():
        for inputs in batches:
            with Recorder(net, layers, lambda units: units.float().abs().sum(dim=0), always=True) as recorder:
                call(net, inputs)
            for name, value in recorder.values.items():
                totals[name] = totals.get(name, 0.0) + value
    return {name: relative_to_layer(total) for name, total in totals.items()}
