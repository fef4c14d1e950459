"""FIRE on the weights of a checkpoint, and their singular values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fire_core.checkpoints.files import Checkpoint
from fire_core.engine import FireSettings, project, treat_tensors
from fire_core.errors import UserError
from fire_core.measure.metrics import deviation_from_isometry, effective_rank
from fire_core.report import Report, Row
from fire_core.targets import Target, TargetTable

LARGE = 1 << 20


def treat_file(
    checkpoint: Checkpoint,
    table: TargetTable,
    output: str | Path | None,
    *,
    progress: Callable[[int], object] = lambda done: None,
    **settings: Any,
) -> Report:
    """Apply FIRE to the targets of a checkpoint, write it to `output` with all other content, and return the report.

    `checkpoint` itself holds the new weights afterwards. Optimizer state and copies of the weights in the file stay as they
    are, although they belong to the old weights.

    Args:
        table: the targets, as `fire_core.checkpoints.targets.targets_of` returns them.
        output: file of the same format, which must not exist; a safetensors file for a folder. With None, nothing is
            changed or written, and the report says what would be done.
        progress: called with the number of matrices that are done.
        settings: as for `fire` (`FireSettings`).
    Raises: UserError for an output that cannot be written, and as `fire` does. There is no output then.
    """
    chosen, tensors = FireSettings.of(**settings), checkpoint.tensors
    options: dict[str, Any] = {"degenerate": chosen.degenerate, "min_norm": chosen.min_norm}
    treatment = partial(project, settings=chosen)
    if output is not None:
        checkpoint.check_output(Path(output))
    action = {"unclear": "left out"}
    rows = {t.name: Row(t.name, t.parameter, t.shape, action.get(t.kind, "skipped"), t.reason) for t in table}
    report, done = Report(method="fire", dry_run=output is None), 0
    for _, group in groupby(sorted(table.included, key=_stack), key=_stack):
        targets = TargetTable(group)
        own = {target.parameter: tensors[target.parameter] for target in targets}
        tied = {other: name for name in own for other in _tied(name, targets, tensors)}
        part = treat_tensors(own, targets, treatment, action="projected", dry_run=output is None, **options)
        for other, name in tied.items() if output is not None else ():
            tensors[other].copy_(tensors[name])
        report.changed |= part.changed | {other for other, name in tied.items() if name in part.changed}
        report.seconds += part.seconds
        rows |= {row.name: row for row in part.rows}
        done += len(targets)
        progress(done)
    if output is not None:
        checkpoint.save(Path(output))
    report.rows.extend(rows.values())
    return report


def spectra(checkpoint: Checkpoint, table: TargetTable) -> Iterator[dict[str, object]]:
    """Yield a summary of the singular values of every chosen matrix of an open checkpoint, with its table of targets.

    Its keys are name, shape (out, in), and floats of the matrix as stored: norm (Frobenius), largest, median (the lower
    one of two) and smallest singular value, condition (infinite if smallest is 0), and effective_rank and dfi as in
    `fire_core.measure.metrics`. For a matrix with NaN or infinite weights, all of these are NaN.
    """
    for target in table.included:
        matrix = target.matrix(checkpoint.tensors).detach().double()
        peak = float(matrix.abs().max()) or 1.0
        finite = peak < inf
        # divided by the largest entry, so that no square overflows
        values = torch.linalg.svdvals(matrix / peak if finite else torch.zeros_like(matrix))
        largest, median, smallest = (float(value) for value in (values[0], values.median(), values[-1]))
        figures = {
            "norm": float(values.norm()) * peak,
            "largest": largest * peak,
            "median": median * peak,
            "smallest": smallest * peak,
            "condition": inf if smallest == 0 else largest / smallest,
            "effective_rank": float(effective_rank(values)),
            "dfi": float(deviation_from_isometry(matrix)),
        }
        yield {
            "name": target.name,
            "shape": target.shape,
            **(figures if finite else dict.fromkeys(figures, nan)),
        }


def _stack(target: Target) -> tuple[tuple[int, ...], str]:
    """Return the key of matrices that are treated together: those of one shape; large ones parameter by parameter."""
    return target.shape, target.parameter if target.shape[0] * target.shape[1] > LARGE else ""


def _tied(own: str, targets: list[Target], tensors: dict[str, Tensor]) -> list[str]:
    """Return other names of a parameter in the file, where the model ties several names to it."""
    aliases = {name for target in targets if target.parameter == own for name in target.aliases}
    others = sorted(aliases & tensors.keys() - {own})
    if different := [name for name in others if not torch.equal(tensors[name], tensors[own])]:
        raise UserError(
            f"{own} and {different[0]} are tied in the model, but differ in the file: exclude them with -{own}"
        )
    return others
