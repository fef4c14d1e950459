"""Dormancy scores of hidden units: the mean absolute activation of a unit relative to the mean over its layer.

    score(unit) = mean |activation| of the unit / mean of that over the layer       (ReDo, Sokar et al. 2023, Eq. 1)

The activations of a layer are the tensor, after a nonlinearity, that the next matrix product or convolution reads. A
pool after the nonlinearity and the product of a gated block are therefore part of them. Nonlinearities may be modules
or functions; a sigmoid is taken for a gate and does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from fire_core.measure.inputs import call

THRESHOLD = 0.025
NONLINEAR = {
    "relu", "gelu", "silu", "tanh", "leaky_relu", "elu", "hardtanh", "mish", "softplus", "hardswish", "threshold",
    "clamp", "clamp_min", "maximum", "glu", "prelu", "_prelu_kernel", "celu", "log_sigmoid_forward", "rrelu_with_noise",
}  # fmt: skip
PRODUCTS = {
    "mm", "addmm", "bmm", "baddbmm", "convolution", "mv", "addmv", "dot", "embedding", "_embedding_bag",
}  # fmt: skip
MIXERS = ("_scaled_dot_product", "lstm", "gru", "rnn", "mkldnn_rnn", "_thnn")


def dormancy_scores(activations: Tensor) -> Tensor:
    """Return the dormancy scores of the units of one layer (ReDo, Sokar et al. 2023, Eq. 1).

    Args:
        activations: (samples, units) or (samples, channels, ...); a channel counts as one unit.
    Returns: (units,), with mean 1; all 0 if all activations of the layer are 0.
    """
    a = (activations if activations.dtype == torch.float64 else activations.float()).abs()
    return relative_to_layer(a.mean(dim=[d for d in range(a.ndim) if d != 1]))


def relative_to_layer(magnitudes: Tensor) -> Tensor:
    """Return the scores (units,) from the mean absolute activation of each unit (units,)."""
    return magnitudes / magnitudes.mean().clamp_min(torch.finfo(magnitudes.dtype).tiny)


class _Source(NamedTuple):
    """The product that values come from: its number in order of execution and its number of units.

    counted: whether its units are scored. active: whether a nonlinearity followed.
    """

    place: int
    units: int
    counted: bool
    active: bool = False


class WatchUnits(TorchDispatchMode):
    """Context in which the scores of every layer whose activations a product reads are collected in `scores`.

    counted: called at each product; if it returns False, the units of that product are left out (a frozen layer).
    """

    def __init__(self, counted: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self.counted = counted
        self._scores: dict[int, Tensor] = {}
        self._sources: Any = WeakTensorKeyDictionary()
        self._products = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; score what a product reads, and remember which product other results come from."""
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__.rstrip("_")
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in PRODUCTS or name.startswith(MIXERS):
            for tensor in read:
                self.note(tensor)
            if isinstance(result, Tensor) and name in PRODUCTS and result.ndim > 1:
                self._products += 1
                units = result.shape[1 if name == "convolution" else -1]
                self._sources[result] = _Source(self._products, units, self.counted())
            return result
        known = [source for tensor in read if (source := self._sources.get(tensor)) is not None]
        if known:
            source = max(known, key=lambda source: (source.active, source.place))
            source = source._replace(active=source.active or name in NONLINEAR)
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._sources[leaf] = source
        return result

    def note(self, activations: Tensor) -> None:
        """Compute the scores of a layer once, from the activations that the next layer reads."""
        source = self._sources.get(activations)
        if source is not None and source.active and source.counted and source.place not in self._scores:
            self._scores[source.place] = dormancy_scores(by_unit(activations, source.units))

    @property
    def scores(self) -> list[Tensor]:
        """Scores (units,) of each layer recorded so far."""
        return list(self._scores.values())


def by_unit(activations: Tensor, units: int) -> Tensor:
    """Return activations with the units in dimension 1, (samples, units, ...); all other dimensions may be merged."""
    if activations.ndim > 2 and activations.shape[1] == units:
        return activations
    if activations.shape[-1] == units or activations.shape[-1] % units:
        return activations.flatten(0, -2)
    return activations.reshape(-1, units, activations.shape[-1] // units)


def dormancy_of(net: nn.Module, inputs: Any, counted: Callable[[], bool] = lambda: True) -> list[Tensor]:
    """Return the scores (units,) of each hidden layer in one pass of `inputs` through `net`, in its present mode.

    If no layer reads any units, these are the scores of the output. counted: see `WatchUnits`.
    """
    with torch.no_grad(), WatchUnits(counted) as watch:
        output = call(net, inputs)
        if not watch.scores:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    watch.note(leaf)
    return watch.scores
