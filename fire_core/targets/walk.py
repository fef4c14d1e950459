"""The targets of a model: the place of every parameter, and how each is cut into matrices, one function per kind of layer.

Sizes are always read from the module. A layer that looks fused but whose parts are not known is left out, with the
reason. Your own model can declare them: `layer.fused_rows = {"q": 768, "k": 128, "v": 128}` splits the rows of a Linear
or the output channels of a convolution, and `module.stacked_matrices = True` makes the 3-D parameters of a module
stacks of (out, in) matrices (`= "in_out"` for stacks of (in, out)).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv, instancenorm
from torch.nn.parameter import UninitializedParameter

from fire_core.errors import UserError
from fire_core.targets.architectures import ADDED, Layout, Place, known_layout
from fire_core.targets.table import ATTENTION, Target, TargetTable, choose, names, role_of, selector, shorten

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")
NORMS = (
    batchnorm._BatchNorm,
    instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
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


EVERYTHING = slice(None)
REPARAMETRISED = "beside the weight: a gain, or part of a reparametrised weight (weight_norm): remove the reparametrisation"


def find_targets(
    model: nn.Module, targets: str | Sequence[str] | Callable[[Target], bool] = "all"
) -> TargetTable:
    """Return a table of every matrix and every other parameter of `model`, with `included` set by the rule `targets`.

    A rule chooses among matrices. Biases, norm layers, embeddings that are not tied to a Linear layer and other
    parameters without matrices stay out whatever the rule is, each with its reason.

    Args:
        targets: a preset (`"all"`, `"linear"`, `"conv"`, `"qk"`, `"attention"`, `"mlp"`, `"head"`, `"embedding"`, or
            `"no_"` before any of them); a wildcard pattern over parameter, module or target names (`"layer1.*"`); a
            list or comma-separated string of these (one match is enough; a leading `-` excludes, and so does a `"no_"`
            preset in a list); a list of `Target`; or a callable(Target) -> bool. Where a module has the name of a
            preset, `"name:head"` is the module.
    Raises: UserError if a pattern matches nothing or no matrix is left, and for lazy, FSDP1 or ZeRO-3 parameters.
    """
    return choose(list_targets(model), targets, type(model).__name__)


def match_parameters(model: nn.Module, rule: str | Sequence[str] | Callable[[Target], bool]) -> list[str]:
    """Return the names of all parameters (weights and biases) of the modules that a rule chooses, in model order.

    For "reset the linear layers", `match_parameters(model, "linear")` returns fc1.weight, fc1.bias, ... Presets and
    callables choose the modules that hold their targets. Patterns also choose modules without any matrix (`"*.bn1"`).

    Raises: UserError if the rule matches nothing.
    """
    table = list_targets(model)
    chosen = selector(table, rule, matrices_only=False)
    modules = {target.module for target in table if chosen(target)}
    if not modules:
        raise UserError(f"rule {rule!r} names no parameter; names that exist: {shorten(names(table))}")
    matched = {target.parameter for target in table if target.module in modules}
    return [name for name, _ in model.named_parameters() if name in matched]


def list_targets(model: nn.Module) -> TargetTable:
    """Return the table of all targets of `model` before any rule.

    Every matrix is included unless it is frozen while other parameters train, or overlaps the memory of an earlier one.
    Raises UserError for what is not a module, and for lazy, FSDP1 or ZeRO-3 parameters.
    """
    check_module(model)
    table = TargetTable()
    all_places = places(model)
    some_train = any(place.parameter.requires_grad for place in all_places)
    shared = sharing({place.parameter_name: place.parameter for place in all_places})
    treated: set[str] = set()
    for place in all_places:
        over = sorted(shared.get(place.parameter_name, set()) & treated)
        for target in split(place):
            if target.included and some_train and not place.parameter.requires_grad:
                reason = "frozen (requires_grad is False while other parameters train)"
                target = replace(target, included=False, reason=reason)
            elif target.included and over:
                reason = f"lies over the memory of {over[0]}, which is treated"
                target = replace(target, included=False, reason=reason)
            elif target.included:
                treated.add(place.parameter_name)
            table.append(target)
    return table


def _part(
    place: Place,
    kind: str,
    reason: str,
    included: bool = False,
    *,
    label: str = "",
    index: tuple = (),
    transposed: bool = False,
    shape: tuple = (),
    taps: int = 1,
    role: str = "",
) -> Target:
    """Return the target of one block of a parameter.

    label: the part of the target's name in brackets. taps: number of spatial positions of a convolution, else 1.
    """
    return Target(
        name=f"{place.name}[{label}]" if label else place.name,
        parameter=place.parameter_name,
        kind=kind,
        index=index,
        transposed=transposed,
        shape=shape,
        scale=math.sqrt(shape[0] / shape[1]) / taps if shape else 1.0,
        included=included,
        reason=reason,
        role=role,
        module=place.path,
        aliases=place.aliases,
        tied=place.tied,
    )


def split(place: Place) -> list[Target]:
    """Return the targets in one parameter: at least one, included or not."""
    role = "head" if place.head else role_of(place.name, (*place.parents, place.module))
    return [target if target.role or not role else replace(target, role=role) for target in _split(place)]


def _split(place: Place) -> Iterator[Target]:
    module, parameter = place.module, place.parameter
    skipped = _skipped(place)
    layout = known_layout(place) if skipped is None and parameter.dim() >= 2 else None
    if skipped is not None:
        yield _part(place, *skipped)
    elif parameter.dim() == 3 and getattr(module, "stacked_matrices", False):
        why = f"one member of {class_name(module)}"
        yield from _known(
            place, Layout(transposed=module.stacked_matrices == "in_out", kind="ensemble", why=why)
        )
    elif isinstance(module, conv._ConvNd) and place.attribute == "weight":
        yield from _conv(place, module, layout or Layout())
    elif layout is not None and parameter.dim() in (2, 3):
        yield from _known(place, layout)
    elif isinstance(module, nn.Linear | conv._ConvNd) and place.attribute != "weight":
        yield _part(place, "other", REPARAMETRISED)
    elif isinstance(module, nn.Linear) and parameter.dim() == 2:
        yield _part(place, "linear", f"weight of {class_name(module)}", True, shape=tuple(parameter.shape))
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        reason = "embedding table: rows are looked up, not multiplied (tied to no Linear)"
        yield _part(place, "embedding", reason)
    elif hasattr(module, "cannot_tell"):
        yield _part(place, str(module.kind), str(module.cannot_tell))
    else:
        shape = f"{parameter.dim()}-D parameter of"
        if type(module) is nn.Module:  # of a file: see `skeleton`
            yield _part(place, "other", f"{shape} a layer that a file does not show (pass --model)")
        else:
            declared = {3: "stacked_matrices", 2: "fused_rows" if place.attribute == "weight" else ""}
            name = declared.get(parameter.dim(), "")
            advice = f" (set {name} on the module to put it in)" if name else ""
            yield _part(place, "other", f"{shape} {class_name(module)}, not a known layer{advice}")


def _skipped(place: Place) -> tuple[str, str] | None:
    """Return the kind of a parameter that holds no matrix in any layer, with the reason, or None."""
    module, parameter, attribute = place.module, place.parameter, place.attribute
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
        return "other", f"stored as {parameter.dtype}: only real floating-point weights can be treated"
    if parameter.layout is not torch.strided:
        return "other", f"{parameter.layout}: only dense weights can be treated"
    if overlaps_itself(parameter):
        return "other", "expanded or overlapping: several entries share one place in memory"
    if any(word.startswith("lora_") for word in place.name.split(".")):
        return "lora", "low-rank adapter: the product B A is the update, neither factor is a layer's matrix"
    around = (module, *place.parents[-1:])
    if any(hasattr(owner, "A_log") for owner in around) and not hasattr(module, "fused_rows"):
        return "state_space", "in a state-space block, whose fused parts are not known"
    if attribute in ADDED:
        return "embedding", "learned token or position: added, not multiplied"
    if "bias" in attribute:
        return "bias", "bias: a vector"
    if parameter.numel() == 0:
        return "other", "empty parameter"
    if isinstance(module, NORMS) or ("norm" in class_name(module).lower() and parameter.dim() <= 1):
        return "norm", f"gain of {class_name(module)}"
    if "parametrizations" in place.name:
        return "other", "parametrised weight: remove the parametrisation, or treat it where it is computed"
    if parameter.dim() <= 1:
        return "scale", f"{parameter.dim()}-D parameter: a vector"
    return None


def _known(place: Place, layout: Layout) -> Iterator[Target]:
    """Yield the parts of a parameter with a known layout: fused rows, transposed storage, stacks of experts."""
    parameter = place.parameter
    if layout.why_out:
        yield _part(place, layout.kind, layout.why_out)
    elif parameter.dim() == 3:
        for i in range(parameter.shape[0]):
            yield from _blocks(place, layout, (i,), tuple(parameter.shape[1:]))
    else:
        yield from _blocks(place, layout, (), tuple(parameter.shape))


def _blocks(place: Place, layout: Layout, lead: tuple, stored: tuple[int, ...]) -> Iterator[Target]:
    """Yield the row blocks of one stored matrix, or blocks of columns with `layout.transposed`."""
    outputs, inputs = reversed(stored) if layout.transposed else stored
    _check_sizes(place, layout, outputs)
    for name, picked, size in layout.picks() if layout.sizes else [("", None, outputs)]:
        index = lead
        if picked is not None:
            index = (*lead, EVERYTHING, picked) if layout.transposed else (*lead, picked)
        yield _part(
            place,
            layout.kind,
            layout.why,
            True,
            label=",".join([*map(str, lead), *([name] if name else [])]),
            index=index,
            transposed=layout.transposed,
            shape=(size, inputs),
            role=_role(place, name),
        )


def _conv(place: Place, module: conv._ConvNd, layout: Layout) -> Iterator[Target]:
    """Yield one part per group and spatial tap of a convolution, of shape (out / groups, in / groups).

    The output channels of a layer whose parts are known (q, k and v) are cut into these. A depthwise convolution, whose
    groups have one input channel each, holds no matrix: every block is a single column.
    """
    parameter, groups = place.parameter, module.groups
    transposed, first = isinstance(module, conv._ConvTransposeNd), parameter.shape[0] // groups
    reason = layout.why_out
    if groups > 1 and module.in_channels == groups:
        reason = "depthwise convolution: each filter sees one channel, so there is no matrix"
    elif layout.sizes and (groups > 1 or transposed):
        reason = "fused parts of a grouped or transposed convolution are not known"
    if reason:
        yield _part(place, "conv", reason)
        return
    why, parts = f"one tap of {class_name(module)}", [("", EVERYTHING, first)]
    if layout.sizes:
        _check_sizes(place, layout, first)
        why, parts = f"{why}, {layout.why}", list(layout.picks())
    elif groups > 1:
        why = f"{why}, one group"
        parts = [(f"group {g}", slice(g * first, (g + 1) * first), first) for g in range(groups)]
    for (part, rows, size), tap in itertools.product(
        parts, itertools.product(*map(range, parameter.shape[2:]))
    ):
        yield _part(
            place,
            "conv",
            why,
            True,
            label=",".join([*([part] if part else []), *map(str, tap)]),
            index=(rows, EVERYTHING, *tap),
            transposed=transposed,
            shape=(parameter.shape[1], size) if transposed else (size, parameter.shape[1]),
            taps=math.prod(parameter.shape[2:]),
            role=_role(place, part) if layout.sizes else "",
        )


def _role(place: Place, part: str) -> str:
    """Return the role of one part of a fused layer: q, k, v or o by its name ("q", or "q.0" head by head)."""
    whole, name = role_of(place.name, (*place.parents, place.module)), part.split(".")[0]
    return name if name in ATTENTION else "attention" if part and whole in ATTENTION else ""


def _check_sizes(place: Place, layout: Layout, outputs: int) -> None:
    """Raise UserError if the parts of a fused layer do not add up to its outputs."""
    if layout.sizes and layout.total != outputs:
        sizes = " + ".join(f"{name} {size}" for name, size in layout.sizes)
        raise UserError(
            f"{place.name!r} has {outputs} output rows, but its parts add up to {layout.total} ({sizes}): "
            "correct fused_rows on the module"
        )


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
    sharded = ((p, m) for p, m in modules.items() if type(m).__name__ == "FullyShardedDataParallel")
    path, outermost = next(sharded, ("", None))
    named = () if outermost is None else tuple(outermost.named_parameters())
    if named and (any(n.endswith("_flat_param") for n, _ in named) or all(p.dim() < 2 for _, p in named)):
        raise UserError(
            f"module {path!r} is wrapped by FullyShardedDataParallel, which flattens and cuts its "
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
    """Raise UserError for anything but a torch module, and for a TorchScript module, whose layers cannot be told apart."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise UserError(
            f"model is a {type(model).__name__}, not an ordinary torch module: give the module itself, before "
            "torch.jit.script; for one matrix use fire_core.project_, for a file of weights `fire-core apply`"
        )


