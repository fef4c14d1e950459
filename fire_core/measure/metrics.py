"""Measures of plasticity and stability: pure functions on tensors.

Symbols: W is a weight matrix (out, in), H a feature matrix (samples, units), I the identity. All measures return a
tensor on the input's device, and compute in full float32 (float64 for float64 input), whatever autocast and TF32 are set to.
"""

import torch
from torch import Tensor

from fire_core.errors import UserError
from fire_core.solvers.polar import deviations


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def deviation_from_isometry(matrix: Tensor) -> Tensor:
    """Return the DfI: squared Frobenius distance of the smaller Gram matrix to I, `||W^T W - I||_F^2` (FIRE, Eq. 2).

    The larger Gram matrix of an m x n matrix has at most min(m, n) nonzero eigenvalues: its DfI would be `|m - n|` or more.

    Args:
        matrix: (..., m, n).
    Returns: (...), without unit; 0 only for semi-orthogonal matrices.
    """
    return deviations(_float(matrix))[0]


def relative_squared_error(before: Tensor, after: Tensor, initial: Tensor) -> Tensor:
    """Return SFE(before, after) / SFE(before, initial): 1 for a change as large as a full reset.

    SFE is the squared Frobenius error of two weights, `||W - W'||_F^2` (FIRE, Eq. 1).
    All weights are (..., m, n), the result is (...), float64. It is NaN where `before` equals `initial`.
    """
    change, reset = ((_float(before) - _float(w)).square().sum(dim=(-2, -1)) for w in (after, initial))
    return torch.where(reset > 0, change / reset.double(), torch.nan)


def effective_rank(singular: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return exp of the entropy of the normalised singular values (Roy & Vetterli 2007).

    Args:
        singular: (..., k), of matrices (..., m, n) with k = min(m, n).
        epsilon: is added in the logarithm, and a smaller sum counts as so much, so that gradients are finite.
    Returns: (...), between 1 and k; NaN for a zero matrix without `epsilon`.
    """
    share = singular / singular.sum(dim=-1, keepdim=True).clamp_min(epsilon)
    entropies = -share * torch.log(share + epsilon) if epsilon else torch.special.entr(share)
    return torch.exp(entropies.sum(dim=-1))


def feature_rank(features: Tensor, delta: float = 0.01) -> Tensor:
    """Return srank_delta: the smallest k whose top k singular values reach 1 - delta of the sum of all.

    Source: Kumar et al. 2021; FIRE, Theorem 3.

    Args:
        features: H (samples, units). delta: share of the spectrum left out, in (0, 1).
    Returns: integer scalar, between 1 and min(samples, units); 0 for all-zero features.
    Raises: UserError if delta is outside (0, 1), and for features that are empty or not finite.
    """
    if not 0.0 < delta < 1.0:
        raise UserError(f"feature_rank: delta={delta} is outside (0, 1)")
    if not features.numel() or not features.isfinite().all():
        problem = "hold NaN or infinity: the net has diverged" if features.numel() else "are empty"
        raise UserError(f"feature_rank: features of shape {tuple(features.shape)} {problem}")
    singular = torch.linalg.svdvals(_float(features))
    sums = singular.cumsum(0)
    reached = sums >= (1.0 - delta) * sums[-1]
    return torch.where(sums[-1] > 0, reached.int().argmax() + 1, 0)
