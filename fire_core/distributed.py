"""FIRE on models that several processes share: replicated (DDP) and sharded (FSDP2, any DTensor).

Every rank calls `project` with the same arguments. The parameters are dealt out to the ranks by cost; the owner of a
parameter projects it and the result goes to all, so replicas stay bit-equal and the work is divided by the world size.
Sharded parameters are gathered one at a time. A tall matrix cut along its rows is never gathered: its small Gram
matrix is summed over the ranks in one all-reduce, and each rank multiplies its own rows (Gram form).

FSDP1 (FullyShardedDataParallel) keeps flattened shards in which no matrix can be seen: `find_targets` refuses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fire_core.errors import UserError
from fire_core.fire import apply_to_targets, check_names, fire
from fire_core.gram_form import GramProjection, gram_projection
from fire_core.report import Report, Row
from fire_core.settings import check_settings
from fire_core.skeleton import skeleton
from fire_core.targets import Target, TargetTable, check_module, find_targets

Apply = Callable[[nn.Module, TargetTable], Report]


def is_sharded(model: nn.Module) -> bool:
    """True when a parameter of the model is a DTensor."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def project(
    model: nn.Module,
    *,
    targets: Any = "all",
    share: bool = True,
    gram_form: bool = True,
    check: bool = True,
    group: dist.ProcessGroup | None = None,
    **settings: Any,
) -> Report:
    """`fire` on a DDP model, a replicated plain model, or a model with DTensor parameters (FSDP2), in place.

    share: owners divide the work and send the result; False: every rank projects everything by itself (replicated
    models only). gram_form: tall matrices cut along their rows are projected without gathering. check: compare
    checksums of the replicated parameters over the ranks afterwards. group: the ranks that hold this model; by default
    those of the DTensor mesh, else all. settings: as for `fire`.

    Guarantee: the same result as `fire` on one process, up to rounding, and bit-equal replicas. In Gram form the
    solvers "exact" and "fast" both take the inverse square root of the Gram matrix in float64; matrices whose
    condition number is above 1e5 are gathered instead. Nothing is written unless every rank has finished its share.
    Collective: all ranks of the group must call it. Raises UserError, on every rank, where `fire` would on one.
    """
    check_settings(**settings)
    check_module(model)
    module = model.module if isinstance(model, DistributedDataParallel) else model
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            "no process group: call torch.distributed.init_process_group first, or fire() on one process"
        )
    table = targets if isinstance(targets, TargetTable) else find_targets(module, targets)
    sharded = is_sharded(module)
    if not share:
        if sharded:
            raise UserError(
                "share=False needs replicated parameters; DTensor parameters are projected by their owners"
            )
        report = fire(module, targets=table, **settings)
    else:

        def apply(tree: nn.Module, part: TargetTable) -> Report:
            return fire(tree, targets=part, **settings)

        use_gram = gram_form and settings.get("solver", "newton_schulz") in ("newton_schulz", "exact", "fast")
        report = share_out(module, table, apply, group=group, gram_settings=settings if use_gram else None)
    if check:
        assert_equal_replicas(module, sorted(report.changed), group)
    return report


def apply_to_sharded_targets(model: nn.Module, table: TargetTable, treatment: Any, **settings: Any) -> Report:
    """`fire_core.fire.apply_to_targets` for a model with DTensor parameters; owners share the work."""

    def apply(tree: nn.Module, part: TargetTable) -> Report:
        return apply_to_targets(tree, part, treatment, **settings)

    return share_out(model, table, apply)


@dataclass
class _Share:
    """What one rank computed: new full parameters, Gram projections and its own rows of theirs, report rows."""

    full: dict[str, Tensor]
    gram: dict[str, GramProjection]
    cut: dict[str, Tensor]
    rows: dict[str, Row]
    changed: set[str]
    error: str = ""
    method: str = ""


