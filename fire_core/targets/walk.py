"""Places of the parameters of a model: the module that holds each, its names, and whether it is in the output layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import batchnorm, conv, instancenorm
from torch.nn.parameter import UninitializedParameter

from fire_core.errors import UserError
from fire_core.targets.roles import ATTENTION, role_of
from fire_core.targets.table import Place

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
NORMS = (
    batchnorm._BatchNorm,
    instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
MATRIX_LAYERS = (nn.Linear, conv._ConvNd)
HEADS = {
    "lm_head",
    "embed_out",
    "output_projection",
    "head",
    "head_dist",
    "classifier",
    "score",
    "qa_outputs",
}
PERHAPS_HEADS = {"fc", "output", "out", "output_layer", "last_layer", "linear"}


def places(model: nn.Module) -> list[Place]:
    """Return the place of every parameter of `model`, once; a tied one in its Linear layer, not its Embedding."""
    modules = dict(model.named_modules())
    refuse_flat_shards(modules)
    owners: dict[object, list[tuple[str, str]]] = {}
    for path, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                refuse_without_values(f"{path}.{attribute}".lstrip("."), parameter)
                owners.setdefault(_identity(parameter), []).append((path, attribute))
    heads = _heads(model, modules)
    return [_place(modules, owned, heads) for owned in owners.values()]


def _identity(parameter: nn.Parameter) -> object:
    """Return a key that is equal for one Parameter found twice and for two with the same memory, shape and strides."""
    without_memory = parameter.is_meta or parameter.numel() == 0 or parameter.layout is not torch.strided
    if type(parameter) is not nn.Parameter or without_memory:
        return id(parameter)
    return (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.device)


def _place(modules: dict[str, nn.Module], owned: list[tuple[str, str]], heads: set[str]) -> Place:
    path, attribute = min(owned, key=lambda owner: isinstance(modules[owner[0]], nn.Embedding))
    first_path, first_attribute = owned[0]
    every_name = [f"{p}.{a}" if p else a for p, a in owned]
    module = modules[path]
    tied = any(isinstance(modules[p], nn.Embedding) for p, _ in owned) and not isinstance(
        module, nn.Embedding
    )
    return Place(
        path=path,
        attribute=attribute,
        module=module,
        parents=_parents(modules, path),
        parameter=module._parameters[attribute],  # type: ignore[arg-type]
        parameter_name=f"{first_path}.{first_attribute}" if first_path else first_attribute,
        aliases=tuple(dict.fromkeys([*every_name, *map(unwrapped, every_name)])),
        tied=tied,
        head=path in heads,
    )


def _parents(modules: dict[str, nn.Module], path: str) -> tuple[nn.Module, ...]:
    """Return the modules around `path`, the model first."""
    words = path.split(".") if path else []
    return tuple(modules[".".join(words[:length])] for length in range(len(words)))


def unwrapped(name: str) -> str:
    """Return a parameter name without the prefixes of DDP, torch.compile, FSDP and activation checkpointing."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "") if wrapper != "module." else name.removeprefix(wrapper)
    return name


def refuse_flat_shards(modules: dict[str, nn.Module]) -> None:
    """Raise UserError for FSDP1, which keeps several parameters in one flat vector and cuts that into shards."""
    flat = [
        path
        for path, module in modules.items()
        if type(module).__name__ == "FullyShardedDataParallel"
        and any(
            name.endswith("_flat_param")
            or (p.dim() < 2 and isinstance(modules.get(_owner(path, name)), MATRIX_LAYERS))
            for name, p in module.named_parameters()
            if name.endswith(("_flat_param", "weight"))
        )
    ]
    if flat:
        raise UserError(
            f"module {flat[0]!r} is wrapped by FullyShardedDataParallel, which flattens and cuts its "
            "parameters: no matrix can be seen; call this inside "
            "FullyShardedDataParallel.summon_full_params(model, writeback=True), or shard with "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )


def refuse_without_values(name: str, parameter: nn.Parameter) -> None:
    """Raise UserError for a lazy parameter, which has no shape yet, and for one that DeepSpeed ZeRO-3 partitions."""
    if isinstance(parameter, UninitializedParameter):
        raise UserError(
            f"parameter {name!r} is lazy and not initialised: run one batch through the model first"
        )
    shape = getattr(parameter, "ds_shape", None)
    if shape is not None and tuple(shape) != tuple(parameter.shape):
        raise UserError(
            f"parameter {name!r} is partitioned by DeepSpeed ZeRO stage 3 and not available on this rank: call this inside "
            "deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0)"
        )


