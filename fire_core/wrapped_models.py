"""What wraps a model: DistributedDataParallel, torch.compile, or the shards of FSDP2."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fire_core.errors import UserError
from fire_core.targets.model_targets import identity, inside


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile, or `model` itself."""
    return inside(model)[0]


def unwrap_with(model: nn.Module, initial: Any) -> tuple[nn.Module, Any]:
    """Return the module inside DistributedDataParallel and torch.compile, and the starting weights by its names.

    In a copy of the wrapped model's state dict, "module." or "_orig_mod." comes before each name; it is removed. A
    module may itself have a child called `module`, so names that already fit are kept. Starting weights that are sharded
    are gathered, so that every rank holds all of them; it is a collective call then. It reshards the module.
    """
    inner, prefix = inside(model)
    reshard(inner)
    if initial is None:
        return inner, None
    if not isinstance(initial, Mapping):
        wrong = f"initial is a {type(initial).__name__}"
        raise UserError(f"{wrong}: give the starting weights, as state_dict() does")
    sharded = {n: v for n, v in initial.items() if hasattr(v, "full_tensor")}
    initial = {**initial, **{n: v.to(v.device_mesh.device_type).full_tensor() for n, v in sharded.items()}}
    if prefix and not initial.keys() <= inner.state_dict().keys():
        initial = {name.removeprefix(prefix): value for name, value in initial.items()}
    pairs = [
        (p, initial[name]) for name, p in inner.named_parameters() if name in initial and p.requires_grad
    ]
    if any(isinstance(start, Tensor) and identity(start) == identity(p) for p, start in pairs):
        raise UserError("initial holds the weights of the model themselves: give a deepcopy of them")
    return inner, initial


def reshard(model: nn.Module) -> None:
    """Let FSDP2 cut the weights again that an evaluation left whole: what is written into these is lost."""
    for part in model.modules():
        if any(base.__name__ == "FSDPModule" for base in type(part).__mro__):
            cast(Any, part).reshard()


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


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    """Return whether any parameter is a DTensor (FSDP2, tensor parallel)."""
    # by name, because torch.distributed may be absent
    return any(type(parameter).__name__ == "DTensor" for parameter in parameters)
