"""FIRE on checkpoint files, with one shard in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fire_core.checkpoints.files import Checkpoint, copy_others, new_checkpoint
from fire_core.engine import FireSettings, project, treat_tensors
from fire_core.errors import UserError
from fire_core.report import Report, Row
from fire_core.targets import Target, TargetTable

CHUNK_WEIGHTS = 1 << 26


def treat_file(
    checkpoint: Checkpoint,
    table: TargetTable,
    output: str | Path | None,
    *,
    dry_run: bool = False,
    progress: Callable[[int], object] = lambda count: None,
    **settings: Any,
) -> Report:
    """Apply FIRE to the targets of a checkpoint, write it to `output` with all other content, and return the report.

    The output is written completely or not at all. Optimizer state in the file is kept, although it belongs to the old
    weights: clear it.

    Args:
        checkpoint: as `fire_core.checkpoints.files.open_checkpoint` returns it.
        table: its targets, as `fire_core.checkpoints.targets.targets_of` returns them.
        output: file or folder of the same form, which must not exist; None only in a dry run.
        dry_run: write nothing; the report says what would be done.
        progress: called with the number of matrices treated since its last call.
        settings: as for `fire` (`FireSettings`).
    Raises: UserError for files that cannot be read or written, and as `fire` does.
    """
    if output is None and not dry_run:
        raise UserError("no output is given: name a file or folder to write, or ask for a dry run")
    fire_settings = FireSettings.of(**settings)
    done: dict[str, Row] = {}
    changed: set[str] = set()
    seconds = 0.0
    writing = nullcontext() if output is None or dry_run else new_checkpoint(Path(output), checkpoint)
    with writing as place:
        for shard in checkpoint.shards:
            tensors, content = shard.load()
            for group in _groups([t for t in table.included if t.parameter in tensors]):
                copies = _copies(group, tensors, {*tensors, *checkpoint.index})
                part = treat_tensors(
                    tensors,
                    TargetTable(group),
                    partial(project, settings=fire_settings),
                    action="projected",
                    method="fire",
                    degenerate=fire_settings.degenerate,
                    min_norm=fire_settings.min_norm,
                    dry_run=dry_run,
                )
                for copy, own in copies.items() if not dry_run else ():
                    tensors[copy].copy_(tensors[own])
                    changed.add(copy)
                changed |= part.changed
                seconds += part.seconds
                done |= {row.name: row for row in part.rows}
                del part  # frees the tensors of this shard
                progress(len(group))
            if place is not None:
                shard.save(place / shard.path.name if checkpoint.is_folder else place, tensors, content)
        if place is not None:
            copy_others(checkpoint, place)
    rows = [done.get(t.name) or Row(t.name, t.parameter, t.shape, "skipped", t.reason) for t in table]
    return Report(rows, changed, seconds=seconds, method="fire", dry_run=dry_run)


def _copies(targets: list[Target], tensors: Mapping[str, Tensor], names: set[str]) -> dict[str, str]:
    """Return {name of a copy: parameter to treat} for tied weights that are stored twice. names: all in the checkpoint.

    Raises UserError if a copy differs, or lies in another shard than the parameter.
    """
    copies = {}
    for target in targets:
        own = tensors[target.parameter]
        for name in sorted({*target.aliases} & names - {target.parameter}):
            if name in tensors and tensors[name].data_ptr() == own.data_ptr():
                continue
            if name not in tensors or not torch.equal(tensors[name], own):
                raise UserError(
                    f"{target.parameter} and {name} are tied in the model, but differ in the file or lie in two shards: "
                    f"leave them out with targets=-{target.parameter}"
                )
            copies[name] = target.parameter
    return copies


def _groups(targets: list[Target]) -> Iterator[list[Target]]:
    """Yield groups of targets of bounded size, sorted by shape, so that equal shapes are treated in one stack."""
    group: list[Target] = []
    weights = 0
    for target in sorted(targets, key=lambda t: t.shape):
        size = target.shape[0] * target.shape[1]
        if group and weights + size > CHUNK_WEIGHTS:
            yield group
            group, weights = [], 0
        group.append(target)
        weights += size
    if group:
        yield group
