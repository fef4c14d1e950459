"""Singular values of the matrices of a checkpoint, one shard in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fire_core.checkpoints.files import Checkpoint
from fire_core.measure.metrics import deviation_from_isometry, effective_rank
from fire_core.targets import TargetTable


def spectra(checkpoint: Checkpoint, table: TargetTable) -> Iterator[dict[str, object]]:
    """Yield a summary of the singular values of every chosen matrix of an open checkpoint, shard by shard.

    Its keys are name, shape (out, in), and floats of the matrix as stored: norm (Frobenius), largest, median (the lower
    one of two) and smallest singular value, condition (infinite if smallest is 0), and effective_rank and dfi as in
    `fire_core.measure.metrics`. For a matrix with NaN or infinite weights, all of these are NaN.

    Args:
        checkpoint: as `fire_core.checkpoints.files.open_checkpoint` returns it.
        table: its targets, as `fire_core.checkpoints.targets.targets_of` returns them.
    """
    for shard in checkpoint.shards:
        tensors, _ = shard.load()
        for target in table.included:
            if target.parameter in tensors:
                figures = _figures(target.matrix(tensors).detach().float())
                yield {"name": target.name, "shape": target.shape, **figures}


def _figures(matrix: Tensor) -> dict[str, float]:
    finite = bool(torch.isfinite(matrix).all())
    values = torch.linalg.svdvals(matrix if finite else torch.zeros_like(matrix))
    values = values if finite else torch.full_like(values, torch.nan)
    largest, smallest = float(values[0]), float(values[-1])
    return {
        "norm": float(values.double().square().sum().sqrt()),
        "largest": largest,
        "median": float(values.median()),
        "smallest": smallest,
        "condition": float("inf") if smallest == 0 else largest / smallest,
        "effective_rank": float(effective_rank(values)),
        "dfi": float(deviation_from_isometry(matrix)) if finite else float("nan"),
    }
