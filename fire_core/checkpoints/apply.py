"""FIRE on checkpoint files, with one shard in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fire_core.checkpoints.files import copy_others, new_checkpoint, open_checkpoint
from fire_core.checkpoints.plan import plan
from fire_core.engine import apply as apply_treatment
from fire_core.projection import engine_options, treatment
from fire_core.report import Report, Row
from fire_core.settings import FireSettings
from fire_core.targets import Target, TargetTable

Progress = Callable[[int], object]
CHUNK_WEIGHTS = 1 << 26


def apply(
    source: str | Path,
    output: str | Path,
    *,
    targets: str | Sequence[str] = "all",
    model: str = "auto",
    key: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Report:
    """Apply FIRE to the weights of `source`, write them to `output` with all other content, and return the report.

    The output is written completely or not at all. Optimizer state in the file is kept, although it belongs to the old
    weights: clear it.

    Args:
        source: safetensors or torch file, or a Hugging Face folder.
        output: file or folder of the same form, which must not exist.
        targets: preset, pattern, or list of them, as for `find_targets`.
        model: where the target matrices are read from: "auto", "none" or "package.module:callable"
            (see `fire_core.checkpoints.plan.plan`).
        key: dotted path to the weights inside a torch file.
        progress: called with the number of matrices treated since the last call.
        settings: as for `fire` (`FireSettings`).
    Raises: UserError for files that cannot be read or written, and as `fire` and `find_targets` do.
    """
    checkpoint = open_checkpoint(source, key)
    table, _ = plan(checkpoint, targets, model)
    fire_settings = FireSettings.of(**settings)
    changed: set[str] = set()
    seconds = 0.0
    done: dict[str, Row] = {}
    with new_checkpoint(Path(output), checkpoint) as place:
        for shard in checkpoint.shards:
            tensors, content = shard.load()
            for group in _groups([t for t in table.included if t.parameter in tensors]):
                part = apply_treatment(
                    tensors, TargetTable(group), treatment(fire_settings), **engine_options(fire_settings)
                )
                changed |= part.changed
                seconds += part.seconds
                done |= {row.name: row for row in part.rows}
                del part  # frees the tensors of this shard
                if progress is not None:
                    progress(len(group))
            shard.save(place / shard.path.name if checkpoint.is_folder else place, tensors, content)
        if checkpoint.is_folder:
            copy_others(checkpoint, place)
    rows = [done.get(t.name) or Row(t.name, t.parameter, t.shape, "skipped", t.reason) for t in table]
    return Report(rows, changed, seconds=seconds, method="fire")


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
