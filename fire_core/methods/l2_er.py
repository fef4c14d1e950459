"""L2-ER: weight decay, and now and then a step that raises the effective rank of the hidden activations."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from fire_core.errors import check_settings
from fire_core.measure import metrics
from fire_core.methods._units import LayerMethod
from fire_core.methods.method import FIXTURE, register
from fire_core.report import Report
from fire_core.seeding import kept_chance
from fire_core.state import State
from fire_core.units import Recorder, UnitLayer


class _Inputs:
    """A hook that keeps what a net is called with in training passes, until `remove`."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.kept: list[Any] = []  # of steps that were made
        self.new: list[Any] = []  # of the step that is being made
        self.remove = net.register_forward_pre_hook(self._keep, with_kwargs=True).remove

    def _keep(self, net: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if net.training and torch.is_grad_enabled():
            self.new.append(tree_map_only(Tensor, Tensor.detach, (arguments, keywords)))


@register
@dataclass
class L2ER(LayerMethod):
    """Adds decay * w to the gradients, and after every `every_steps` optimizer steps takes a step of its own.

    That is one plain gradient step, past the optimizer, towards a larger mean `effective_rank` of hidden activations as the
    next layer reads them, not centred, on the batches of these steps taken as one. Positions of convolutions and tokens
    count as samples. The pass updates the statistics of batch norm, as in the authors' code for CIFAR. Cost: one more pass
    over the data; the inputs of these steps are kept.

    Args:
        rate: of that step. decay: of all parameters. It is added before gradients are clipped.
        last_layers: how many hidden layers count, from the end; 0 is all of them, the authors' choice for MNIST.

    The authors take this order for Permuted MNIST, with (rate, decay, every_steps) = (1e-2, 1e-3, 100). Elsewhere their rank
    step comes first, on the batches that follow: (1e-4, 1e-3, 12) for ImageNet and (1e-3, 1e-3, 5) for CIFAR.
    """

    rate: float = 1e-3
    decay: float = 1e-3
    every_steps: int = 5
    last_layers: int = 2

    name = "l2_er"
    title = "L2-ER"
    summary = "weight decay, and steps towards a larger effective rank of activations"
    source = "2025 (L2-ER, arXiv 2509.22335)"
    proven_by = FIXTURE
    needs = frozenset({"activations", "batches", "gradients"})
    off = {"rate": 0.0, "decay": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, rate="[0, inf)", decay="[0, inf)")
        check_settings(self, last_layers="[0, inf)", every_steps="[1, inf)")

    def watch(self, net: nn.Module, layers: list[UnitLayer]) -> _Inputs:
        return _Inputs(net)

    def boundary(self, state: State) -> Report:
        before = self.recorders
        report = super().boundary(state)
        for name, inputs in self.recorders.items():
            if name in before and before[name].net is inputs.net:
                inputs.kept = before[name].kept
        return report

    def before_step(self, state: State) -> None:
        self._start(state)
        for parameter in (p for net in state.nets.values() for p in net.parameters()):
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=self.decay)

    def after_step(self, state: State) -> None:
        self.counts["steps"] += 1
        for name, inputs in self.recorders.items():
            inputs.kept = inputs.kept + inputs.new
            if self.counts["steps"] % self.every_steps == 0:
                if inputs.kept and self.rate > 0.0:
                    rank_step(inputs.net, self.layers[name][-self.last_layers :], inputs.kept, self.rate)
                inputs.kept = []
        self.after_skip(state)

    def after_skip(self, state: State) -> None:
        for inputs in self.recorders.values():
            inputs.new = []

    after_evaluation = after_skip  # whose passes may be in training mode

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"kept": {name: each.kept for name, each in self.recorders.items()}}

    def load_state_dict(self, saved: dict[str, Any], state: State) -> None:
        super().load_state_dict(saved, state)
        for name, kept in saved["kept"].items() if self.recorders else ():
            device = next(state.nets[name].parameters()).device
            self.recorders[name].kept = tree_map_only(Tensor, partial(Tensor.to, device=device), kept)


def rank_step(net: nn.Module, layers: list[UnitLayer], batches: list[Any], rate: float) -> None:
    """Move all trained parameters of `net` by `rate` along the gradient of the mean effective rank of the layers."""
    join = lambda first, *more: torch.cat([first, *more]) if isinstance(first, Tensor) else first  # noqa: E731
    arguments, keywords = tree_map(join, *batches)
    singular = Recorder(
        net, layers, lambda units: torch.linalg.svdvals(units.float().nan_to_num(0, 0, 0)), always=True
    )
    with kept_chance(), torch.enable_grad(), singular:
        net(*arguments, **keywords)
        rank = torch.stack([metrics.effective_rank(each, 1e-8) for each in singular.values.values()]).mean()
    trained: list[Tensor] = [p for p in net.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(rank, trained, materialize_grads=True)
    with torch.no_grad():
        torch._foreach_add_(trained, gradients, alpha=rate)
