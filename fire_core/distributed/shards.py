"""A treatment of parameters that several processes share: replicated (DDP) and sharded (FSDP2, any DTensor).

Every rank calls `share_out` with the same arguments. The parameters are dealt out to the ranks by cost; the owner of a
parameter treats it and the result goes to all, so replicas stay bit-equal and the work is divided by the world size.
Sharded parameters are gathered one at a time. A tall matrix cut along its rows is never gathered: its small Gram
matrix is summed over the ranks in one all-reduce, and each rank multiplies its own rows (Gram form).

FSDP1 (FullyShardedDataParallel) keeps flattened shards in which no matrix can be seen: `find_targets` refuses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fire_core.distributed.gram_form import GramProjection
from fire_core.engine import Treatment, apply, check_targets
from fire_core.errors import UserError
from fire_core.report import Report, Row
from fire_core.targets import Target, TargetTable

# every rank has the whole value already; below torch 2.7 it is sent once more, which cannot be switched off
_SILENTLY: dict[str, Any] = (
    {"src_data_rank": None} if "src_data_rank" in signature(distribute_tensor).parameters else {}
)
GramTreatment = Callable[[Tensor, Tensor, Target], GramProjection | None]


@dataclass
class _Share:
    """What one rank computed: new full parameters, Gram projections and its own rows of theirs, report rows."""

    full: dict[str, Tensor] = field(default_factory=dict)
    gram: dict[str, GramProjection] = field(default_factory=dict)
    cut: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    error: Exception | None = None


def share_out(
    parameters: Mapping[str, Tensor],
    table: TargetTable,
    treatment: Treatment,
    *,
    gram: GramTreatment | None = None,
    group: dist.ProcessGroup | None = None,
    dry_run: bool = False,
    **options: Any,
) -> Report:
    """`fire_core.engine.apply` by all ranks of `group` together (by default those of the DTensor mesh, else all).

    gram: the same treatment from the eigenvalues and eigenvectors of a Gram matrix, for tall matrices cut along their
    rows, which are then not gathered; None where it does not serve. Matrices whose condition number is above 1e5 are
    gathered in any case. options: as for `apply`.

    Guarantee: the same result as on one process, up to rounding, and bit-equal replicas. Replicas that differ before are
    an error. An error on any rank, of any kind, is raised on all of them, and nothing is written then. Collective.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            "no process group: call torch.distributed.init_process_group first, or treat the model on one process"
        )
    started = time.perf_counter()
    check_targets(table.included, parameters)
    chosen: dict[str, list[Target]] = {}
    for target in table.included:
        chosen.setdefault(target.parameter, []).append(target)
    group = _group_of(parameters.values()) if group is None else group
    check_replicas(parameters, list(chosen), group)
    owners = _owners(chosen, dist.get_world_size(group))
    rank = dist.get_rank(group)
    share = _Share()
    with torch.no_grad():
        for name, members in chosen.items():
            if gram is not None and (found := _try_gram(parameters[name], members, gram)):
                share.gram[name], share.cut[name] = found
                continue
            full = _full(parameters[name])
            if owners[name] == rank:
                share.full[name] = full.clone()
        _treat_share(share, chosen, treatment, options)
        rows, changed = _exchange(share, group)
        changed |= set(share.gram)
        for name in chosen if not dry_run else ():
            if name in share.gram:
                _local(parameters[name]).copy_(share.cut[name])
            elif name in changed:
                _write_full(parameters[name], share.full.get(name), owners[name], group)
    changed = set() if dry_run else changed
    return Report(
        [rows.get(t.name) or Row(t.name, t.parameter, t.shape, "skipped", t.reason) for t in table],
        changed,
        parameters=[parameters[name] for name in parameters if name in changed],
        seconds=time.perf_counter() - started,
        method=options.get("method", ""),
        dry_run=dry_run,
    )


def check_replicas(
    parameters: Mapping[str, Tensor], names: list[str], group: dist.ProcessGroup | None = None
) -> None:
    """Raises UserError on every rank when a replicated parameter is not bit-equal on all ranks. Collective."""
    plain = [name for name in names if not isinstance(parameters[name], DTensor)]
    sums = [checksum(parameters[name]) for name in plain]
    everywhere: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everywhere, sums, group=group)
    differing = [name for i, name in enumerate(plain) if len({ranks[i] for ranks in everywhere}) > 1]
    if differing:
        raise UserError(
            f"parameters differ between ranks: {', '.join(differing[:5])} ({len(differing)} in all), and nothing was "
            "changed; broadcast the model from one rank first"
        )


CHECKSUM_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """A 64-bit number of the exact bits and, in blocks of rows, of their order: equal tensors give equal numbers.

    Sums of the words read as integers, which is one pass at the speed of memory; each of up to 64 pieces counts with a
    weight of its own, and so does every second word.
    """
    words = tensor.detach().contiguous().reshape(-1).view(CHECKSUM_WORDS[tensor.element_size()])
    pieces = [part.sum(dtype=torch.int64) for piece in words.tensor_split(64) for part in (piece, piece[::2])]
    sums, total = torch.stack(pieces).view(64, 2).tolist(), 0
    for place, (whole, even) in enumerate(sums, start=1):
        total = (total * 0x9E3779B1 + place * whole + 0x85EBCA6B * even) % 2**64
    return total


