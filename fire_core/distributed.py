"""A treatment of parameters that several processes share: replicated (DDP) and sharded (FSDP2, any DTensor).

The parameters are divided among the ranks by cost. The owner of a parameter treats it and sends the result to all ranks,
so replicas stay bit-equal and the work is divided by the world size. Sharded parameters are gathered one at a time.
"""

import math
import time
import zlib
from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fire_core.engine import Treatment, check_targets, rows_of, treat_tensors
from fire_core.errors import UserError
from fire_core.report import Report, Row
from fire_core.targets import Target, TargetTable

# every rank already has the whole value; torch below 2.7 sends it again, which cannot be switched off
_SILENTLY: dict[str, Any] = (
    {"src_data_rank": None} if "src_data_rank" in signature(distribute_tensor).parameters else {}
)


def share_out(
    parameters: Mapping[str, Tensor],
    table: TargetTable,
    treatment: Treatment,
    *,
    group: dist.ProcessGroup | None = None,
    dry_run: bool = False,
    **options: Any,
) -> Report:
    """Run `fire_core.engine.treat_tensors` on all ranks of `group` together and return the report. Collective.

    The result is that of one process up to rounding, and replicas are bit-equal. If the treatment fails on any rank,
    with any exception, all ranks raise an error and nothing is written.

    Args:
        group: by default the ranks of the DTensor mesh, or all if there is none. dry_run: write nothing.
        options: as for `treat_tensors`.
    Raises: UserError for invalid targets, and for replicas that differ between ranks.
    """
    started = time.perf_counter()
    check_targets(table.included, parameters)
    chosen: dict[str, list[Target]] = {}
    for target in table.included:
        chosen.setdefault(target.parameter, []).append(target)
    group = _group_of(parameters.values()) if group is None else group
    _check_replicas({name: parameters[name] for name in chosen}, group)
    owners, rank = _owners(chosen, dist.get_world_size(group)), dist.get_rank(group)
    owned: dict[str, Tensor] = {}
    report, error = Report(), None
    with torch.no_grad():
        for name in chosen:
            full: Any = parameters[name]
            full = full.full_tensor() if isinstance(full, DTensor) else full.detach()
            if owners[name] == rank:
                owned[name] = full.clone()
        try:
            if owned:
                mine = TargetTable(t for name in owned for t in chosen[name])
                report = treat_tensors(owned, mine, treatment, **options)
        except Exception as caught:  # all ranks raise it together
            error = caught
        rows, changed = _exchange(report, error, group)
        for name in chosen if not dry_run else ():
            if name in changed:
                _write_full(parameters[name], owned.get(name), owners[name], group)
    changed = set() if dry_run else changed
    return Report(
        [rows.get(row.name, row) for row in rows_of(table, {}, [], "")],
        changed,
        parameters=[parameters[name] for name in parameters if name in changed],
        seconds=time.perf_counter() - started,
        method=options.get("method", ""),
        dry_run=dry_run,
        total=sum(p.numel() for p in parameters.values()),
    )


def _check_replicas(parameters: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Raise UserError on every rank if a replicated parameter is not bit-equal on all ranks. Collective."""
    plain = {name: p.detach() for name, p in parameters.items() if not isinstance(p, DTensor)}
    bits = (value.cpu().contiguous().reshape(-1).view(torch.uint8) for value in plain.values())
    sums = [zlib.crc32(each.numpy().data) for each in bits]
    everywhere: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everywhere, sums, group=group)
    if differing := [name for name, *ranks in zip(plain, *everywhere, strict=True) if len(set(ranks)) > 1]:
        wrong = f"parameters differ between ranks: {', '.join(differing[:5])} ({len(differing)} in all)"
        raise UserError(f"{wrong}, and nothing was changed; broadcast the model from one rank first")


def _exchange(
    report: Report, error: Exception | None, group: dist.ProcessGroup | None
) -> tuple[dict[str, Row], set[str]]:
    """Return the rows and changed parameters of all ranks; if any rank has an error, raise it on all."""
    user = isinstance(error, UserError)
    text = str(error) if user else f"rank {dist.get_rank(group)}: {type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size(group)
    told = {} if error is None else {text: user}
    dist.all_gather_object(everyone, (report.rows, report.changed, told), group=group)
    if errors := {text: user for *_, told in everyone for text, user in told.items()}:
        raise (UserError if all(errors.values()) else RuntimeError)("; ".join(errors)) from error
    rows = {row.name: row for some, *_ in everyone for row in some}
    return rows, set().union(*(changed for _, changed, _ in everyone))


def _owners(chosen: Mapping[str, list[Target]], world: int) -> dict[str, int]:
    """Return the rank of each parameter: the most expensive first, each to the rank with the least work so far."""
    cost = {name: sum(math.prod(t.shape) * min(t.shape) for t in parts) for name, parts in chosen.items()}
    load, owners = [0] * world, {}
    for name in sorted(cost, key=lambda n: (-cost[n], n)):
        owners[name] = min(range(world), key=load.__getitem__)
        load[owners[name]] += cost[name]
    return owners


def _group_of(parameters: Iterable[Tensor]) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold the model: those of its mesh, or all (None)."""
    mesh = next((p.device_mesh for p in parameters if isinstance(p, DTensor)), None)
    if mesh is None or mesh.size() == dist.get_world_size():
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    wrong = f"the model's mesh has {mesh.size()} of {dist.get_world_size()} ranks in {mesh.ndim} dimensions"
    raise UserError(f"{wrong}: pass group=, the process group of exactly those ranks")


def _write_full(parameter: Tensor, new: Tensor | None, owner: int, group: dist.ProcessGroup | None) -> None:
    """Broadcast the owner's value and write it to the parameter; each rank keeps its own shard."""
    device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    # contiguous on all ranks, because `broadcast` copies values in the order of memory
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    if new is not None:
        value.copy_(new)
    dist.broadcast(value, owner if group is None else dist.get_global_rank(group, owner), group=group)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, **_SILENTLY)
    parameter.copy_(value)
