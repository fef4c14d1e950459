"""L2-ER: weight decay, and now and then a step that raises the effective rank of the hidden activations."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from fire_core.errors import check_settings
from fire_core.methods._units import LayerMethod
from fire_core.methods.method import FIXTURE, register
from fire_core.passes import first_input
from fire_core.state import State
from fire_core.units import UnitLayer


def effective_rank(features: Tensor) -> Tensor:
    """Return exp(-sum p log p) of features (samples, units), with their singular values p divided by their sum."""
    singular = torch.linalg.svdvals(features)
    shares = singular / singular.sum().clamp_min(1e-8)
    return torch.exp(-(shares * torch.log(shares + 1e-8)).sum())


class _Inputs:
    """A hook that keeps what a net is called with in training passes, until `remove`."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.kept: list[Any] = []  # of steps that were made
        self.new: list[Any] = []  # of the step that is being made
        handle = net.register_forward_pre_hook(self._keep, with_kwargs=True)
        self.remove = handle.remove

    def _keep(self, net: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if net.training and torch.is_grad_enabled():
            self.new.append(tree_map_only(Tensor, Tensor.detach, (arguments, keywords)))


@register
@dataclass
class L2ER(LayerMethod):
    """Adds decay * w to the gradients, and after every `every_steps` optimizer steps takes a step of its own.

    That is one plain gradient step, past the optimizer, towards a larger mean `effective_rank` of hidden activations as the
    next layer reads them, not centred, on the batches of these steps taken as one. Positions of convolutions and tokens
    count as samples. The pass updates the statistics of batch norm, as in the authors' code for CIFAR.

    Args:
        rate: of that step.
        decay: of all parameters. It is added before gradients are clipped.
        last_layers: how many hidden layers count, from the end; 0 is all of them, the authors' choice for MNIST.

    The authors take this order for Permuted MNIST; elsewhere their rank step comes first, on the batches that follow. Their
    (rate, decay, every_steps) are (1e-2, 1e-3, 100) there, (1e-4, 1e-3, 12) for ImageNet and (1e-3, 1e-3, 5) for CIFAR.
    Cost: one more pass over the data; the inputs of `every_steps` steps are kept.
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

    def before_step(self, state: State) -> None:
        self._start(state)
        for net in state.nets.values():
            trained = [p for p in net.parameters() if p.grad is not None]
            gradients: Any = [p.grad for p in trained]
            torch._foreach_add_(gradients, [p.detach() for p in trained], alpha=self.decay)

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

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"kept": {name: each.kept for name, each in self.recorders.items()}}

    def load_state_dict(self, saved: dict[str, Any], state: State) -> None:
        super().load_state_dict(saved, state)
        for name, kept in saved["kept"].items() if self.recorders else ():
            device = next(state.nets[name].parameters()).device
            self.recorders[name].kept = tree_map_only(Tensor, partial(Tensor.to, device=device), kept)


def rank_step(net: nn.Module, layers: list[UnitLayer], batches: list[Any], rate: float) -> None:
    """Move all trained parameters of `net` by `rate` along the gradient of the mean effective rank of the layers."""
    features: list[Tensor] = []

    def measure(layer: UnitLayer, reader: nn.Module, arguments: Any, keywords: Any) -> None:
        read = first_input(arguments, keywords)
        features.append(layer.samples(read, layer.outgoing[0][0], reader))

    def joined(first: Any, *others: Any) -> Any:
        return torch.cat([first, *others]) if isinstance(first, Tensor) else first

    with torch.enable_grad(), ExitStack() as hooks:
        for layer in layers:
            reader = net.get_submodule(layer.outgoing[0][0])
            hooks.enter_context(reader.register_forward_pre_hook(partial(measure, layer), with_kwargs=True))
        arguments, keywords = tree_map(joined, *batches)
        net(*arguments, **keywords)
        rank = torch.stack([effective_rank(each.float()) for each in features]).mean()
    trained = [p for p in net.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(rank, trained, allow_unused=True)
    moved = [(p, g) for p, g in zip(trained, gradients, strict=True) if g is not None]
    with torch.no_grad():
        torch._foreach_add_([p for p, _ in moved], [g for _, g in moved], alpha=rate)
