"""Running mean and variance of observations, in float64 (SimBa's observation normalisation)."""

import numpy as np
import torch
from torch import Tensor

from harness.transfer import send

EPSILON = 1e-8


class RunningNormaliser:
    """Mean and (population) variance per coordinate of all observations seen.

    Starts from mean 0, variance 1 and a count of 1e-4, which the first observations outweigh at once. Nothing is clipped, so
    an unbounded coordinate (the position of a walking robot) grows slowly. Source: SimBa, section 4, and its code.
    """

    def __init__(self, size: int):
        self.mean = np.zeros(size)
        self.variance = np.ones(size)
        self.count = 1e-4

    def update(self, observations: np.ndarray) -> None:
        """Merge observations (n, size) or one (size,) by the parallel formula of Chan et al. (1979)."""
        batch = np.asarray(observations, dtype=np.float64).reshape(-1, self.mean.size)
        count, mean, variance = len(batch), batch.mean(axis=0), batch.var(axis=0)
        total = self.count + count
        delta = mean - self.mean
        between = np.square(delta) * (self.count * count / total)
        self.variance = (self.variance * self.count + variance * count + between) / total
        self.mean, self.count = self.mean + delta * (count / total), total

    def affine(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return (mean, 1 / deviation), float32 (size,) on `device`; (x - mean) * inverse is the normalised x."""
        both = np.stack([self.mean, 1.0 / np.sqrt(self.variance + EPSILON)])
        mean, inverse = send(torch.from_numpy(both.astype(np.float32)), device)
        return mean, inverse

    def normalise(self, observations: np.ndarray) -> np.ndarray:
        """Return float32 (x - mean) / sqrt(variance + 1e-8) of observations (..., size), without updating."""
        return ((observations - self.mean) / np.sqrt(self.variance + EPSILON)).astype(np.float32)

    def state_dict(self) -> dict:
        """Return the statistics as plain tensors and numbers."""
        return {
            "mean": torch.from_numpy(self.mean.copy()),
            "variance": torch.from_numpy(self.variance.copy()),
            "count": self.count,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        self.mean = state["mean"].numpy().copy()
        self.variance = state["variance"].numpy().copy()
        self.count = float(state["count"])
