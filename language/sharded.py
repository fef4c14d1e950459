"""FSDP2: one net sharded over several processes, and its checkpoints through torch.distributed.checkpoint.

All processes call these functions together. Any number of processes, also a single one, can `read` a checkpoint. Parts
of torch.distributed are imported inside the functions, because the import takes a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.placement import place
from harness.runs import seeded
from language.model import Decoder


def shard(net: Decoder, device: torch.device) -> None:
    """Shard every parameter along its first dimension, in place; blocks are gathered one at a time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in net.h:
        fully_shard(block, mesh=mesh)
    # otherwise parameters outside blocks would stay whole after an evaluation, and a method would find no shards
    fully_shard(net, mesh=mesh, reshard_after_forward=True)


def whole(net: Decoder, device: torch.device) -> Decoder:
    """Return a whole copy of the sharded net, on every process."""
    with seeded(0, "copy"):  # new weights are drawn and overwritten; the random state of the run stays
        copy = Decoder(net.shape).to(device)
    with torch.no_grad():
        for cut, parameter in zip(net.parameters(), copy.parameters(), strict=True):
            parameter.copy_(cut.full_tensor())  # type: ignore[attr-defined]
    return copy


def write(folder: Path, net: nn.Module, optimizer: Optimizer) -> None:
    """Save weights and optimizer state; each process writes its own shards."""
    from torch.distributed import checkpoint as storage

    storage.save(_tensors(net, optimizer), checkpoint_id=folder)


def read(folder: Path, net: nn.Module, optimizer: Optimizer) -> None:
    """Load what `write` saved into a net and optimizer that may be sharded differently or not at all."""
    from torch.distributed import checkpoint as storage

    saved = storage.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, parameter in net.named_parameters():
        optimizer.state[parameter] = {}
        for key, entry in saved.items():
            if key.startswith(f"optimizer.{name}:"):
                like = parameter.detach() if entry.size == parameter.shape else torch.zeros(entry.size)
                optimizer.state[parameter][key.partition(":")[2]] = torch.zeros_like(
                    like, dtype=entry.properties.dtype, device=parameter.device
                )
    storage.load(_tensors(net, optimizer), checkpoint_id=folder, no_dist=not dist.is_initialized())


def _tensors(net: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    found = {f"net.{name}": parameter.detach() for name, parameter in net.named_parameters()}
    for name, parameter in net.named_parameters():
        state = optimizer.state.get(parameter, {})
        found |= {f"optimizer.{name}:{key}": value for key, value in state.items()}
    return found


def cut_up(net: nn.Module, optimizer: Optimizer | None, saved: dict[str, Any]) -> None:
    """Load whole weights, and with `optimizer` its whole state, into a sharded net."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(place(saved["net"][name], parameter))
    if optimizer is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = {
            number: {k: place(v, parameters[number]) if v.dim() else v for k, v in values.items()}
            for number, values in saved["optimizer"]["state"].items()
        }
        optimizer.load_state_dict(saved["optimizer"] | {"state": state})
