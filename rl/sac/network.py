"""SimBa networks for soft actor-critic: a Gaussian policy and a stack of critics, whose weights are (critics, out, in).

As in SimBa (Lee et al., 2025, arXiv 2410.09754, section 4), the embedding and the output layers are orthogonal with gain 1,
residual blocks normalise before they transform, and hidden layers are He-normal truncated at two standard deviations.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.init import orthogonal_

LAYER_NORM_EPSILON = 1e-6
LOG_STD_MIN, LOG_STD_MAX = -10.0, 2.0
# Standard deviation of a unit normal truncated at two standard deviations; dividing by it restores the variance.
TRUNCATED_STD = 0.87962566103423978


def truncated_he_normal_(weight: Tensor) -> Tensor:
    """Fill `weight` (..., out, in) in place: variance 2 / in, normal truncated at two of its standard deviations."""
    std = math.sqrt(2.0 / weight.shape[-1]) / TRUNCATED_STD
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class StackedAffine(torch.autograd.Function):
    """x @ weight.mT + bias for every member of a stack: (stack, batch, in), (stack, out, in), (stack, out).

    The results equal those of `torch.baddbmm`. Its own backward pass returns the weight's gradient transposed, which
    the optimizer has to copy; here the gradient has the layout of the weight. Differentiable once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (for_x, for_weight, for_bias) = ctx.saved_tensors, ctx.needs_input_grad
        of_x = torch.bmm(gradient, weight) if for_x else None
        of_weight = torch.bmm(gradient.mT, x) if for_weight else None
        return of_x, of_weight, gradient.sum(dim=1) if for_bias else None