def class_name(module: nn.Module) -> str:
    """Return the name of the class that the user wrote, without the prefix FSDP that FSDP2 adds."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if name.startswith("FSDP") and len(type(module).__mro__) > 2 else name


def _owner(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name.rpartition(".")[0])))


def _heads(model: nn.Module, modules: dict[str, nn.Module]) -> set[str]:
    """Return the paths of the output layers.

    Those are the Linear layers that the model itself names, else the Linear tied to an embedding, else the last Linear.
    The last one counts only outside every ModuleList and outside attention: the end of a repeated block is not a head. In
    a file (`skeleton`), the order of layers means nothing, and names decide.
    """
    for question in ("get_output_embeddings", "get_classifier"):
        answers = _ask(model, question)
        if answers and all(isinstance(layer, nn.Linear) for layer in answers):
            return {path for path, module in modules.items() if any(module is layer for layer in answers)}
        if answers and not any(isinstance(part, nn.Linear) for layer in answers for part in layer.modules()):
            return set()  # the model has no output layer, such as timm with num_classes=0
    # not m.weight: where spectral_norm computes it, reading it changes the state of the computation
    weights = {path: m._parameters.get("weight") for path, m in modules.items()}
    tables = {id(weights[p]) for p, m in modules.items() if isinstance(m, nn.Embedding)} - {id(None)}
    layers = [
        p for p, m in modules.items() if isinstance(m, nn.Linear) or getattr(m, "stacked_matrices", False)
    ]
    tied = [p for p in layers if id(weights[p]) in tables]
    if tied:
        return {tied[-1]}
    if type(model) is nn.Module:
        return heads_by_name(layers)
    repeated = tuple(path + "." for path, m in modules.items() if isinstance(m, nn.ModuleList) and path)
    if not layers or layers[-1].startswith(repeated):
        return set()
    return set() if role_of(layers[-1], _parents(modules, layers[-1])) in ATTENTION else {layers[-1]}


def heads_by_name(layers: list[str]) -> set[str]:
    """Return those of the given paths of Linear layers that are output layers by their names, or an empty set.

    That is "lm_head" or "classifier", the highest number in it ("classifier.6"), or the only layer in it ("head.fc").
    Layers in repeated blocks, which have a number before the name, do not count. A name that hidden layers have as well
    ("fc", "output") counts only if no other layer stands outside the blocks.
    """
    inside: dict[
        tuple[str, ...], dict[str, str]
    ] = {}  # path of a head -> rest of the path of a layer in it -> path
    outside = []
    for path in layers:
        words = unwrapped(path).split(".")
        at = next((i for i, word in enumerate(words) if word in HEADS), len(words))
        if any(word.isdigit() for word in words[:at]):
            continue
        outside.append(path)
        if at < len(words):
            inside.setdefault(tuple(words[: at + 1]), {})[".".join(words[at + 1 :])] = path
    found = set()
    for rests in inside.values():
        if len(rests) == 1 or all(rest.isdigit() for rest in rests):
            found.add(rests[max(rests, key=lambda rest: int(rest) if rest.isdigit() else 0)])
    if not inside and len(outside) == 1 and outside[0].rpartition(".")[2] in PERHAPS_HEADS:
        found.add(outside[0])
    return found


def _ask(model: nn.Module, question: str) -> list[nn.Module]:
    """Return the layers that the model's method `question` names: one, several (distilled models of timm), or none."""
    answer = getattr(model, question, None)
    try:
        layers = answer() if callable(answer) else None
    except (NotImplementedError, AttributeError, TypeError):
        return []
    several = layers if isinstance(layers, tuple | list) else [layers]
    return [layer for layer in several if isinstance(layer, nn.Module)]


def check_module(model: object) -> None:
    """Raise UserError for anything but a torch module, and for a TorchScript module."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model is a {type(model).__name__}, not a torch module: give the module itself; for one matrix use "
            "fire_core.project_, for a file of weights `fire-core apply`"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError(
            f"model is a {type(model).__name__} of TorchScript, whose layers cannot be told apart: treat the module "
            "before torch.jit.script, or load its state_dict into one"
        )
