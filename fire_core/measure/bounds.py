"""Bounds of the FIRE paper's theorems, for comparison with measurements (Han et al. 2026, Theorems 1 to 4).

The theorems are about feed-forward nets without biases, H_l = sigma(H_{l-1} W_l^T), W_l (out, in), with 1-Lipschitz
activations. `deviation` is a DfI. Theorems 3 and 4 hold only if it is below 1; otherwise their bounds are None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from fire_core.measure.metrics import smaller_gram, squared_frobenius_error


def deviation_up_to_scale(matrix: Tensor) -> Tensor:
    """Return the smallest DfI (...) of any multiple of `matrix` (..., m, n); NaN for a zero matrix.

    Theorems 3 and 4 do not depend on the scale of W, so this deviation gives their tightest bounds.
    """
    gram = smaller_gram(matrix)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    return (gram.shape[-1] - trace.square() / gram.square().sum(dim=(-2, -1))).clamp_min(0.0)


def covariance_bounds(
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    inputs: Tensor,
    features: Sequence[Tensor],
    other: Sequence[Tensor],
) -> list[float]:
    """Return upper bounds on the `covariance_shift` of each layer's features between two nets (Theorem 1).

    Args:
        before, after: weights of the layers of the two nets, first layer first.
        inputs: Z (samples, units).
        features, other: outputs (samples, units) of the layers of the two nets for these inputs.
    Returns: one bound per layer, not finite if its features are all zero.
    """
    bounds, norms, inverse, error = [], 1.0, 0.0, 0.0
    for w, v, h, g in zip(before, after, features, other, strict=True):
        largest = float(max(torch.linalg.matrix_norm(w, 2), torch.linalg.matrix_norm(v, 2)))
        norms *= largest**2
        inverse += largest**-2
        error += float(squared_frobenius_error(w, v))
        smallest = float(min(h.norm(), g.norm())) ** 2
        scale = 16 * float(inputs.norm()) ** 2 / smallest if smallest > 0 else math.inf
        bounds.append(scale * norms * inverse * error)
    return bounds


def curvature_bound(
    deviations: Sequence[float], hessian: float, gradient: float, input_variance: float = 1.0
) -> float:
    """Return an upper bound on the spectral norm of the loss Hessian with respect to all weights (Theorem 2).

    Args:
        deviations: DfI of each layer.
        hessian: largest norm, over the samples, of the second derivative of the loss with respect to the output.
        gradient: largest norm, over the samples, of the first derivative.
        input_variance: largest eigenvalue of Z^T Z / n; 1 for whitened inputs, as in the paper.
    """
    norms = [1 + math.sqrt(deviation) for deviation in deviations]

    def product_without(*left_out: int) -> float:
        return math.prod(norm for place, norm in enumerate(norms) if place not in left_out)

    first = sum(product_without(k) for k in range(len(norms)))
    second = sum(product_without(k, j) for k, j in combinations(range(len(norms)), 2))
    return input_variance * hessian * first + 2 * math.sqrt(input_variance) * gradient * second


def rank_bound(deviation: float, eigenvalues: Tensor, delta: float = 0.01) -> int | None:
    """Return a lower bound on the `feature_rank` of Z W^T, or None without one (Theorem 3).

    Args:
        deviation: DfI of W.
        eigenvalues: positive eigenvalues (k,) of Q^T Z^T Z Q / n, where Q is the polar factor of W^T.
        delta: share of the spectrum that `feature_rank` leaves out.
    """
    if not deviation < 1 or not len(eigenvalues):
        return None
    spread = _spread(deviation) * math.sqrt(float(eigenvalues.max() / eigenvalues.min()))
    return math.ceil((1 - delta) * len(eigenvalues) / (delta * spread + 1 - delta))


def activity_bound(deviation: float) -> float | None:
    """Return an upper bound on a unit's mean activity relative to its layer's mean, or None without one (Theorem 4).

    The inputs are Gaussian. The inverse of the bound is a lower bound on the same ratio.
    """
    return _spread(deviation) if deviation < 1 else None


def _spread(deviation: float) -> float:
    epsilon = math.sqrt(deviation)
    return math.sqrt((1 + epsilon) / (1 - epsilon))
