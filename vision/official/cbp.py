"""Continual backprop as the authors' FIRE code runs it."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fire_core.methods.cbp import ContinualBackprop
from fire_core.methods.method import register
from fire_core.state import State
from fire_core.units import UnitLayer
from vision.official.watched_units import (
    QUERY,
    OutputRecorder,
    WatchesOutputs,
    chain,
    is_attention,
    last_rows,
)


@register
@dataclass
class OfficialCBP(WatchesOutputs, ContinualBackprop):
    """Continual backprop with the utility, quota and new weights of the official code.

    The magnitude M of a unit grows by (1 - decay) * mean |output| at every step and never decays. The unit's utility is
    M times the mean of its outgoing |w|, or M alone if no layer reads it. Once any unit of a layer is mature, the quota
    of the layer grows by `replacement_rate` times the number of all its units.

    A replaced unit gets incoming weights from a normal distribution with deviation sqrt(2 / fan_in), bias 0, outgoing
    weights 0 and age 0, and its batch norm starts again; M becomes 0 only if no layer reads the unit. The biases of the
    reader and the optimizer's state stay. Where a convolution feeds a Linear, the units are the columns of the Linear:
    a chosen column becomes 0, its channel gets the new incoming weights, and the age that becomes 0 is that of the unit
    with the channel's number.
    """

    variant: ClassVar[str] = "official"
    fixed: ClassVar[tuple[str, ...]] = ("compensate", "fresh", "reset_moments")

    def find_layers(self, state: State, name: str) -> list[UnitLayer]:
        return self.layers.setdefault(name, linked_layers(state.nets[name]))

    def watch(self, net: nn.Module, layers: list[UnitLayer]) -> OutputRecorder:
        """Place hooks that keep the mean |output| of each unit and sample, after max pooling where it follows."""
        pools = {name: net.get_submodule(pool) for name, pool in followers(net, nn.MaxPool2d).items()}

        def reduce(layer: UnitLayer, output: Tensor) -> Tensor:
            magnitudes = pools.get(layer.name, nn.Identity())(output).float().abs()
            if magnitudes.ndim == 3:
                return magnitudes.mean(dim=1)
            return magnitudes.flatten(1).unflatten(1, (columns_of(layer), -1)).mean(dim=2)

        return OutputRecorder(net, layers, reduce)

    def start_memory(self, layer: UnitLayer, device: torch.device) -> dict[str, Tensor]:
        """Return no kept rows yet, and ages, magnitudes (units,) and the quota, all 0."""
        units = columns_of(layer)
        kept, magnitude = torch.zeros(0, units, device=device), torch.zeros(units, device=device)
        age, due = torch.zeros(units, dtype=torch.int64), torch.zeros((), dtype=torch.float64)
        return {"kept": kept, "age": age, "due": due, "magnitude": magnitude}

    def choose(self, net: nn.Module, layer: UnitLayer, memory: dict[str, Tensor], measured: Tensor) -> Tensor:
        """Update magnitudes, ages and quota, and return the mature units of least utility that the quota allows."""
        memory["kept"] = last_rows(memory["kept"], measured)
        magnitude = memory["magnitude"].to(measured.device)
        memory["magnitude"] = magnitude + (1 - self.decay) * memory["kept"].mean(dim=0)
        memory["age"] += 1
        mature = memory["age"] > self.maturity
        if mature.any():
            memory["due"] += self.replacement_rate * len(mature)
        quota = memory["due"].floor()
        memory["due"] -= quota
        if not (count := min(int(quota), int(mature.sum()))):
            return torch.empty(0, dtype=torch.int64)
        utility = memory["magnitude"].cpu()
        for name, _ in layer.outgoing:
            utility = utility * mean_outgoing(net.get_submodule(name)).cpu()
        return utility.masked_fill(~mature, torch.inf).topk(count, largest=False).indices

    @torch.no_grad()
    def recycle(self, state: State, name: str, layer: UnitLayer, chosen: Tensor) -> None:
        net, memory = state.nets[name], self.memory[name][layer.name]
        columns = columns_of(layer) // layer.units
        channels = chosen if columns == 1 else (chosen // columns).unique()
        module: Any = net.get_submodule(layer.name)
        deviation = 2**0.5 * module.weight[0].numel() ** -0.5
        fresh = torch.empty(len(channels), *module.weight.shape[1:])
        module.weight[channels] = fresh.normal_(std=deviation, generator=self.stream(state)).to(module.weight)
        if module.bias is not None:
            module.bias[channels] = 0.0
        for path in layer.norms:
            norm: Any = net.get_submodule(path)
            norm.weight[channels] = norm.running_var[channels] = 1.0
            norm.bias[channels] = norm.running_mean[channels] = 0.0
        for reader, _ in layer.outgoing:
            weight: Any = net.get_submodule(reader).weight
            weight[:, chosen] = 0.0
        if not layer.outgoing:
            memory["magnitude"][chosen] = 0.0
        memory["age"][channels] = 0
        self.counts["recycled"] += len(chosen)


def linked_layers(net: nn.Module) -> list[UnitLayer]:
    """Return the layers of `chain` but the last, with their batch norms and the columns that each reader has per unit.

    Layers that make queries, keys or values, or feed them, have no reader.
    """
    modules: dict[str, Any] = dict(net.named_modules())
    norms = followers(net, nn.BatchNorm2d)
    found = []
    for layer in chain(net)[:-1]:
        ((reader, _),) = layer.outgoing
        columns = modules[reader].weight.shape[1] // layer.units
        unread = is_attention(layer.name) or reader.split(".")[-1] == QUERY
        norm = (norms[layer.name],) if layer.name in norms else ()
        found.append(replace(layer, norms=norm, outgoing=() if unread else ((reader, columns),)))
    return found


def followers(net: nn.Module, kind: type[nn.Module]) -> dict[str, str]:
    """Return, by layer name, the first module of `kind` between each watched layer and the next one in module order."""
    found: dict[str, str] = {}
    layer = ""
    for name, module in net.named_modules():
        if "shortcut" in name:
            continue
        if isinstance(module, nn.Linear | nn.Conv2d):
            layer = name
        elif isinstance(module, kind) and layer:
            found.setdefault(layer, name)
    return found


def columns_of(layer: UnitLayer) -> int:
    """Return how many units the official code counts: columns of the reader, or outputs of a layer without a reader."""
    return layer.units * (layer.outgoing[0][1] if layer.outgoing else 1)


@torch.no_grad()
def mean_outgoing(reader: Any) -> Tensor:
    """Return the mean |w| of each column of the reader, (columns,) float32."""
    return reader.weight.float().abs().transpose(0, 1).flatten(1).mean(dim=1)
