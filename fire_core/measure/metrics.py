"""Plasticity and stability, measured: pure functions on tensors.

Legend: W weight matrix (out, in); Q orthogonal factor; H feature matrix (samples, units); I identity.
Everything is computed in full float32 (float64 stays float64), whatever autocast and the TF32 switches say, and
returned as a tensor on the input's device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fire_core.errors import UserError
from fire_core.solvers.precision import matmul_precision


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def in_full_precision(metric: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`metric`, a function of a tensor first, outside of autocast and without TF32."""

    @wraps(metric)
    def computed(first: Tensor, *others: Any, **options: Any) -> Tensor:
        with matmul_precision(first.device, "fp32"):
            return metric(first, *others, **options)

    return computed


def deviation_from_isometry(matrix: Tensor) -> Tensor:
    """DfI, squared Frobenius distance of the smaller Gram matrix to the identity, `||W^T W - I||_F^2` (FIRE, Eq. 2).

    The smaller Gram is taken because the larger one of an m x n matrix has at most min(m, n) unit eigenvalues, so its
    DfI can never be below `|m - n|`.

    Args:
        matrix: (..., m, n).
    Returns: (...), 0 exactly for semi-orthogonal matrices; no unit.
    """
    return deviation_of_gram(smaller_gram(matrix))


@in_full_precision
def smaller_gram(matrix: Tensor) -> Tensor:
    """W^T W of matrices (..., m, n) with m >= n, else W W^T."""
    w = _float(matrix)
    return w.mT @ w if w.shape[-2] >= w.shape[-1] else w @ w.mT


def deviation_of_gram(gram: Tensor) -> Tensor:
    """||G - I||_F^2 of Gram matrices (..., n, n), whose diagonals are overwritten."""
    gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    return gram.square().sum(dim=(-2, -1))


def squared_frobenius_error(matrix: Tensor, other: Tensor) -> Tensor:
    """SFE, squared distance between two weights, `||W - W'||_F^2` over the last two dimensions (FIRE, Eq. 1)."""
    return (_float(matrix) - _float(other)).square().sum(dim=(-2, -1))


def relative_squared_error(before: Tensor, after: Tensor, initial: Tensor) -> Tensor:
    """SFE(before, after) / SFE(before, initial): distance moved, in units of what a full reset would move.

    NaN where the weight still has its initial value.
    """
    reset = squared_frobenius_error(before, initial).double()
    return torch.where(reset > 0, squared_frobenius_error(before, after) / reset, torch.nan)


def stable_rank(matrix: Tensor) -> Tensor:
    """`||W||_F^2 / ||W||_2^2`, between 1 and min(m, n); shape (..., m, n) -> (...). Undefined (NaN) for zero."""
    w = _float(matrix)
    return w.square().sum(dim=(-2, -1)) / torch.linalg.matrix_norm(w, ord=2).square()


def effective_rank(matrix: Tensor) -> Tensor:
    """exp of the entropy of the normalised singular values (Roy & Vetterli 2007), between 1 and min(m, n).

    Args:
        matrix: (..., m, n). Returns: (...). Undefined (NaN) for a zero matrix.
    """
    return effective_rank_of(torch.linalg.svdvals(_float(matrix)))


def effective_rank_of(singular: Tensor) -> Tensor:
    """`effective_rank` from singular values (..., k)."""
    share = singular / singular.sum(dim=-1, keepdim=True)
    return torch.exp(torch.special.entr(share).sum(dim=-1))


def feature_rank(features: Tensor, delta: float = 0.01) -> Tensor:
    """srank_delta: least k whose top k singular values hold 1 - delta of their sum (Kumar et al. 2021; FIRE, Thm 3).

    Args:
        features: H (samples, units).
        delta: share of the spectrum left out, in (0, 1).
    Returns: integer scalar, between 1 and min(samples, units); 0 for all-zero features.
    """
    if not 0.0 < delta < 1.0:
        raise UserError(f"feature_rank: delta={delta} is outside (0, 1)")
    singular = torch.linalg.svdvals(_float(features))
    total = singular.sum()
    reached = singular.cumsum(0) >= (1.0 - delta) * total
    return torch.where(total > 0, reached.int().argmax() + 1, 0)


@in_full_precision
def covariance_shift(features: Tensor, other: Tensor) -> Tensor:
    """||C - C'||_F^2 with C = H H^T / ||H||_F^2, the normalised sample Gram matrix (FIRE, Thm 1). In [0, 2].

    Args:
        features, other: (samples, units) of the same samples before and after a change; units may differ.
    """
    h, g = _float(features), _float(other)
    return (h @ h.mT / h.square().sum() - g @ g.mT / g.square().sum()).square().sum()


def hessian_norm(
    loss: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    *,
    iterations: int = 30,
    generator: torch.Generator,
) -> Tensor:
    """Largest absolute eigenvalue of the loss Hessian by power iteration on Hessian-vector products.

    A lower bound that grows to the value with the iterations; not exact where the two largest magnitudes are close.

    Args:
        loss: closure that returns a scalar, differentiable twice.
        parameters: leaves to differentiate by.
        generator: CPU generator of the starting vector.
    """
    leaves = [p for p in parameters if p.requires_grad]
    gradients = torch.autograd.grad(loss(), leaves, create_graph=True)
    vector = [torch.randn(p.shape, generator=generator).to(p) for p in leaves]
    eigenvalue = torch.zeros(())
    for _ in range(iterations):
        norm = torch.stack([(v * v).sum() for v in vector]).sum().sqrt()
        vector = [v / norm.clamp_min(torch.finfo(v.dtype).tiny) for v in vector]
        product = torch.autograd.grad(gradients, leaves, grad_outputs=vector, retain_graph=True)
        eigenvalue = torch.stack([(v * h).sum() for v, h in zip(vector, product, strict=True)]).sum()
        vector = [h.detach() for h in product]
    return eigenvalue.abs()