def sharing(tensors: Mapping[str, Tensor]) -> dict[str, set[str]]:
    """Return, for each tensor that shares entries with others, the names of these others.

    Meta, sparse and empty tensors and subclasses such as DTensor are ignored.
    """
    spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if _in_memory(tensor))
    found: dict[str, set[str]] = {}
    reaching: list[tuple[int, str]] = []  # earlier tensors that may reach into the next one
    for start, end, name in spans:
        reaching = [(other_end, other) for other_end, other in reaching if other_end > start]
        for _, other in reaching:
            if np.shares_memory(_addresses(tensors[name]), _addresses(tensors[other])):
                found.setdefault(name, set()).add(other)
                found.setdefault(other, set()).add(name)
        reaching.append((end, name))
    return found


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two entries of a tensor share one place in memory, as after `expand` and `as_strided`."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)) if _in_memory(tensor) else ():
        if size > 1 and stride <= reach:
            places = torch.zeros((), dtype=torch.int64)
            for step, count in zip(tensor.stride(), tensor.shape, strict=True):
                places = places[..., None] + step * torch.arange(count)
            return len(places.unique()) < tensor.numel()
        reach += (size - 1) * stride
    return False


def _in_memory(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _addresses(tensor: Tensor) -> np.ndarray:
    """Return an array over the memory of a tensor on any device, whose entries must not be read."""
    size = tensor.element_size()
    described = SimpleNamespace(
        __array_interface__={
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
        }
    )
    return np.asarray(described)
