"""How each parameter of a model splits into matrices: one table of fused layers, one function per kind of
layer.

Sizes are always read off the module; a layer that looks fused but does not say how is left out with that
reason.
A model of your own can say it: `layer.fused_rows = {"q": 768, "k": 128, "v": 128}` on a Linear splits its
rows, and `module.stacked_matrices = True` makes the 3-D parameters held by a module stacks of (out, in)
matrices (`= "in_out"` for stacks of (in, out)).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules import batchnorm, conv, instancenorm
from torch.nn.parameter import UninitializedParameter

from fire_core.errors import UserError
from fire_core.fused_layers import ADDED, STATE_SPACE, Rows, known_rows
from fire_core.roles import ATTENTION, role_of

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
EVERYTHING = slice(None)
RECURRENT = re.compile(r"weight_(ih|hh|hr)_l\d+(_reverse)?")
REPARAMETRISED = "beside the weight: a gain, or part of a reparametrised weight (weight_norm): remove that"


@dataclass(frozen=True)
class Part:
    """One block of a parameter. shape: (out, in), or () where there is no matrix; taps: spatial positions of
    a conv."""

    kind: str
    reason: str
    included: bool = False
    label: str = ""
    index: tuple = ()
    transposed: bool = False
    shape: tuple = ()
    taps: int = 1
    role: str = ""


@dataclass(frozen=True)
class Place:
    """Where a parameter sits: the module that holds it, that module's parents (outermost first), and its
    names."""

    path: str
    attribute: str
    module: nn.Module
    parents: tuple[nn.Module, ...]
    parameter: nn.Parameter
    parameter_name: str
    aliases: tuple[str, ...]
    tied: bool
    head: bool

    @property
    def name(self) -> str:
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


def places(model: nn.Module) -> list[Place]:
    """Every parameter of `model` once, seen from the module that says most about it (a Linear before an
    Embedding)."""
    modules = dict(model.named_modules())
    refuse_flat_shards(modules)
    refuse_partitioned(model)
    owners: dict[object, list[tuple[str, str]]] = {}
    for path, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if isinstance(parameter, UninitializedParameter):
                name = f"{path}.{attribute}".lstrip(".")
                raise UserError(
                    f"parameter {name!r} is lazy and not initialised: run one batch through the model first"
                )
            if parameter is not None:
                owners.setdefault(_identity(parameter), []).append((path, attribute))
    heads = _heads(model, modules)
    return [_place(modules, owned, heads) for owned in owners.values()]


def _identity(parameter: nn.Parameter) -> object:
    """Equal for one Parameter seen twice, and for two Parameters that share the whole of one storage."""
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
    """The modules around `path`, the model first."""
    words = path.split(".") if path else []
    return tuple(modules[".".join(words[:length])] for length in range(len(words)))


def unwrapped(name: str) -> str:
    """A parameter name without what DDP, torch.compile and FSDP put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "") if wrapper != "module." else name.removeprefix(wrapper)
    return name


def refuse_flat_shards(modules: dict[str, nn.Module]) -> None:
    """FSDP1 keeps several parameters in one flat, cut-up vector: no matrix can be seen in it."""
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


def refuse_partitioned(model: nn.Module) -> None:
    """DeepSpeed ZeRO stage 3 leaves empty parameters behind and keeps their shapes elsewhere."""
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, "ds_shape", None)
        if shape is not None and tuple(shape) != tuple(parameter.shape):
            raise UserError(
                f"parameter {name!r} is partitioned by DeepSpeed ZeRO stage 3 and not here: call this inside "
                "deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0)"
            )


