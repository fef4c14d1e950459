"""Plasticity of a whole net on a fixed batch: dormant units, feature rank, weight norm, isometry, curvature."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fire_core.measure.dormancy import THRESHOLD, dormancy_of
from fire_core.measure.metrics import deviation_from_isometry, feature_rank
from fire_core.passes import arguments_of, call, in_mode, placed
from fire_core.targets import list_targets


@torch.no_grad()
def plasticity(net: nn.Module, inputs: Any) -> dict[str, float]:
    """Run `inputs` through `net` in evaluation mode and return measures of its plasticity; the mode is restored.

    Only trained layers are measured: layers with frozen weights, and activations that follow one, are left out (the old
    heads of plasticity injection, a frozen backbone). A net whose parameters are all frozen is measured as a whole.

    Args:
        inputs: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
    Returns: a dict, without the measures that the net does not define (no nonlinearity, no Linear).

    - "dormant_share": share of hidden units with dormancy score <= 0.025, in [0, 1] (ReDo, Definition 3.1).
    - "unmeasured": number of hidden layers left out there, because their units are mixed before they are read (if any).
    - "feature_rank": srank_0.01 of the input of the Linear that runs last (Kumar et al. 2021).
    - "weight_norm": Frobenius norm of all measured parameters together.
    - "dfi": mean deviation from isometry of the target matrices as stored.
    """
    parameters = dict(net.named_parameters())
    all_frozen = not any(p.requires_grad for p in parameters.values())
    trained = [p for p in parameters.values() if p.requires_grad or all_frozen]

    def counted(module: nn.Module | None) -> bool:
        return module is None or all_frozen or any(p.requires_grad for p in module.parameters())

    with in_mode(net, training=False):
        scores, unmeasured, features = dormancy_of(net, inputs, counted)
    figures: dict[str, float | Tensor] = {}
    if trained:
        figures["weight_norm"] = _norm(trained)
    if scores:
        figures["dormant_share"] = (torch.cat(scores) <= THRESHOLD).float().mean()
    if unmeasured:
        figures["unmeasured"] = unmeasured
    if features is not None:
        figures["feature_rank"] = feature_rank(features)
    if deviations := [deviation_from_isometry(t.matrix(parameters)) for t in list_targets(net).included]:
        figures["dfi"] = torch.stack(deviations).mean()
    return {name: float(value) for name, value in figures.items()}


def relative_gradient(
    net: nn.Module, inputs: Any, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> float:
    """Return the gradient norm of `loss(net(inputs), targets)` for the trained weights, divided by the weights' norm.

    The net is in evaluation mode meanwhile. Stored gradients are not changed.
    """
    trained = [p for p in net.parameters() if p.requires_grad]
    with in_mode(net, training=False), torch.enable_grad():
        value = loss(call(net, inputs), placed(net, targets))
        gradients = torch.autograd.grad(value, trained, allow_unused=True)
    return relative_norm([g for g in gradients if g is not None], trained)


def relative_norm(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the Frobenius norm of all `tensors` together, divided by that of all `others`."""
    return float(_norm(tensors) / _norm(others))


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([t.detach().abs().float().square().sum() for t in tensors]).sum().sqrt()


def curvature(
    net: nn.Module,
    inputs: Any,
    targets: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    generator: torch.Generator,
    iterations: int = 30,
) -> float:
    """Return the largest absolute eigenvalue of the Hessian of `loss(net(inputs), targets)` (FIRE, Fig. 5b).

    The Hessian is with respect to all trained parameters that the loss depends on. Power iteration gives a lower bound,
    which approaches the eigenvalue slowly where the two largest magnitudes are close. The net stays in its present mode: in
    training mode, batch norm uses the statistics of the batch. Weights, buffers and gradients are not changed. Cost: about
    2 * `iterations` backward passes, and the memory of one graph that is kept.

    Args:
        inputs: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
        loss: function of the net's output and `targets` that returns a scalar, twice differentiable.
        generator: of the starting vector, on the CPU. iterations: number of Hessian-vector products.
    """
    state = dict(net.named_parameters()) | {name: buffer.clone() for name, buffer in net.named_buffers()}
    trained = [p for p in net.parameters() if p.requires_grad]
    (arguments, keywords), targets = placed(net, arguments_of(inputs)), placed(net, targets)
    # the fused forms of attention have no second derivative
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        value = loss(functional_call(net, state, arguments, keywords), targets)
        found = torch.autograd.grad(value, trained, create_graph=True, allow_unused=True)
        pairs = [(p, g) for p, g in zip(trained, found, strict=True) if g is not None and g.requires_grad]
        if not pairs:  # linear in all weights
            return 0.0
        leaves, gradients = zip(*pairs, strict=True)
        vector = [torch.randn(p.shape, generator=generator, device="cpu").to(p) for p in leaves]
        eigenvalue = torch.zeros(())
        for _ in range(iterations):
            norm = torch.stack([(v * v).sum() for v in vector]).sum().sqrt()
            vector = [v / norm.clamp_min(torch.finfo(v.dtype).tiny) for v in vector]
            turned = torch.autograd.grad(gradients, leaves, vector, retain_graph=True, materialize_grads=True)
            eigenvalue = torch.stack([(v * h).sum() for v, h in zip(vector, turned, strict=True)]).sum()
            vector = [h.detach() for h in turned]
        return float(eigenvalue.abs())
