"""Continual backprop: replace the least useful mature units at a slow, steady rate."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fire_core.errors import check_settings
from fire_core.methods._units import UnitMethod
from fire_core.methods.method import FIXTURE, register
from fire_core.state import State
from fire_core.units import UnitLayer, outgoing


@register
@dataclass
class ContinualBackprop(UnitMethod):
    """Replaces the units of least utility during training.

    The utility of a unit is a running average u <- decay u + (1 - decay) |h| sum |w_out| with bias correction, where |h|
    is the mean over the batch. At every step, a layer adds `replacement_rate` times the number of its units older than
    `maturity` steps to a quota. For every whole unit in the quota, its mature unit of least utility gets new incoming
    weights, outgoing weights 0 and age 0. Cost: three numbers per unit, one pass over the outgoing weights per step.

    Args:
        compensate: add a replaced unit's mean contribution to the readers' biases, if any, so that the output does not jump.

    The authors' code (loss-of-plasticity) replaces units of the same utility in every step that was recorded from it.
    Its "adaptable" utility is not offered, and its quota of convolutions counts all units once one is old. Three more
    things differ, of which two can be set. Its compensation has no effect (`compensate=false`). Its new weights of
    Linear layers, but not of convolutions, are 2.45 times as wide (`fresh=he_uniform` widens both). Its own version of
    Adam counts the steps of each entry and has lost its bias correction.
    """

    replacement_rate: float = 1e-4
    maturity: int = 1000
    decay: float = 0.99
    compensate: bool = True

    name = "cbp"
    title = "CBP"
    summary = "continual backprop: replace the least useful units slowly"
    source = "Dohare et al. 2024 (Nature 632), Algorithm 1"
    proven_by = FIXTURE
    off = {"replacement_rate": 0.0}
    needs = frozenset({"activations", "batches"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, replacement_rate="[0, 1]", decay="[0, 1)", maturity="[0, inf)")

    def measure(self, activations: Tensor) -> Tensor:
        """Return mean |activation| and mean activation of each unit, (2, units)."""
        values = activations.float()
        return torch.stack([values.abs().mean(dim=0), values.mean(dim=0)])

    def start_memory(self, layer: UnitLayer, device: torch.device) -> dict[str, Tensor]:
        """Return ages, utilities and mean activations (units,) and the quota, all 0."""
        return {
            "age": torch.zeros(layer.units, dtype=torch.int64, device="cpu"),  # read at every step
            "due": torch.zeros((), dtype=torch.float64, device="cpu"),
            "utility": torch.zeros(layer.units, dtype=torch.float32, device=device),
            "mean": torch.zeros(layer.units, dtype=torch.float32, device=device),
        }

    def choose(self, net: nn.Module, layer: UnitLayer, memory: dict[str, Tensor], measured: Tensor) -> Tensor:
        """Update utilities, ages and quota, and return the mature units of least utility that the quota allows."""
        memory["age"] += 1
        size, mean = measured
        self._average(memory, "mean", mean)
        self._average(memory, "utility", size * outgoing_magnitude(net, layer))
        mature = memory["age"] > self.maturity
        memory["due"] += self.replacement_rate * int(mature.sum())
        count = min(int(memory["due"]), int(mature.sum()))
        memory["due"] -= count
        if count == 0:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        utility = memory["utility"].cpu() / (1 - self.decay ** memory["age"].double())
        return utility.masked_fill(~mature, torch.inf).topk(count, largest=False).indices

    def _average(self, memory: dict[str, Tensor], key: str, value: Tensor) -> None:
        memory[key] = torch.lerp(value, memory[key].to(value.device), self.decay)

    @torch.no_grad()
    def recycle(self, state: State, name: str, layer: UnitLayer, chosen: Tensor) -> None:
        """Let the readers' biases compensate for the units, replace them, and set their memory to 0."""
        net, memory = state.nets[name], self.memory[name][layer.name]
        if self.compensate:
            correction = 1 - self.decay ** memory["age"][chosen].double()
            mean = memory["mean"][chosen] / correction.to(memory["mean"])
            for entries, (path, _) in zip(outgoing(net, layer), layer.outgoing, strict=True):
                reader: Any = net.get_submodule(path)
                if reader.bias is not None:
                    weight = entries.read(chosen=chosen).transpose(1, 2)  # (units, out, columns, ...)
                    shift = weight.flatten(2).sum(dim=2) * mean.to(weight)[:, None]
                    if reader.bias.ndim == 1:
                        reader.bias += shift.sum(dim=0)
                    else:  # one bias for each member of a stack
                        members = entries.place(chosen)[0][:, 0]
                        reader.bias.index_add_(0, members.to(shift.device), shift)
        for key in ("age", "utility", "mean"):
            memory[key][chosen] = 0
        super().recycle(state, name, layer, chosen)


@torch.no_grad()
def outgoing_magnitude(net: nn.Module, layer: UnitLayer) -> Tensor:
    """Return the sum of |w| over all outgoing weights of each unit, (units,) float32."""
    weights = [entries.read().float().abs() for entries in outgoing(net, layer)]
    parts = [weight.transpose(1, 2).flatten(1).sum(dim=1) for weight in weights]
    return torch.stack([part.to(parts[0].device) for part in parts]).sum(dim=0)