def _treat_share(
    share: _Share, chosen: Mapping[str, list[Target]], treatment: Treatment, options: Mapping[str, Any]
) -> None:
    """Treats the parameters that this rank owns; an exception is kept, so that all ranks can raise it together."""
    share.rows |= {projection.row.name: projection.row for projection in share.gram.values()}
    if not share.full:
        return
    try:
        report = apply(
            share.full, TargetTable(t for name in share.full for t in chosen[name]), treatment, **options
        )
        share.rows |= {row.name: row for row in report.rows}
        share.changed |= report.changed
    except Exception as error:
        share.error = error


def _exchange(share: _Share, group: dist.ProcessGroup | None) -> tuple[dict[str, Row], set[str]]:
    """Rows and changed parameters of all ranks; raises on all what failed on any."""
    error = share.error
    expected = isinstance(error, UserError)
    text = "" if error is None else str(error) if expected else f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (share.rows, share.changed, text, expected), group=group)
    texts = {
        text if expected else f"rank {rank}: {text}": expected
        for rank, (_, _, text, expected) in enumerate(everyone)
        if text
    }
    if texts:
        kind = UserError if all(texts.values()) else RuntimeError
        raise kind("; ".join(texts)) from error
    rows: dict[str, Row] = {}
    changed: set[str] = set()
    for some_rows, some_changed, _, _ in everyone:
        rows |= some_rows
        changed |= some_changed
    return rows, changed


def _owners(chosen: Mapping[str, list[Target]], world: int) -> dict[str, int]:
    """Rank of each parameter: the dearest first, each to the rank with the least work so far."""
    cost = {
        name: sum(t.shape[0] * t.shape[1] * min(t.shape) for t in members) for name, members in chosen.items()
    }
    load, owners = [0] * world, {}
    for name in sorted(cost, key=lambda n: (-cost[n], n)):
        owners[name] = min(range(world), key=load.__getitem__)
        load[owners[name]] += cost[name]
    return owners


def _group_of(parameters: Any) -> dist.ProcessGroup | None:
    """The ranks that hold the model: those of its mesh, or all (None)."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            if mesh.size() == dist.get_world_size():
                return None
            if mesh.ndim == 1:
                return mesh.get_group()
            raise UserError(
                f"the model's mesh has {mesh.size()} of {dist.get_world_size()} ranks in {mesh.ndim} dimensions: give "
                "group, the process group of exactly those ranks"
            )
    return None


class Gathered(Mapping[str, Tensor]):
    """Mapping that gathers each parameter from its shards when it is accessed. All ranks must access it together."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters

    def __getitem__(self, name: str) -> Tensor:
        return _full(self._parameters[name]).detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def cut(value: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has whole, in the type, on the device and in the shards of the DTensor `like`."""
    assert isinstance(like, DTensor)
    whole = value.to(like.to_local().device, like.dtype)
    return distribute_tensor(whole, like.device_mesh, like.placements, **_SILENTLY)


def _full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _write_full(parameter: Tensor, new: Tensor | None, owner: int, group: dist.ProcessGroup | None) -> None:
    """The owner's value on every rank; each keeps its own part of it."""
    local = _local(parameter)
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device) if new is None else new
    source = owner if group is None else dist.get_global_rank(group, owner)
    dist.broadcast(value, source, group=group)
    parameter.copy_(cut(value, parameter) if isinstance(parameter, DTensor) else value)


def _try_gram(
    parameter: Tensor, members: list[Target], gram_treatment: GramTreatment
) -> tuple[GramProjection, Tensor] | None:
    """The projection of a whole, tall matrix cut along its rows, and this rank's rows of the result.

    From the sum of the ranks' Gram matrices; None where that does not serve, or where the result misses the
    tolerance of "exact", which the Gram matrix of the result tells.
    """
    if not isinstance(parameter, DTensor) or len(members) != 1 or members[0].index:
        return None
    target = members[0]
    cuts = [(i, p) for i, p in enumerate(parameter.placements) if not isinstance(p, Replicate)]
    if len(cuts) != 1 or type(cuts[0][1]) is not Shard or cuts[0][1].dim != 0:
        return None
    if target.transposed or parameter.dim() != 2 or target.shape[0] < 2 * target.shape[1]:
        return None
    ranks = parameter.device_mesh.get_group(cuts[0][0])
    local = parameter.to_local()
    gram = _summed_gram(local, ranks)
    values, vectors = torch.linalg.eigh(torch.where(torch.isfinite(gram).all(), gram, -torch.ones_like(gram)))
    for shared in (values, vectors):
        dist.broadcast(shared, dist.get_global_rank(ranks, 0), group=ranks)
    projection = gram_treatment(values, vectors, target)
    if projection is None:
        return None
    rows = local.double() @ projection.factor
    working = torch.float64 if local.dtype == torch.float64 else torch.float32
    projection.measure(_summed_gram(rows.to(working), ranks))
    return None if projection.misses_its_limit() else (projection, rows.to(local.dtype))


def _summed_gram(local: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """W^T W (n, n) in float64 of a matrix whose rows are spread over `ranks`, the same bits on all of them."""
    rows = local.double()
    gram = rows.mT @ rows
    dist.all_reduce(gram, group=ranks)
    dist.broadcast(gram, dist.get_global_rank(ranks, 0), group=ranks)
    return gram


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
