"""Singular values of the matrices of a checkpoint, one shard in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fire_core.checkpoints.files import Checkpoint
from fire_core.measure.metrics import deviation_from_isometry, effective_rank
from fire_core.targets import Target, TargetTable


@dataclass(frozen=True)
class Spectrum:
    """Summary of the singular values of one matrix, as stored.

    For a matrix with NaN or infinite weights, all numbers are NaN.

    Attributes:
        name: name of the target.
        shape: (out, in).
        norm: Frobenius norm.
        largest: largest singular value.
        median: median of the singular values (the lower one of two).
        smallest: smallest singular value.
        condition: largest / smallest, infinite if smallest is 0.
        effective_rank: see `fire_core.measure.metrics.effective_rank`; NaN for a zero matrix.
        dfi: see `fire_core.measure.metrics.deviation_from_isometry`.
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
    def of(cls, target: Target, matrix: torch.Tensor) -> Spectrum:
        """Return the summary of one matrix."""
        working = matrix.detach().float()
        finite = bool(torch.isfinite(working).all())
        values = torch.linalg.svdvals(working if finite else torch.zeros_like(working))
        values = values if finite else torch.full_like(values, torch.nan)
        largest, smallest = float(values[0]), float(values[-1])
        return cls(
            target.name,
            target.shape,
            float(values.square().sum().sqrt()),
            largest,
            float(values.median()),
            smallest,
            float("inf") if smallest == 0 else largest / smallest,
            float(effective_rank(values)),
            float(deviation_from_isometry(working)) if finite else float("nan"),
        )


def spectra(checkpoint: Checkpoint, table: TargetTable) -> Iterator[Spectrum]:
    """Yield the summary of every chosen matrix of an open checkpoint, shard by shard.

    Args:
        checkpoint: as `fire_core.checkpoints.files.open_checkpoint` returns it.
        table: its targets, as `fire_core.checkpoints.targets.targets_of` returns them.
    """
    for shard in checkpoint.shards:
        tensors, _ = shard.load()
        for target in table.included:
            if target.parameter in tensors:
                yield Spectrum.of(target, target.matrix(tensors))
