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
from fire_core.measure.metrics import effective_rank
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

    `checkpoint` holds the new weights afterwards. Optimizer state and copies of the weights in the file stay.

    Args:
        table: the targets, as `fire_core.checkpoints.targets.targets_of` returns them.
        output: a new file of the same format, safetensors for a folder; None writes and changes nothing.
        progress: called with the number of matrices that are done.
        settings: as for `fire` (`FireSettings`).
    Raises: UserError for an output that cannot be written, and as `fire` does. There is no output then.
    """
    chosen, tensors, done = FireSettings.of(**settings), checkpoint.tensors, 0
    if output is not None:
        checkpoint.check_output(Path(output))
    # of weights that the model ties: name of another copy in the file -> name of the target's parameter
    copies = {n: t.parameter for t in table.included for n in t.aliases if n in tensors and n != t.parameter}
    for copy, name in copies.items():
        if not torch.equal(tensors[copy], tensors[name]):
            raise UserError(f"{name} and {copy} are tied in the model, but differ in the file: use -{name}")

    def treatment(stack: Tensor, group: list[Target]) -> Treated:
        nonlocal done
        treated = project(stack, group, chosen)
        done += len(group)
        progress(done)
        return treated

    checks: Any = {"degenerate": chosen.degenerate, "min_norm": chosen.min_norm, "dry_run": output is None}
    report = treat_tensors(tensors, table, treatment, action="projected", method="fire", **checks)
    if output is not None:
        for copy, name in copies.items():
            tensors[copy].copy_(tensors[name])
        report.changed |= {copy for copy, name in copies.items() if name in report.changed}
        checkpoint.save(Path(output))
    return report


def spectra(checkpoint: Checkpoint, table: TargetTable) -> Iterator[dict[str, object]]:
    """Yield a summary of the singular values of every chosen matrix of an open checkpoint, with its table of targets.

    Its keys are name, shape (out, in), and floats of the matrix as stored: norm (Frobenius), largest, median (the lower
    of two) and smallest singular value, condition, effective_rank and dfi. All are NaN for NaN or infinite weights.
    """
    for target in table.included:
        matrix = target.matrix(checkpoint.tensors).detach().double()
        s = torch.linalg.svdvals(matrix) if matrix.isfinite().all() else matrix.flatten() * nan
        figures = {"norm": s.norm(), "largest": s[0], "median": s.median(), "smallest": s[-1]}
        figures["condition"] = s[0] / s[-1] if s[-1] != 0 else torch.tensor(inf)
        figures |= {"effective_rank": effective_rank(s), "dfi": (s.square() - 1).square().sum()}
        yield {"name": target.name, "shape": target.shape, **{key: f.item() for key, f in figures.items()}}