def share_out(
    model: nn.Module,
    table: TargetTable,
    apply: Apply,
    *,
    group: dist.ProcessGroup | None = None,
    gram_settings: Mapping[str, Any] | None = None,
) -> Report:
    """Deal the parameters out, let the owners `apply`, exchange errors and rows, then write on every rank."""
    started = time.perf_counter()
    parameters = dict(model.named_parameters())
    check_names(table.included, parameters)
    chosen: dict[str, list[Target]] = {}
    for target in table.included:
        chosen.setdefault(target.parameter, []).append(target)
    group = _group_of(parameters.values()) if group is None else group
    owners = _owners(chosen, dist.get_world_size(group))
    rank = dist.get_rank(group)
    share = _Share({}, {}, {}, {}, set())
    with torch.no_grad():
        for name, members in chosen.items():
            if gram_settings is not None and (found := _try_gram(parameters[name], members, gram_settings)):
                share.gram[name], share.cut[name] = found
                continue
            full = _full(parameters[name])
            if owners[name] == rank:
                share.full[name] = full.clone()
        _apply_share(share, chosen, apply)
        rows, changed, method = _exchange(share, group)
        for name in chosen:
            if name in share.gram:
                _local(parameters[name]).copy_(share.cut[name])
            elif name in changed:
                _write_full(parameters[name], share.full.get(name), owners[name], group)
    report = Report(
        method=method, changed=changed | {n for n, p in share.gram.items() if p.row.dfi_after is not None}
    )
    report.rows = [rows.get(t.name) or Row(t.name, t.parameter, t.shape, "skipped", t.reason) for t in table]
    report.seconds = time.perf_counter() - started
    return report


def assert_equal_replicas(model: nn.Module, names: list[str], group: dist.ProcessGroup | None = None) -> None:
    """Raises UserError on every rank when a replicated parameter is not bit-equal on all ranks. Collective."""
    parameters = dict(model.named_parameters())
    plain = [name for name in names if not isinstance(parameters[name], DTensor)]
    sums = [checksum(parameters[name]) for name in plain]
    everywhere: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everywhere, sums, group=group)
    differing = [name for i, name in enumerate(plain) if len({ranks[i] for ranks in everywhere}) > 1]
    if differing:
        raise UserError(
            f"parameters differ between ranks: {', '.join(differing[:5])} ({len(differing)} in all); broadcast the model "
            "from one rank, and use share=True"
        )


def checksum(tensor: Tensor) -> int:
    """A 64-bit number of the exact bits and their order: equal tensors give equal numbers on any device."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), 1 << 24):
        piece = flat[start : start + (1 << 24)].to(torch.int64)
        place = torch.arange(start, start + len(piece), device=flat.device)
        total += ((piece + 1) * (place * 0x9E3779B1 + 0x85EBCA6B)).sum()
    return int(total)


def _apply_share(share: _Share, chosen: Mapping[str, list[Target]], apply: Apply) -> None:
    """Treats the parameters this rank owns; a UserError is kept, so that all ranks can raise it together."""
    share.rows |= {projection.row.name: projection.row for projection in share.gram.values()}
    if not share.full:
        return
    try:
        tree = skeleton(share.full)
        report = apply(tree, TargetTable(t for name in share.full for t in chosen[name]))
    except UserError as error:
        share.error = str(error)
        return
    share.rows |= {row.name: row for row in report.rows}
    share.changed |= report.changed
    share.method = report.method


def _exchange(share: _Share, group: dist.ProcessGroup | None) -> tuple[dict[str, Row], set[str], str]:
    """Rows, changed parameters and the name of the method, of all ranks; raises on all what failed on any."""
    mine = (share.rows, share.changed, share.error, share.method)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    errors = list(dict.fromkeys(error for _, _, error, _ in everyone if error))
    if errors:
        raise UserError("; ".join(errors))
    rows: dict[str, Row] = {}
    changed: set[str] = set()
    for some_rows, some_changed, _, _ in everyone:
        rows |= some_rows
        changed |= some_changed
    return rows, changed, next((method for *_, method in everyone if method), "fire")


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


def _full(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _write_full(parameter: Tensor, new: Tensor | None, owner: int, group: dist.ProcessGroup | None) -> None:
    """The owner's value on every rank; each keeps its own part of it."""
    local = _local(parameter)
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=local.device) if new is None else new
    source = owner if group is None else dist.get_global_rank(group, owner)
    dist.broadcast(value, source, group=group)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def _try_gram(
    parameter: Tensor, members: list[Target], settings: Mapping[str, Any]
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
    projection = gram_projection(values, vectors, target, settings)
    if projection is None:
        return None
    rows = local.double() @ projection.factor
    working = torch.float64 if local.dtype == torch.float64 else torch.float32
    projection.measure(_summed_gram(rows.to(working), ranks))
    limit = settings.get("tolerance", 1e-8) * max(1.0, target.shape[1] / 768)
    if settings.get("solver") == "exact" and projection.scale is not None and projection.row.residual > limit:
        return None
    return projection, rows.to(local.dtype)


def _summed_gram(local: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """W^T W (n, n) in float64 of a matrix whose rows are spread over `ranks`, the same bits on all of them."""
    rows = local.double()
    gram = rows.mT @ rows
    dist.all_reduce(gram, group=ranks)
    dist.broadcast(gram, dist.get_global_rank(ranks, 0), group=ranks)
    return gram


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
