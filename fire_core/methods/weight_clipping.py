"""Weight clipping: no weight may leave a multiple of the range from which it was drawn."""

from dataclasses import dataclass

import torch
from torch import nn

from fire_core.errors import check_settings
from fire_core.methods.method import FIXTURE, Method, Views, register
from fire_core.state import State


@torch.no_grad()
def clip_weights(model: nn.Module, factor: float, weights: Views) -> None:
    """Clamp each of the `weights` (see `find_weights`) and the bias beside it to [-factor * s, factor * s], in place.

    s = 1 / sqrt(fan_in) is the bound of PyTorch's default initialisation, for the bias too; the fan_in of a transposed
    convolution is PyTorch's, its outputs times its taps.
    """
    parameters = dict(model.named_parameters())
    for key, view in weights.items():
        weight, bias = parameters[key], parameters.get(view.bias)
        transposed_convolution = view.transposed and not view.stacked and weight.ndim > 2
        inputs = weight[0].numel() if transposed_convolution else view.matrices(weight).shape[-1]
        limit = factor * inputs**-0.5
        weight.clamp_(-limit, limit)
        if bias is not None and bias.requires_grad:
            bias.clamp_(-limit, limit)


@register
@dataclass
class WeightClipping(Method):
    """Calls `clip_weights` after every optimizer step.

    factor: the paper's kappa. Its value there depends on the task, from 1 to 5 with ReLU; the default is ours.

    The authors' code takes the gains and biases of a norm layer for biases of the weight before it, and clamps them too.
    Its `clip_last_layer=False` is targets=no_head. Networks that are drawn from another distribution are clipped to the
    range of PyTorch's default all the same. Cost: one pass over the weights per step.
    """

    factor: float = 2.0
    targets: str | list[str] = "all"

    name = "weight_clipping"
    summary = "weights clipped to a multiple of their initial range after every step"
    source = "Elsayed et al. 2024 (arXiv 2407.01704)"
    proven_by = FIXTURE
    off = {"factor": 1e30}

    def __post_init__(self) -> None:
        check_settings(self, factor="(0, inf)")

    def after_step(self, state: State) -> None:
        for net in state.nets.values():
            clip_weights(net, self.factor, self.weights(net))
