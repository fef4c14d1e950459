"""FIRE on checkpoint files, and a look at their spectra: one shard in memory at a time, no model code run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fire_core.checkpoint_files import Checkpoint, copy_the_rest, open_checkpoint, written_aside
from fire_core.errors import UserError
from fire_core.fire import fire
from fire_core.metrics import deviation_from_isometry
from fire_core.report import Report, Row
from fire_core.skeleton import skeleton
from fire_core.targets import Target, TargetTable, choose, list_targets

Progress = Callable[[int], object]
CHUNK_WEIGHTS = 1 << 26


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
        share = values / values.sum()
        largest, smallest = float(values[0]), float(values[-1])
        summary = cls(
            target.name,
            target.shape,
            float(values.square().sum().sqrt()),
            largest,
            float(values.median()),
            smallest,
            largest / smallest if smallest > 0 else float("inf"),
            float(torch.special.entr(share).sum().exp()),
            float(deviation_from_isometry(working)),
        )
        return summary, values

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "shape": "x".join(map(str, self.shape))}


def plan(
    checkpoint: Checkpoint, targets: str | Sequence[str] = "all", model: str = "auto"
) -> tuple[TargetTable, str]:
    """The targets of a checkpoint, and one line on where they were read from.

    model: "auto" (a folder's config.json, if transformers can build that architecture), "none" (names and shapes
    only), or "package.module:callable", which is called without arguments and gives the module (no memory is used).
    """
    outline = checkpoint.outline()
    rows = list_targets(skeleton(outline))
    architecture, source = _architecture(checkpoint, model)
    if architecture is not None:
        known = _renamed(list_targets(architecture), architecture, outline)
        named = {name for target in known for name in (target.parameter, *target.aliases)}
        if model != "auto" and not known:
            raise UserError(f"no parameter of {model} has the name and shape of one in {checkpoint.path}")
        share = f"{len({t.parameter for t in known})} of {len(outline)} tensors"
        source = f"targets from {source} for {share}, else from names and shapes"
        rows = TargetTable([*known, *(target for target in rows if target.parameter not in named)])
    try:
        return choose(rows, targets, str(checkpoint.path)), source
    except UserError as error:
        raise UserError(f"{error} ({source})") from None


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
    """FIRE on the weights of `source`, written to `output`, which must not exist; all other content is kept.

    settings: as for `fire` (solver, iterations, normalize, scale, strength, degenerate, tolerance, precision). The
    output appears whole or not at all. Optimizer state in the file is kept and describes the old weights: clear it.
    progress: called with the number of matrices done. Raises UserError as `fire` and `plan` do.
    """
    checkpoint = open_checkpoint(source, key)
    table, _ = plan(checkpoint, targets, model)
    report = Report(method="fire")
    done: dict[str, Any] = {}
    with written_aside(Path(output), checkpoint) as place:
        for shard in checkpoint.shards:
            tensors, content = shard.load()
            tree = skeleton(tensors)
            for group in _groups([t for t in table.included if t.parameter in tensors]):
                part = fire(tree, targets=TargetTable(group), **settings)
                report.changed |= part.changed
                report.seconds += part.seconds
                done |= {row.name: row for row in part.rows}
                if progress is not None:
                    progress(len(group))
            shard.save(place / shard.path.name if checkpoint.is_folder else place, tensors, content)
        if checkpoint.is_folder:
            copy_the_rest(checkpoint, place)
    report.rows = [done.get(t.name) or Row(t.name, t.parameter, t.shape, "skipped", t.reason) for t in table]
    return report


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


def build(model: str) -> nn.Module:
    """The module that "package.module:callable" makes, on the meta device: shapes and names, no memory."""
    where, _, name = model.partition(":")
    try:
        factory = getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"model={model!r} cannot be imported ({error}): give package.module:callable"
        ) from error
    try:
        with torch.device("meta"):
            module = factory()
    except TypeError as error:
        raise UserError(
            f"model={model!r} cannot be called without arguments ({error}): name a function that can"
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(f"model={model!r} made a {type(module).__name__}, not a torch module")
    return module


def _architecture(checkpoint: Checkpoint, model: str) -> tuple[nn.Module | None, str]:
    by_name = "targets from names and shapes"
    if model == "none" or (model == "auto" and not (checkpoint.path / "config.json").exists()):
        return None, by_name
    if model != "auto":
        return build(model), model
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=False
        )
        name = (config.architectures or ["?"])[0]
        with torch.device("meta"):
            return getattr(transformers, name)(config), name
    except Exception as error:
        why = str(error).strip().splitlines() or [""]
        return None, f"{by_name} (its config.json could not be built: {type(error).__name__}: {why[0][:120]})"


def _renamed(table: TargetTable, model: nn.Module, outline: dict[str, torch.Tensor]) -> TargetTable:
    """Rows whose parameter is in the file with the same shape, under the name it has there."""
    rows = TargetTable()
    for target in table:
        shape = model.get_parameter(target.parameter).shape
        found = [n for n in (target.parameter, *target.aliases) if n in outline and outline[n].shape == shape]
        if found:
            rows.append(replace(target, parameter=found[0], aliases=(target.parameter, *target.aliases)))
    return rows


def _groups(targets: list[Target]) -> Iterator[list[Target]]:
    """Runs of targets of bounded size; one shape stays together, so that it is treated in one stack."""
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
