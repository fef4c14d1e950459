"""Plasticity of a whole net, measured on a fixed batch: dormant units, feature rank, weight norm, isometry, curvature."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fire_core.metrics import deviation_from_isometry, dormancy_scores, feature_rank, hessian_norm
from fire_core.modes import in_mode
from fire_core.targets import list_targets

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU, nn.ELU)


@torch.no_grad()
def plasticity(
    net: nn.Module, inputs: Tensor, *, threshold: float = 0.025, delta: float = 0.01
) -> dict[str, float]:
    """Run `inputs` through `net` in evaluation mode and measure; hooks and mode are restored afterwards.

    Only what can learn is looked at: layers with frozen weights, and activations that follow one, are left out (the old
    heads of plasticity injection, a frozen backbone). A net whose parameters are all frozen is measured as a whole.

    Returns:
        dormant_share: units of the activation modules with dormancy score <= threshold (ReDo), 0..1.
        feature_rank: srank_delta of the input of the last Linear (Kumar et al. 2021).
        weight_norm: Frobenius norm of the parameters.
        dfi: mean deviation from isometry of the target matrices as stored.
        A figure that the net does not define (no activation module, no Linear) is left out.
    """
    scores: list[Tensor] = []
    features: list[Tensor] = []
    all_frozen = not _learns(net)
    linears = [m for m in net.modules() if isinstance(m, nn.Linear) and (all_frozen or _learns(m))]
    latest: list[nn.Module] = []  # the layer with a weight matrix or kernel that ran last

    def score(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        layer = latest[-1] if latest else None
        if layer is None or all_frozen or _learns(layer):
            scores.append(dormancy_scores(_units(output, layer)))

    with ExitStack() as hooks:
        for module in net.modules():
            if isinstance(module, ACTIVATIONS):
                hooks.callback(module.register_forward_hook(score).remove)
            elif isinstance(weight := getattr(module, "weight", None), Tensor) and weight.ndim > 1:
                handle = module.register_forward_hook(lambda m, i, o: latest.append(m))
                hooks.callback(handle.remove)
        if linears:
            handle = linears[-1].register_forward_hook(lambda m, i, o: features.append(i[0]))
            hooks.callback(handle.remove)
        hooks.enter_context(in_mode(net, training=False))
        net(inputs)
    figures: dict[str, Tensor] = {}
    parameters = dict(net.named_parameters())
    if parameters:
        counted = [p for p in parameters.values() if all_frozen or p.requires_grad]
        squares = [p.float().square().sum() for p in counted]
        figures["weight_norm"] = torch.stack(squares).sum().sqrt()
    if scores:
        figures["dormant_share"] = (torch.cat(scores) <= threshold).float().mean()
    if features:
        figures["feature_rank"] = feature_rank(features[0].flatten(0, -2), delta)
    deviations = [deviation_from_isometry(t.matrix(parameters)) for t in list_targets(net).included]
    if deviations:
        figures["dfi"] = torch.stack(deviations).mean()
    return {name: float(value) for name, value in figures.items()}


def _learns(module: nn.Module) -> bool:
    """Whether any of its parameters is trained."""
    return any(p.requires_grad for p in module.parameters())


def _units(activations: Tensor, layer: nn.Module | None) -> Tensor:
    """Activations with the units in dimension 1, where a convolution has them; told by `layer`, which ran before.

    Where the sizes do not fit `layer`, three dimensions are (batch, tokens, units), others (batch, units, ...).
    """
    first, last = getattr(layer, "out_channels", None), getattr(layer, "out_features", None)
    if activations.ndim > 2 and first == activations.shape[1]:
        return activations
    units_last = activations.ndim == 3 or last == activations.shape[-1]
    return activations.flatten(0, -2) if units_last and activations.ndim > 2 else activations


def curvature(
    net: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    generator: torch.Generator,
    iterations: int = 30,
) -> float:
    """Largest absolute eigenvalue of the Hessian of `loss(net(inputs), targets)` by all weights (FIRE, Fig. 5b).

    In the mode the net is in: in training mode batch norm uses the batch, as the coming steps will. Weights, buffers
    and gradients are left as they are. See `hessian_norm` for the error; costs about 2 * `iterations` backward passes
    and the memory of one backward pass that is kept.
    """
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    parameters = dict(net.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the fused forms of attention have no second derivative
        return float(
            hessian_norm(
                lambda: loss(functional_call(net, parameters | buffers, (inputs,)), targets),
                parameters.values(),
                iterations=iterations,
                generator=generator,
            )
        )