def _class(module: nn.Module) -> str:
    """The class a user wrote: FSDP2 puts a class of its own, named FSDP..., in front."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if name.startswith("FSDP") and len(type(module).__mro__) > 2 else name


def _owner(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name.rpartition(".")[0])))


def _heads(model: nn.Module, modules: dict[str, nn.Module]) -> set[str]:
    """Paths of the output layers.

    Those are the Linear layers that the model itself names, else the Linear tied to an embedding, else the last Linear;
    the last one counts only when it is outside every ModuleList: the end of a repeated block is not a head.
    """
    for question in ("get_output_embeddings", "get_classifier"):
        answers = _ask(model, question)
        if answers and all(isinstance(layer, nn.Linear) for layer in answers):
            return {path for path, module in modules.items() if any(module is layer for layer in answers)}
        if answers and not any(isinstance(part, nn.Linear) for layer in answers for part in layer.modules()):
            return set()  # the model says that it has none: Identity in timm with num_classes=0
    # not m.weight: where that is computed, as by spectral_norm, asking for it moves the state of the computation
    weights = {path: m._parameters.get("weight") for path, m in modules.items()}
    tables = {id(weights[p]) for p, m in modules.items() if isinstance(m, nn.Embedding)} - {id(None)}
    layers = [
        p for p, m in modules.items() if isinstance(m, nn.Linear) or getattr(m, "stacked_matrices", False)
    ]
    tied = [p for p in layers if id(weights[p]) in tables]
    if tied:
        return {tied[-1]}
    repeated = tuple(path + "." for path, m in modules.items() if isinstance(m, nn.ModuleList) and path)
    if not layers or layers[-1].startswith(repeated):
        return set()
    return set() if role_of(layers[-1], _parents(modules, layers[-1])) in ATTENTION else {layers[-1]}


def _ask(model: nn.Module, question: str) -> list[nn.Module]:
    """The layers that the model names: one, several (distilled models of timm), or none where it says nothing."""
    answer = getattr(model, question, None)
    try:
        layers = answer() if callable(answer) else None
    except (NotImplementedError, AttributeError, TypeError):
        return []
    several = layers if isinstance(layers, tuple | list) else [layers]
    return [layer for layer in several if isinstance(layer, nn.Module)]


def split(place: Place) -> list[Part]:
    """All parts of one parameter; at least one, included or not."""
    role = "head" if place.head else role_of(place.name, place.parents)
    return [replace(part, role=part.role or role) for part in _split(place)]


def _split(place: Place) -> Iterator[Part]:
    module, parameter = place.module, place.parameter
    skipped = _skipped(place)
    rows = known_rows(place) if skipped is None and parameter.dim() >= 2 else None
    if skipped is not None:
        yield skipped
    elif parameter.dim() == 3 and getattr(module, "stacked_matrices", False):
        why = f"one member of {_class(module)}"
        yield from _known(
            place, Rows(transposed=module.stacked_matrices == "in_out", kind="ensemble", why=why)
        )
    elif rows is not None and parameter.dim() in (2, 3):
        yield from _known(place, rows)
    elif isinstance(module, nn.Linear | conv._ConvNd) and place.attribute != "weight":
        yield Part("other", REPARAMETRISED)
    elif isinstance(module, nn.Linear) and parameter.dim() == 2:
        yield Part("linear", f"weight of {_class(module)}", True, shape=tuple(parameter.shape))
    elif isinstance(module, conv._ConvNd):
        yield from _conv(module, parameter)
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        yield Part("embedding", "embedding table: rows are looked up, not multiplied (tied to no Linear)")
    elif hasattr(module, "cannot_tell"):
        yield Part(str(module.kind), str(module.cannot_tell))
    elif isinstance(module, nn.RNNBase):
        yield from _recurrent(module, place.attribute, parameter)
    else:
        why = f"{parameter.dim()}-D parameter of {_class(module)}, not a known layer"
        yield Part("other", why + _advice(place))


def _advice(place: Place) -> str:
    """What the user can say to put a parameter of an unknown layer in."""
    if place.parameter.dim() == 3:
        return " (set stacked_matrices on the module to put it in)"
    if place.parameter.dim() == 2 and place.attribute == "weight":
        return " (set fused_rows on the module to put it in)"
    return ""


def _skipped(place: Place) -> Part | None:
    """Parameters that hold no matrix, whatever the layer."""
    module, parameter, attribute = place.module, place.parameter, place.attribute
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
        return Part("other", f"stored as {parameter.dtype}: only real floating-point weights can be treated")
    if parameter.layout is not torch.strided:
        return Part("other", f"{parameter.layout}: only dense weights can be treated")
    if any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape)):
        return Part("other", "expanded: several entries share one place in memory and cannot be set apart")
    if any(word.startswith("lora_") for word in place.name.split(".")):
        return Part(
            "lora", "low-rank adapter: the product B A is the update, neither factor is a layer's matrix"
        )
    leaf = place.path.rpartition(".")[2]
    for owner in (module, *place.parents[-1:]):
        for word in (attribute, leaf):
            if hasattr(owner, "A_log") and word in STATE_SPACE and hasattr(owner, word):
                return Part("state_space", STATE_SPACE[word])
    if attribute in ADDED:
        return Part("embedding", "learned token or position: added, not multiplied")
    if "bias" in attribute:
        return Part("bias", "bias: a vector")
    if parameter.numel() == 0:
        return Part("other", "empty parameter")
    if isinstance(module, NORMS) or ("norm" in _class(module).lower() and parameter.dim() <= 1):
        return Part("norm", f"gain of {_class(module)}")
    if "parametrizations" in place.name:
        return Part(
            "other", "parametrised weight: remove the parametrisation, or treat it where it is computed"
        )
    if parameter.dim() <= 1:
        return Part("scale", f"{parameter.dim()}-D parameter: a vector")
    return None


def _known(place: Place, rows: Rows) -> Iterator[Part]:
    """Layers with a known layout: fused rows, transposed storage, stacks of experts."""
    parameter = place.parameter
    if rows.why_out:
        yield Part(rows.kind, rows.why_out)
    elif parameter.dim() == 3:
        for i in range(parameter.shape[0]):
            yield from _blocks(place, rows, (i,), tuple(parameter.shape[1:]))
    else:
        yield from _blocks(place, rows, (), tuple(parameter.shape))


def _blocks(place: Place, rows: Rows, lead: tuple, stored: tuple[int, ...]) -> Iterator[Part]:
    """The row blocks of one stored matrix; with `rows.transposed` the outputs are its columns."""
    outputs, inputs = reversed(stored) if rows.transposed else stored
    prefix = [str(i) for i in lead]
    if not rows.sizes:
        yield Part(rows.kind, rows.why, True, ",".join(prefix), lead, rows.transposed, (outputs, inputs))
        return
    if rows.total != outputs:
        sizes = " + ".join(f"{name} {size}" for name, size in rows.sizes)
        raise UserError(
            f"{place.name!r} has {outputs} output rows, but its parts add up to {rows.total} ({sizes}): "
            "correct fused_rows on the module"
        )
    whole = role_of(place.name, place.parents)
    for name, picked, size in rows.picks():
        index = (*lead, EVERYTHING, picked) if rows.transposed else (*lead, picked)
        why = rows.left_out.get(name, rows.why)
        head_by_head = name.split(".")[0]
        role = head_by_head if head_by_head in ATTENTION else "attention" if whole in ATTENTION else ""
        label = ",".join([*prefix, name])
        included = name not in rows.left_out
        if included and lead and rows.transposed and isinstance(picked, list):
            included, why = False, "scattered columns of a stack: no single view"
        yield Part(rows.kind, why, included, label, index, rows.transposed, (size, inputs), 1, role)


def _conv(module: conv._ConvNd, parameter: torch.Tensor) -> Iterator[Part]:
    """One target a spatial tap and group. Groups are separate maps, so each group is its own (out/groups,
    in/groups).

    A convolution whose groups see one channel each (depthwise) holds no matrix: every block is a single
    column.
    """
    if module.groups > 1 and module.in_channels == module.groups:
        yield Part("conv", "depthwise convolution: each filter sees one channel, so there is no matrix")
        return
    transposed, first = isinstance(module, conv._ConvTransposeNd), parameter.shape[0] // module.groups
    taps = parameter[0, 0].numel()
    shape = (parameter.shape[1], first) if transposed else (first, parameter.shape[1])
    why = f"one tap of {_class(module)}" + (", one group" if module.groups > 1 else "")
    spans = (
        [slice(g * first, (g + 1) * first) for g in range(module.groups)]
        if module.groups > 1
        else [EVERYTHING]
    )
    for (group, span), tap in itertools.product(enumerate(spans), _taps(parameter)):
        label = ",".join(map(str, tap)) if module.groups == 1 else f"group {group},{','.join(map(str, tap))}"
        yield Part("conv", why, True, label, (span, EVERYTHING, *tap), transposed, shape, taps)


def _taps(parameter: torch.Tensor) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(size) for size in parameter.shape[2:])))


def _recurrent(module: nn.RNNBase, attribute: str, parameter: torch.Tensor) -> Iterator[Part]:
    """Gates are separate maps; torch stacks them in the order of its documentation."""
    if not RECURRENT.fullmatch(attribute):
        yield Part("other", REPARAMETRISED)
        return
    gates = {"LSTM": ("input", "forget", "cell", "output"), "GRU": ("reset", "update", "new")}.get(
        module.mode, ("",)
    )
    if attribute.startswith("weight_hr"):
        gates = ("",)
    size, inputs = parameter.shape[0] // len(gates), parameter.shape[1]
    for i, gate in enumerate(gates):
        index = (slice(i * size, (i + 1) * size),) if gate else ()
        yield Part("recurrent", f"weight of {_class(module)}", True, gate, index, False, (size, inputs))