class StackedLinear(nn.Module):
    """`stack` independent affine maps: input (stack, batch, in) -> (stack, batch, out).

    Under autocast it runs in the lower precision like nn.Linear, unless `full_precision` is set.
    """

    stacked_matrices = True  # each slice is a matrix of its own
    full_precision = False

    def __init__(self, stack: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(stack, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(stack, outputs))

    def forward(self, x: Tensor) -> Tensor:
        device, inputs = x.device.type, (x, self.weight, self.bias)
        if not torch.is_autocast_enabled(device):
            return StackedAffine.apply(*inputs)
        precision = self.weight.dtype if self.full_precision else torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return StackedAffine.apply(*(each.to(precision) for each in inputs))


class StackedLayerNorm(nn.Module):
    """LayerNorm over the last axis, with one gain and bias per stack member: (stack, batch, width) -> same."""

    is_norm = True

    def __init__(self, stack: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(stack, width))
        self.bias = nn.Parameter(torch.zeros(stack, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPSILON)
        return torch.addcmul(self.bias.unsqueeze(1), normed, self.weight.unsqueeze(1))


def linear(inputs: int, outputs: int, stack: int | None, draw_: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a Linear (stack None) or StackedLinear with zero bias and weights from `draw_`, which alone draws numbers."""
    if stack is None:
        layer: Any = nn.Linear(inputs, outputs, device="meta").to_empty(device=torch.get_default_device())
    else:
        layer = StackedLinear(stack, inputs, outputs)
    with torch.no_grad():
        layer.bias.zero_()
        for matrix in layer.weight.view(-1, outputs, inputs):
            draw_(matrix)
    return layer


def layer_norm(width: int, stack: int | None) -> nn.Module:
    """Return a LayerNorm with SimBa's epsilon, stacked unless `stack` is None."""
    return nn.LayerNorm(width, eps=LAYER_NORM_EPSILON) if stack is None else StackedLayerNorm(stack, width)


class ResidualBlock(nn.Module):
    """x + contract(relu(expand(norm(x)))), expansion 4 (SimBa, figure 4)."""

    def __init__(self, width: int, stack: int | None):
        super().__init__()
        self.norm = layer_norm(width, stack)
        self.expand = linear(width, 4 * width, stack, truncated_he_normal_)
        self.relu = nn.ReLU()
        self.contract = linear(4 * width, width, stack, truncated_he_normal_)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.contract(self.relu(self.expand(self.norm(x))))


def hidden(width: int, blocks: int, norm: str, stack: int | None) -> list[nn.Module]:
    """Return the layers between embedding and output: residual blocks and a LayerNorm, or, where `norm` is "none", a plain
    network: a ReLU after the embedding and after one He-normal layer for each block."""
    if norm == "layer":
        return [*[ResidualBlock(width, stack) for _ in range(blocks)], layer_norm(width, stack)]
    layers: list[nn.Module] = [nn.ReLU()]
    for _ in range(blocks):
        layers += [linear(width, width, stack, truncated_he_normal_), nn.ReLU()]
    return layers


class GaussianHead(nn.Module):
    """Two affine maps side by side: features (batch, width) -> (batch, 2 * actions), mean then raw log-deviation.

    They keep the precision of their weights under autocast, because the entropy depends on small differences.
    """

    def __init__(self, width: int, actions: int):
        super().__init__()
        self.mean = linear(width, actions, None, orthogonal_)
        self.log_std = linear(width, actions, None, orthogonal_)
        self.mean.is_head = self.log_std.is_head = True

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(self.mean.weight.dtype)
            return torch.cat([self.mean(features), self.log_std(features)], dim=-1)


class Actor(nn.Module):
    """Squashed-Gaussian policy: normalised observations (batch, size) -> (mean, log_std), (batch, actions) each.

    `embed` is the encoder, `head` all that follows: the split of plasticity injection. A tanh maps log_std to [-10, 2].
    """

    def __init__(
        self, observations: int, actions: int, width: int = 128, blocks: int = 1, norm: str = "layer"
    ):
        super().__init__()
        self.embed = linear(observations, width, None, orthogonal_)
        self.head = nn.Sequential(*hidden(width, blocks, norm, None), GaussianHead(width, actions))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-deviation of the action before the tanh, (batch, actions) each."""
        mean, raw = self.head(self.embed(observations)).chunk(2, dim=-1)
        return mean, LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (1 + torch.tanh(raw))


class Critics(nn.Module):
    """`critics` independent action values: (..., batch, observations), (..., batch, actions) -> (..., critics, batch).

    Dimensions before the batch count agents, where one stack holds the critics of several (`rl.sac.stack`). The output
    layer keeps the precision of its weights under autocast: in bfloat16 a value of 80 has a resolution of half a unit.
    """

    def __init__(
        self,
        observations: int,
        actions: int,
        width: int = 512,
        blocks: int = 2,
        critics: int = 2,
        norm: str = "layer",
    ):
        super().__init__()
        self.critics = critics
        self.embed = linear(observations + actions, width, critics, orthogonal_)
        layers = hidden(width, blocks, norm, critics)
        self.head = nn.Sequential(*layers, linear(width, 1, critics, orthogonal_))
        self.head[-1].full_precision = self.head[-1].is_head = True

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        x = torch.cat([observations, actions], dim=-1).unsqueeze(-3)
        x = x.expand(*x.shape[:-3], self.critics, *x.shape[-2:])
        return self.head(self.embed(x.flatten(0, -3))).view(x.shape[:-1])


class Temperature(nn.Module):
    """The entropy coefficient alpha = exp(log_alpha), learned on the log scale and therefore always positive."""

    def __init__(self, initial: float = 0.01):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial)))

    def forward(self) -> Tensor:
        return self.log_alpha.exp()


def sample_action(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return a reparameterised tanh-Gaussian sample (batch, actions) in (-1, 1) and its log-density (batch,) in nats.

    All arguments are (batch, actions); `noise` is standard normal. The density correction log(1 - tanh(u)^2) is
    computed from the pre-squash sample u as 2 (log 2 - u - softplus(-2u)), which stays finite where tanh has saturated
    (Haarnoja et al. 2018, appendix C, in the stable form).
    """
    sample = mean + log_std.exp() * noise
    log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    correction = 2 * (math.log(2) - sample - F.softplus(-2 * sample))
    return torch.tanh(sample), (log_normal - correction).sum(dim=-1)
