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
    def of(cls, target: Target, matrix: torch.Tensor) -> tuple[Spectrum, torch.Tensor]:
        """Return the summary of one matrix, and its singular values (k,), largest first; NaN if it is not finite."""
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
            float("inf") if smallest == 0 else largest / smallest,
            float(effective_rank_of(values)),
            float(deviation_from_isometry(working)) if finite else float("nan"),
        )
        return summary, values

    def to_dict(self) -> dict[str, object]:
        """Return the fields as a dict of plain values, with the shape as text."""
        return {**asdict(self), "shape": "x".join(map(str, self.shape))}


def spectra(
    source: str | Path,
    *,
    targets: str | Sequence[str] = "all",
    model: str = "auto",
    key: str | None = None,
) -> Iterator[tuple[Spectrum, torch.Tensor]]:
    """Yield (summary, singular values) of every chosen matrix of a checkpoint, shard by shard.

    The singular values (k,) are float32, largest first. Arguments and errors are those of
    `fire_core.checkpoints.apply.apply`.
    """
    checkpoint = open_checkpoint(source, key)
    table, _ = plan(checkpoint, targets, model)
    for shard in checkpoint.shards:
        tensors, _ = shard.load()
        for target in table.included:
            if target.parameter in tensors:
                yield Spectrum.of(target, target.matrix(tensors))
