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


def treat_file(
    checkpoint: Checkpoint,
    table: TargetTable,
    output: str | Path | None,
    *,
    dry_run: bool = False,
    progress: Callable[[int], object] = lambda done: None,
    **settings: Any,
) -> Report:
    """Apply FIRE to the targets of a checkpoint, write it to `output` with all other content, and return the report.

    `checkpoint` itself holds the new weights afterwards. Optimizer state and copies of the weights in the file stay as they
    are, although they belong to the old weights.

    Args:
        table: the targets, as `fire_core.checkpoints.targets.targets_of` returns them.
        output: file of the same format, which must not exist; a safetensors file for a folder. None only in a dry run.
        dry_run: write nothing; the report says what would be done.
        progress: called with the number of matrices that are done.
        settings: as for `fire` (`FireSettings`).
    Raises: UserError for an output that cannot be written, and as `fire` does. There is no output then.
    """
    chosen, tensors = FireSettings.of(**settings), checkpoint.tensors
    if not dry_run:
        if output is None:
            raise UserError("no output is given: name a file to write, or ask for a dry run")
        checkpoint.check_output(Path(output))
    options: dict[str, Any] = {
        "degenerate": chosen.degenerate,
        "min_norm": chosen.min_norm,
        "dry_run": dry_run,
    }
    treatment = partial(project, settings=chosen)
    report, rows = Report(method="fire", dry_run=dry_run), dict[str, Row]()
    for name, group in groupby(table.included, key=lambda target: target.parameter):  # bounds the memory
        part_table, own = TargetTable(group), {name: tensors[name]}
        tied = _tied(part_table[0], tensors)
        part = treat_tensors(own, part_table, treatment, action="projected", method="fire", **options)
        for other in tied if part.changed else ():
            tensors[other].copy_(tensors[name])
        report.changed |= {name, *tied} if part.changed else set()
        report.seconds += part.seconds
        rows |= {row.name: row for row in part.rows}
        progress(len(rows))
    if output is not None and not dry_run:
        checkpoint.save(Path(output))
    skipped = {t.name: Row(t.name, t.parameter, t.shape, "skipped", t.reason) for t in table}
    report.rows.extend((skipped | rows).values())
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


def _tied(target: Target, tensors: dict[str, Tensor]) -> list[str]:
    """Return other names of the target's parameter in the file, where the model ties several names to it."""
    own, others = tensors[target.parameter], sorted({*target.aliases} & tensors.keys() - {target.parameter})
    if different := [name for name in others if not torch.equal(tensors[name], own)]:
        raise UserError(
            f"{target.parameter} and {different[0]} are tied in the model, but differ in the file: leave them out with "
            f"targets=-{target.parameter}"
        )
    return others
