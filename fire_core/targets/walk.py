"""The targets of a model: the place of every parameter, and how each is cut into matrices, one function per kind of layer.

Your own model can declare what no rule can know: `layer.fused_rows = {"q": 768, "k": 128, "v": 128}` splits the rows of a
Linear or the output channels of a convolution, `module.stacked_matrices = True` makes the 3-D parameters of a module
stacks of (out, in) matrices (`= "in_out"` for stacks of (in, out)), and `layer.is_head = True` marks an output layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import conv
from torch.nn.parameter import UninitializedParameter

from fire_core.errors import UserError
from fire_core.targets.architectures import NORMS, Layout, Place, class_name, each_row, layout_of
from fire_core.targets.rows import Parts, Traced, trace_rows
from fire_core.targets.table import ATTENTION, Target, TargetTable, choose, names, role_of, selector, shorten

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")
TOKENS = "pos_embed cls_token dist_token reg_token position_embedding mask_token class_embedding"
ADDED = set(TOKENS.split())
EVERYTHING = slice(None)
OF_ZERO = (
    "on another rank, where DeepSpeed ZeRO stage 3 keeps it: call this inside "
    "deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)"
)
OF_FSDP1 = "cut by FullyShardedDataParallel: call this inside summon_full_params(model, writeback=True), or use FSDP2"
REPARAMETRISED = "beside the weight: a gain, or part of a reparametrised weight (weight_norm): remove the reparametrisation"
DEPTHWISE = "depthwise convolution: each filter sees one channel, so there is no matrix"
TABLE = "embedding table: rows are looked up, not multiplied (tied to no Linear)"


def find_targets(
    model: nn.Module,
    targets: str | Sequence[str] | Callable[[Target], bool] = "all",
    *,
    example: Any = None,
) -> TargetTable:
    """Return a table of every matrix and every other parameter of `model`, with `included` set by the rule `targets`.

    A rule chooses among matrices. Biases, norm layers, embeddings that are not tied to a Linear layer and other
    parameters without matrices stay out whatever the rule is, each with its reason. So do weights that may hold several
    matrices (a fused q/k/v, a gate) in an order that is not known.

    Args:
        targets: a preset (`"all"`, `"linear"`, `"conv"`, `"qk"`, `"attention"`, `"mlp"`, `"head"`, `"embedding"`, or
            `"no_"` before any of them); a wildcard pattern over parameter, module or target names (`"layer1.*"`); a
            list or comma-separated string of these (one match is enough; a leading `-` excludes, and so does a `"no_"`
            preset in a list); a list of `Target`; or a callable(Target) -> bool.
        example: a batch on which the model is run once, in evaluation mode: a tensor, a tuple of arguments, or a dict of
            keyword arguments. It shows how fused weights are cut and which layers are the heads.
    Raises: UserError if a pattern matches nothing or no matrix is left, for `"head"` where the output layers are not
        known, for a declaration that the example refutes, and for parameters that are lazy or overlap in memory.
    """
    return choose(list_targets(model, example=example), targets, type(model).__name__)


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


def list_targets(model: nn.Module, *, example: Any = None) -> TargetTable:
    """Return the table of all targets of `model` before any rule; arguments and errors as in `find_targets`.

    Every matrix is included unless it is frozen while other parameters train.
    """
    check_module(model)
    traced = None if example is None else trace_rows(model, example)
    modules = dict(model.named_modules())
    owners: dict[object, list[tuple[str, str]]] = {}  # of each parameter; a tied one has several
    for path, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if isinstance(parameter, UninitializedParameter):
                name = f"{path}.{attribute}".lstrip(".")
                raise UserError(
                    f"parameter {name!r} is lazy and not initialised: run one batch through the model first"
                )
            if parameter is not None:
                owners.setdefault(identity(parameter), []).append((path, attribute))
    heads, table = _heads(model, modules, traced), TargetTable()
    table.head_known = heads is not None
    found = [_place(modules, owned, heads or set()) for owned in owners.values()]
    some_train = any(place.parameter.requires_grad for place in found)
    refuse_overlaps({place.parameter_name: place.parameter for place in found})
    for place in found:
        for target in _split(place, traced):
            if target.included and some_train and not place.parameter.requires_grad:
                reason = "frozen (requires_grad is False while other parameters train)"
                target = replace(target, included=False, reason=reason)
            table.append(target)
    return table


def _target(
    place: Place, kind: str, reason: str, *, part: str = "", label: str = "", taps: int = 1, **block: Any
) -> Target:
    """Return the target of one parameter without matrices, or of one `block` of it, which is included.

    part: of a fused layer; "q", or "q.0" head by head, is its role. label: what the target's name has in brackets.
    """
    shape, role = block.get("shape", ()), role_of(place.name, (*place.parents, place.module))
    if part.split(".")[0] in ATTENTION:
        role = part.split(".")[0]
    elif part and role in ATTENTION:
        role = "attention"
    elif place.head:
        role = "head"
    return Target(
        name=f"{place.name}[{label}]" if label else place.name,
        parameter=place.parameter_name,
        kind=kind,
        scale=math.sqrt(shape[0] / shape[1]) / taps if shape else 1.0,
        included=bool(block),
        reason=reason,
        role=role,
        module=place.path,
        aliases=place.aliases,
        tied=place.tied,
        **block,
    )


def _split(place: Place, traced: Traced | None) -> Iterator[Target]:
    """Yield the targets in one parameter: at least one, included or not."""
    module, dim, is_weight = place.module, place.parameter.dim(), place.attribute == "weight"
    if (skipped := _skipped(place)) is not None:
        yield _target(place, *skipped)
    elif (layout := layout_of(place, traced)).why_out:
        yield _target(place, layout.kind, layout.why_out)
    elif dim == 3 and getattr(module, "stacked_matrices", False):
        transposed, why = module.stacked_matrices == "in_out", f"one member of {class_name(module)}"
        yield from _blocks(place, Layout(transposed=transposed, kind="ensemble", why=why))
    elif isinstance(module, conv._ConvNd) and is_weight:
        fused = layout.parts and (module.groups > 1 or isinstance(module, conv._ConvTransposeNd))
        if module.groups > 1 and module.in_channels == module.groups:
            yield _target(place, "conv", DEPTHWISE)
        elif fused:
            yield _target(place, "conv", "fused parts of a grouped or transposed convolution are not known")
        else:
            yield from _taps(place, module, layout)
    elif layout.why and dim in (2, 3):
        yield from _blocks(place, layout)
    elif isinstance(module, nn.Linear | conv._ConvNd) and not is_weight:
        yield _target(place, "other", REPARAMETRISED)
    elif isinstance(module, nn.Linear) and dim == 2:
        yield from _blocks(place, replace(layout, why=f"weight of {class_name(module)}"))
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        yield _target(place, "embedding", TABLE)
    elif hasattr(module, "cannot_tell"):
        yield _target(place, "unclear", str(module.cannot_tell))
    else:
        declared = {3: "stacked_matrices", 2: "fused_rows" if is_weight else ""}.get(dim, "")
        advice = f" (set {declared} on the module to put it in)" if declared else ""
        known = f"{class_name(module)}, not a known layer{advice}"
        if type(module) is nn.Module:  # of a file: see `skeleton`
            known = "a layer that a file does not show (pass --model)"
        yield _target(place, "other", f"{dim}-D parameter of {known}")


def _skipped(place: Place) -> tuple[str, str] | None:
    """Return the kind of a parameter that holds no matrix in any layer, with the reason, or None."""
    module, parameter, attribute = place.module, place.parameter, place.attribute
    owners, around = (*place.parents, module), (module, *place.parents[-1:])
    if not is_plain(parameter) and not hasattr(parameter, "full_tensor"):  # its dtype is that of dequantize()
        return "other", f"stored as {type(parameter).__name__}: only plain weights can be treated"
    if getattr(parameter, "ds_shape", parameter.shape) != parameter.shape:
        return "unclear", OF_ZERO
    if any(type(each).__name__ == "FullyShardedDataParallel" for each in owners) and parameter.dim() < 2:
        return "unclear", OF_FSDP1
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
        return "other", f"stored as {parameter.dtype}: only real floating-point weights can be treated"
    if parameter.layout is not torch.strided:
        return "other", f"{parameter.layout}: only dense weights can be treated"
    if overlaps_itself(parameter):
        return "other", "expanded or overlapping: several entries share one place in memory"
    if any(word.startswith("lora_") for word in place.name.split(".")):
        return "lora", "low-rank adapter: the product B A is the update, neither factor is a layer's matrix"
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
    return ("scale", f"{parameter.dim()}-D parameter: a vector") if parameter.dim() <= 1 else None


def _blocks(place: Place, layout: Layout) -> Iterator[Target]:
    """Yield the parts of each matrix of a parameter; a 3-D parameter is a stack of matrices."""
    outputs, inputs = place.parameter.shape[-2:]
    if layout.transposed:
        outputs, inputs = inputs, outputs
    stack = [(i,) for i in range(len(place.parameter))] if place.parameter.dim() == 3 else [()]
    for lead, (name, rows) in itertools.product(stack, layout.parts or (("", EVERYTHING),)):
        cut = (*([EVERYTHING] if layout.transposed else []), rows) if name else ()
        yield _target(
            place,
            layout.kind,
            layout.why,
            label=",".join([*map(str, lead), *([name] if name else [])]),
            index=(*lead, *cut),
            transposed=layout.transposed,
            shape=(len(each_row(rows)) if name else outputs, inputs),
            part=name,
        )


def _taps(place: Place, module: conv._ConvNd, layout: Layout) -> Iterator[Target]:
    """Yield one matrix (out / groups, in / groups) per group, or part of a fused layer, and spatial tap."""
    shape, groups, transposed = (
        place.parameter.shape,
        module.groups,
        isinstance(module, conv._ConvTransposeNd),
    )
    why = f"one tap of {class_name(module)}" + (f", {layout.why}" if layout.parts else "")
    parts: Parts = layout.parts or (("", slice(0, shape[0])),)
    if groups > 1:
        why, first = f"{why}, one group", shape[0] // groups
        parts = tuple((f"group {g}", slice(g * first, (g + 1) * first)) for g in range(groups))
    for (part, rows), tap in itertools.product(parts, itertools.product(*map(range, shape[2:]))):
        sides = (len(each_row(rows)), shape[1])
        yield _target(
            place,
            "conv",
            why,
            label=",".join([*([part] if part else []), *map(str, tap)]),
            taps=math.prod(shape[2:]),
            index=(rows if part else EVERYTHING, EVERYTHING, *tap),
            transposed=transposed,
            shape=sides[::-1] if transposed else sides,
            part=part if layout.parts else "",
        )


def _place(modules: dict[str, nn.Module], owned: list[tuple[str, str]], heads: set[str]) -> Place:
    """Return the place of one parameter; a tied one is placed in its Linear layer, not its Embedding."""
    path, attribute = min(owned, key=lambda owner: isinstance(modules[owner[0]], nn.Embedding))
    names, words = [f"{p}.{a}" if p else a for p, a in owned], path.split(".") if path else []
    module, holders = modules[path], [modules[p] for p, _ in owned]
    return Place(
        path=path,
        attribute=attribute,
        name=f"{path}.{attribute}" if path else attribute,
        module=module,
        parents=tuple(modules[".".join(words[:length])] for length in range(len(words))),
        parameter=module._parameters[attribute],  # type: ignore[arg-type]
        parameter_name=names[0],
        aliases=tuple(dict.fromkeys([*names, *map(unwrapped, names)])),
        tied=not isinstance(module, nn.Embedding) and any(isinstance(m, nn.Embedding) for m in holders),
        head=path in heads,
    )


def unwrapped(name: str) -> str:
    """Return a parameter name without the prefixes of DDP, torch.compile, FSDP and activation checkpointing."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "") if wrapper != "module." else name.removeprefix(wrapper)
    return name


