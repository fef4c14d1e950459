"""Matrices of known spectrum, and what float64 says of them, for the tests of the polar factor."""

import torch
from torch import Tensor


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal entries, float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_spectrum(rows: int, columns: int, singular: Tensor, seed: int = 0) -> Tensor:
    """A float32 matrix with random singular vectors and the given singular values."""
    left, _, right = torch.linalg.svd(gaussian(rows, columns, seed=seed).double(), full_matrices=False)
    return ((left * singular.double()) @ right).float()


def spread(columns: int, decades: float) -> Tensor:
    """Singular values from 1 down to 10^-decades, evenly in the logarithm."""
    return torch.logspace(0, -decades, columns, dtype=torch.float64)


def oracle(matrices: Tensor) -> Tensor:
    """U V^T by float64 SVD."""
    left, _, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    return left @ right


def relative_error(factors: Tensor, matrices: Tensor) -> Tensor:
    """||Q - U V^T||_F / sqrt(min(m, n)) per matrix."""
    return torch.linalg.matrix_norm(factors.double() - oracle(matrices)) / min(matrices.shape[-2:]) ** 0.5


def deviation(factors: Tensor) -> Tensor:
    """||Q^T Q - I||_F^2 on the smaller side, in float64."""
    tall = (factors if factors.shape[-2] >= factors.shape[-1] else factors.mT).double()
    return (tall.mT @ tall - torch.eye(tall.shape[-1], dtype=torch.float64)).square().sum(dim=(-2, -1))
