"""Singular values of the matrices of a checkpoint, one shard in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fire_core.checkpoints.files import open_checkpoint
from fire_core.checkpoints.plan import plan
from fire_core.measure.metrics import deviation_from_isometry, effective_rank_of
from fire_core.targets import Target


@dataclass(frozen=True)
class Spectrum:
    """Singular values of one matrix, summed up. norm: Frobenius; dfi: of the smaller Gram matrix, as stored.

    All figures are NaN for a matrix with NaN or infinite weights, effective_rank also for a zero matrix.
    """

    name: str
    shape: tuple[int, ...]
    norm: float
    largest: float
    median: float
    smallest: float
    condition: float
    effective_rank: float
    dfi: float

    @classmethod
    def of(cls, target: Target, matrix: torch.Tensor) -> tuple[Spectrum, torch.Tensor]:
        """The row of one matrix, and its singular values, largest first; NaN where the matrix is not finite."""
        working = matrix.detach().float()
        finite = bool(torch.isfinite(working).all())
        values = torch.linalg.svdvals(working if finite else torch.zeros_like(working))
        values = values if finite else torch.full_like(values, torch.nan)
        largest, smallest = float(values[0]), float(values[-1])
        summary = cls(
            target.name,
            target.shape,
            float(values.square().sum().sqrt()),
            largest,
            float(values.median()),
            smallest,
            largest / smallest if smallest > 0 else float("inf"),
            float(effective_rank_of(values)),
            float(deviation_from_isometry(working)),
        )
        return summary, values

    def to_dict(self) -> dict[str, object]:
        """Plain values, the shape as text."""
        return {**asdict(self), "shape": "x".join(map(str, self.shape))}


def spectra(
    source: str | Path,
    *,
    targets: str | Sequence[str] = "all",
    model: str = "auto",
    key: str | None = None,
) -> Iterator[tuple[Spectrum, torch.Tensor]]:
    """(summary, singular values in falling order) of every chosen matrix of a checkpoint, shard by shard."""
    checkpoint = open_checkpoint(source, key)
    table, _ = plan(checkpoint, targets, model)
    for shard in checkpoint.shards:
        tensors, _ = shard.load()
        for target in table.included:
            if target.parameter in tensors:
                yield Spectrum.of(target, target.matrix(tensors))