def inside(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the module inside the wrappers around `model`, and what they put before the names of its parameters."""
    prefix = ""
    while True:
        name = "module" if isinstance(model, nn.parallel.DistributedDataParallel) else "_orig_mod"
        inner = getattr(model, name, None)
        if not isinstance(inner, nn.Module):
            return model, prefix
        model, prefix = inner, f"{prefix}{name}."


def _heads(model: nn.Module, modules: dict[str, nn.Module], traced: Traced | None) -> set[str] | None:
    """Return the paths of the output layers, or None where they are not known.

    Those are the layers that are declared (`is_head`), else the Linear layers that the model itself names, else the
    Linear tied to an embedding, else those that an example shows, else the end of a plain nn.Sequential, which runs in
    the order of its layers.
    """
    if declared := {path for path, module in modules.items() if getattr(module, "is_head", False)}:
        return declared
    for question in ("get_output_embeddings", "get_classifier"):
        answers = _ask(model, question)
        if answers and all(isinstance(layer, nn.Linear) for layer in answers):
            return {path for path, module in modules.items() if any(module is layer for layer in answers)}
        if answers and not any(isinstance(part, nn.Linear) for layer in answers for part in layer.modules()):
            return set()  # the model has no output layer, such as timm with num_classes=0
    # not m.weight: where spectral_norm computes it, reading it changes the state of the computation
    weights = {path: m._parameters.get("weight") for path, m in modules.items()}
    tables = {id(weights[p]) for p, m in modules.items() if isinstance(m, nn.Embedding)} - {id(None)}
    layers = [p for p, m in modules.items() if isinstance(m, nn.Linear)]
    tied = [p for p in layers if id(weights[p]) in tables]
    if tied:
        return {tied[-1]}
    if traced is not None and traced.heads:
        return {p for p, m in modules.items() if any(id(w) in traced.heads for w in m._parameters.values())}
    last = _last(model)
    return None if last is None else {path for path, module in modules.items() if module is last}


def _last(module: nn.Module) -> nn.Module | None:
    """Return the Linear that runs last in a plain nn.Sequential, compiled or not, or None."""
    if isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        return _last(inner)
    if type(module).forward is nn.Sequential.forward:
        layers = [child for child in module if any(p.dim() > 1 for p in child.parameters())]  # type: ignore[attr-defined]
        return _last(layers[-1]) if layers else None
    return module if isinstance(module, nn.Linear) else None


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


# ------------------------------------------------------------------------------------------------ memory of weights
def identity(parameter: Tensor) -> object:
    """Return a key that is equal for one Parameter found twice and for two with the same memory, shape and strides."""
    if not _in_memory(parameter):
        return id(parameter)
    return (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.device)


def refuse_overlaps(tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError for different tensors over one range of memory. Tied ones must be given once."""
    reached: dict[torch.device, tuple[int, str]] = {}
    for start, name, tensor in sorted((t.data_ptr(), n, t) for n, t in tensors.items() if _in_memory(t)):
        end, other = reached.get(tensor.device, (0, ""))
        if start < end:
            raise UserError(
                f"parameters {other!r} and {name!r} overlap in memory, and are neither one tied parameter nor apart: give "
                "one of them memory of its own, as in layer.weight = nn.Parameter(layer.weight.detach().clone())"
            )
        reached[tensor.device] = (start + _reach(tensor) * tensor.element_size(), name)


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether a tensor has more entries than places in memory, as after `expand`."""
    return _in_memory(tensor) and _reach(tensor) < tensor.numel()


def _reach(tensor: Tensor) -> int:
    """Return the number of entries from the first place in memory to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's class leaves PyTorch's operations as they are, unlike those of quantised weights."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _in_memory(tensor: Tensor) -> bool:
    return is_plain(tensor) and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
