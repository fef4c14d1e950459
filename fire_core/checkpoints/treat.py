"""FIRE on the weights of a checkpoint, and their singular values."""

from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fire_core.checkpoints.files import Checkpoint
from fire_core.engine import Treated, treat_tensors
from fire_core.errors import UserError
from fire_core.measure.metrics import deviation_from_isometry, effective_rank
from fire_core.projection import FireSettings, project
from fire_core.report import Report
from fire_core.targets import Target, TargetTable


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
    if output is not None:
        checkpoint.check_output(Path(output))
    copies = _stored_again(table, tensors)
    done = 0

    def treatment(stack: Tensor, group: list[Target]) -> Treated:
        nonlocal done
        treated = project(stack, group, chosen)
        done += len(group)
        progress(done)
        return treated

    report = treat_tensors(
        tensors,
        table,
        treatment,
        action="projected",
        method="fire",
        degenerate=chosen.degenerate,
        min_norm=chosen.min_norm,
        dry_run=output is None,
    )
    if output is not None:
        for copy, name in copies.items():
            tensors[copy].copy_(tensors[name])
        report.changed |= {copy for copy, name in copies.items() if name in report.changed}
        checkpoint.save(Path(output))
    return report


def spectra(checkpoint: Checkpoint, table: TargetTable) -> Iterator[dict[str, object]]:
    """Yield a summary of the singular values of every chosen matrix of an open checkpoint, with its table of targets.

    Its keys are name, shape (out, in), and floats of the matrix as stored: norm (Frobenius), largest, median (the lower
    one of two) and smallest singular value, condition (infinite if smallest is 0), and effective_rank and dfi as in
    `fire_core.measure.metrics`. For a matrix with NaN or infinite weights, all of these are NaN.
    """
    for target in table.included:
        matrix = target.matrix(checkpoint.tensors).detach().double()
        values = torch.linalg.svdvals(matrix.nan_to_num(0.0, 0.0, 0.0))
        largest, median, smallest = (float(value) for value in (values[0], values.median(), values[-1]))
        figures = {
            "norm": float(values.norm()),
            "largest": largest,
            "median": median,
            "smallest": smallest,
            "condition": inf if smallest == 0 else largest / smallest,
            "effective_rank": float(effective_rank(values)),
            "dfi": float(deviation_from_isometry(matrix)),
        }
        if not bool(matrix.isfinite().all()):
            figures = dict.fromkeys(figures, nan)
        yield {"name": target.name, "shape": target.shape, **figures}


def _stored_again(table: TargetTable, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return {name in the file: name of the target's parameter} of the other copies of weights that the model ties."""
    copies: dict[str, str] = {}
    for target in table.included:
        for name in sorted({*target.aliases} & tensors.keys() - {target.parameter}):
            if not torch.equal(tensors[name], tensors[target.parameter]):
                raise UserError(
                    f"{target.parameter} and {name} are tied in the model, but differ in the file: exclude them with "
                    f"-{target.parameter}"
                )
            copies[name] = target.parameter
    return copies
