"""Treat or observe a model whatever wraps it: nothing, DistributedDataParallel, or the shards of FSDP2."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fire_core.engine import Treatment, measure_change, treat_tensors
from fire_core.errors import UserError
from fire_core.report import Report
from fire_core.targets import Target, TargetTable, check_module, find_targets, list_targets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def treat_model(
    model: nn.Module,
    table: TargetTable,
    treatment: Treatment,
    *,
    group: ProcessGroup | None = None,
    **options: Any,
) -> Report:
    """Run `treatment` on every included target of `model`, in place, and return the report.

    A model with DTensor parameters (FSDP2, tensor parallel) or with DistributedDataParallel in it is treated by all its
    ranks together, and so is one with a process `group` given. Every rank calls this function, the ranks divide the
    work, and all of them end with the same weights or the same error.

    Args:
        treatment: (stack (count, out, in) of matrices, their targets) -> `fire_core.engine.Treated`.
        options: those of `fire_core.engine.treat_tensors`, with its errors; `action` is required.
    """
    parameters = dict(unwrap(model).named_parameters())
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    replicas = [] if alone else replicas_in(model)
    if alone or not (replicas or group is not None or is_sharded(parameters)):
        return treat_tensors(parameters, table, treatment, **options)
    from fire_core.distributed import share_out

    group = group if group is not None or not replicas else replicas[0].process_group
    return share_out(parameters, table, treatment, group=group, **options)


@contextmanager
def observe(
    model: nn.Module,
    *,
    action: str,
    method: str,
    initial: Mapping[str, Tensor] | None = None,
) -> Iterator[Report]:
    """Yield an empty report, and fill it in when the `with` block ends: compare all parameters before and after it.

    Args:
        action, method: written into the rows and the report.
        initial: starting weights by parameter name, for `Row.sfe_relative`.
    A model without matrices is reported without rows. Raises UserError for a sharded model.
    """
    model, initial = unwrap_with(model, initial)
    report = Report(method=method)
    parameters = dict(model.named_parameters())
    if is_sharded(parameters):
        raise UserError(
            f"{method or action} changes whole parameters and cannot see them in a sharded model; fire, fire_exact, "
            "interpolate, rescale, keep_norm and random_orthogonal can: use one of these, or change the weights before "
            "fully_shard"
        )
    table = list_targets(model)
    table = table if table.included else TargetTable()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    started = time.perf_counter()
    yield report
    seconds = time.perf_counter() - started
    measure_change(report, before, parameters, table, action=action, initial=initial)
    report.seconds = seconds
    report.parameters = [p for name, p in parameters.items() if name in report.changed]


def table_of(model: nn.Module, targets: Any, example: Any = None) -> TargetTable:
    """Return the table of the module inside `model` under this rule, or the given table, with the names of that module."""
    check_module(model)
    inner, prefix = _inside(model)
    if prefix and isinstance(targets, list) and all(isinstance(target, Target) for target in targets):
        names, keys = dict(inner.named_parameters()), ("name", "parameter", "module")
        targets = type(targets)(
            t
            if t.parameter in names
            else replace(t, **{key: getattr(t, key).removeprefix(prefix) for key in keys})
            for t in targets
        )
    return targets if isinstance(targets, TargetTable) else find_targets(inner, targets, example=example)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile, or `model` itself."""
    return _inside(model)[0]


def _inside(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the module inside the wrappers around `model`, and what they put before the names of its parameters."""
    prefix = ""
    while True:
        name = "module" if isinstance(model, nn.parallel.DistributedDataParallel) else "_orig_mod"
        inner = getattr(model, name, None)
        if not isinstance(inner, nn.Module):
            return model, prefix
        model, prefix = inner, f"{prefix}{name}."


def unwrap_with(model: nn.Module, initial: Any) -> tuple[nn.Module, Any]:
    """Return the module inside DistributedDataParallel and torch.compile, and the starting weights by its names.

    In a copy of the wrapped model's state dict, "module." or "_orig_mod." comes before each name; it is removed. A
    module may itself have a child called `module`, so names that already fit are kept. Starting weights that are sharded
    are gathered, so that every rank holds all of them; it is a collective call then.
    """
    inner, prefix = _inside(model)
    if not isinstance(initial, Mapping):
        return inner, initial
    if is_sharded(initial):
        initial = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in initial.items()}
    if prefix and not initial.keys() <= inner.state_dict().keys():
        initial = {name.removeprefix(prefix): value for name, value in initial.items()}
    return inner, initial


def average_over_ranks(model: nn.Module, tensors: dict[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Replace each tensor by its mean over the ranks of `model`'s DistributedDataParallel, if there is one, in place.

    The tensors have the names and shapes of those in `like`. One that a rank lacks counts as zeros there.
    """
    for replica in replicas_in(model)[:1]:
        device = next(iter(like.values())).device
        known = torch.tensor([key in tensors for key in like], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(known, group=replica.process_group)
        for key, ranks in zip(like, known.tolist(), strict=True):
            if ranks:
                tensor = tensors.setdefault(key, torch.zeros_like(like[key]))
                torch.distributed.all_reduce(tensor, group=replica.process_group)
                tensor.div_(torch.distributed.get_world_size(replica.process_group))


def replicas_in(model: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    """Return every DistributedDataParallel that is `model` or a part of it."""
    return [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]


def is_sharded(parameters: Mapping[str, Tensor]) -> bool:
    """Return whether any parameter is a DTensor (FSDP2, tensor parallel)."""
    # by name, because torch.distributed may be absent
    return any(type(parameter).__name__ == "DTensor" for parameter in parameters.values())
