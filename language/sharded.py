"""FSDP2: one net cut over several processes, and its checkpoints through torch.distributed.checkpoint.

Every function is called by all processes, `read` also by one alone: a checkpoint can be read by any number of them.
What it needs of torch.distributed takes a second to import, and only these functions need it.
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
    """Cut every parameter along its first dimension, in place; blocks are gathered one at a time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in net.h:
        fully_shard(block, mesh=mesh)
    # else what is in no block would stay whole after an evaluation, and a method would find no parts
    fully_shard(net, mesh=mesh, reshard_after_forward=True)


def whole(net: Decoder, device: torch.device) -> Decoder:
    """A copy of the net that is not cut, on every process."""
    with seeded(0, "copy"):  # the draw is overwritten, and the random numbers of the run are not touched
        copy = Decoder(net.shape).to(device)
    with torch.no_grad():
        for cut, parameter in zip(net.parameters(), copy.parameters(), strict=True):
            parameter.copy_(cut.full_tensor())  # type: ignore[attr-defined]
    return copy


def write(folder: Path, net: nn.Module, optimizer: Optimizer) -> None:
    """Save weights and optimizer state, each process its own part."""
    from torch.distributed import checkpoint as storage

    storage.save(_tensors(net, optimizer), checkpoint_id=folder)


def read(folder: Path, net: nn.Module, optimizer: Optimizer) -> None:
    """Load what `write` saved into a net and optimizer that may be cut otherwise, or not at all."""
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
    """Load whole weights, and optimizer state if there is any, into a net that is cut."""
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
