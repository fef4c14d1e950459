"""The targets of a model: every parameter in its place, cut into matrices as `architectures` tells.

Your own model can declare what no rule can know: `layer.fused_rows = {"q": 768, "k": 128, "v": 128}` splits the rows of a
Linear or the output channels of a convolution, `module.stacked_matrices = True` makes the 3-D parameters of a module
stacks of (out, in) matrices (`= "in_out"` for stacks of (in, out)), and `layer.is_head = True` marks an output layer.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fire_core.errors import UserError
from fire_core.targets.architectures import NORMS, Layout, Place, layout_of, own_class
from fire_core.targets.rows import Traced, trace_rows
from fire_core.targets.table import ATTENTION, Target, TargetTable, choose, names, role_of, select, shorten

TOKENS = "pos_embed cls_token dist_token reg_token position_embedding mask_token class_embedding"
ADDED = set(TOKENS.split())
EVERYTHING = slice(None)
HEADS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # of classifiers; those of images may be convolutions
OF_ZERO = (
    "on another rank, where DeepSpeed ZeRO stage 3 keeps it: call this inside "
    "deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)"
)
OF_FSDP1 = "cut by FullyShardedDataParallel: call this inside summon_full_params(model, writeback=True), or use FSDP2"
LORA = "low-rank adapter: the product B A is the update, neither factor is a layer's matrix"
PARAMETRISED = "parametrised weight: remove the parametrisation, or treat it where it is computed"
FROZEN = "frozen (requires_grad is False while other parameters train)"


def find_targets(
    model: nn.Module, targets: str | Sequence[str] | Callable[[Target], bool] = "all", *, example: Any = None
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
    layers = ("unclear", "conv")  # with all of their matrices
    whole = TargetTable(replace(t, included=t.reason != FROZEN) if t.kind in layers else t for t in table)
    whole.head_known = table.head_known
    modules = {target.module for target in select(whole, rule, matrices_only=False)}
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
                raise UserError(f"parameter {name!r} is lazy: run one batch through the model first")
            if parameter is not None:
                owners.setdefault(identity(parameter), []).append((path, attribute))
    heads, table = _heads(inside(model)[0], modules, traced), TargetTable()
    table.head_known = heads is not None
    places = [_place(modules, owned, heads or set()) for owned in owners.values()]
    refuse_overlaps({place.whole.parameter: place.parameter for place in places})
    some_train = any(place.parameter.requires_grad for place in places)
    for place in places:
        frozen = some_train and not place.parameter.requires_grad
        for target in _targets(place, _without_matrix(place) or layout_of(place, traced)):
            leave = frozen and (target.included or target.kind in ("unclear", "conv"))
            table.append(replace(target, included=False, reason=FROZEN) if leave else target)
    return table


def _place(modules: dict[str, nn.Module], owned: list[tuple[str, str]], heads: set[str]) -> Place:
    """Return the place of one parameter; a tied one is placed in its Linear layer, not its Embedding."""
    path, attribute = min(owned, key=lambda owner: isinstance(modules[owner[0]], nn.Embedding))
    module, words = modules[path], path.split(".") if path else []
    parents = tuple(modules[".".join(words[:length])] for length in range(len(words)))
    name, *names = (f"{p}.{a}".lstrip(".") for p, a in [(path, attribute), *owned])
    aliases = tuple(dict.fromkeys([*names, *map(unwrapped, names)]))
    role = "head" if path in heads else role_of(name, (*parents, module))
    in_table = any(isinstance(modules[p], nn.Embedding) for p, _ in owned)
    tied = in_table and not isinstance(module, nn.Embedding)
    whole = Target(name, names[0], role=role, module=path, aliases=aliases, tied=tied)
    return Place(module, attribute, module._parameters[attribute], parents, whole)  # type: ignore[arg-type]


def _without_matrix(place: Place) -> Layout | None:
    """Return why a parameter holds no matrix, whatever its layer is, or None."""
    module, name, kind = place.module, place.whole.name, own_class(place.module).__name__
    p: Any = place.parameter
    owners, can = (*place.parents, module), "weights can be treated"
    # a class of its own, as of quantised weights, whose dtype is that of dequantize(); DTensor has one, too
    plain = type(p).__torch_dispatch__ is Tensor.__torch_dispatch__ or hasattr(p, "full_tensor")
    real = p.dtype.is_floating_point and p.dtype.itemsize >= 2
    fsdp1 = any(type(m).__name__ == "FullyShardedDataParallel" for m in owners)
    state_space = any(hasattr(m, "A_log") for m in owners[-2:]) and not hasattr(module, "fused_rows")
    gain = isinstance(module, NORMS) or (p.dim() <= 1 and "norm" in kind.lower())
    reasons = (
        (not plain, "other", f"stored as {type(p).__name__}: only plain {can}"),
        (getattr(p, "ds_shape", p.shape) != p.shape, "unclear", OF_ZERO),
        (fsdp1 and p.dim() < 2, "unclear", OF_FSDP1),
        (not real, "other", f"stored as {p.dtype}: only real floating-point {can}"),
        (p.layout is not torch.strided, "other", f"{p.layout}: only dense {can}"),
        (overlaps_itself(p), "other", "expanded or overlapping: several entries share one place in memory"),
        (re.search(r"[._]lora(?=[._A-Z]|$)", f".{name}") is not None, "lora", LORA),
        (state_space, "state_space", "in a state-space block, whose fused parts are not known"),
        (place.attribute in ADDED, "embedding", "learned token or position: added, not multiplied"),
        ("bias" in place.attribute, "bias", "bias: a vector"),
        (p.numel() == 0, "other", "empty parameter"),
        (gain, "norm", f"gain of {kind}"),
        ("parametrizations" in name, "other", PARAMETRISED),
        (p.dim() <= 1, "scale", f"{p.dim()}-D parameter: a vector"),
    )
    return next((Layout(kind, why, included=False) for applies, kind, why in reasons if applies), None)


def _targets(place: Place, layout: Layout) -> Iterator[Target]:
    """Yield the matrices of a parameter: each member of a stack, group or part of the rows, and spatial tap."""
    whole, shape, is_convolution = place.whole, place.parameter.shape, layout.kind == "conv"
    if not layout.included:
        yield replace(whole, kind=layout.kind, reason=layout.why)
        return
    stack = [(i,) for i in range(shape[0])] if len(shape) == 3 and not is_convolution else [()]
    taps = list(itertools.product(*map(range, shape[2:]))) if is_convolution else [()]
    for lead, (part, rows), tap in itertools.product(stack, layout.parts or (("", EVERYTHING),), taps):
        sides = list(shape[:2] if is_convolution else shape[-2:])
        side = int(layout.transposed and not is_convolution)  # that rows are cut from
        if part:
            sides[side] = len(rows)
            rows = slice(rows.start, rows.stop) if isinstance(rows, range) else rows  # slices give views
        outputs, inputs = reversed(sides) if layout.transposed else sides
        cut = (rows, EVERYTHING) if is_convolution else (EVERYTHING,) * side + (rows,) if part else ()
        label = ",".join([*map(str, lead), *([part] if part else []), *map(str, tap)])
        role = part.partition(".")[0]  # of "q.0"
        if role not in ATTENTION:
            fused = part and not part.startswith("group ")
            role = "attention" if fused and whole.role in ATTENTION else whole.role
        yield replace(
            whole,
            name=f"{whole.name}[{label}]" if label else whole.name,
            kind=layout.kind,
            scale=math.sqrt(outputs / inputs) / len(taps),
            included=True,
            reason=layout.why,
            index=(*lead, *cut, *tap),
            transposed=layout.transposed,
            shape=(outputs, inputs),
            role=role,
        )


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

    Those are the layers that are declared (`is_head`), else the classifier that the model itself names, else the
    Linear tied to an embedding, else those that an example shows, else the end of a plain nn.Sequential.
    """
    if declared := {path for path, module in modules.items() if getattr(module, "is_head", False)}:
        return declared
    for question in ("get_output_embeddings", "get_classifier"):
        answer: Any = None
        with suppress(NotImplementedError, AttributeError, TypeError):
            answer = getattr(model, question)()
        # distilled models of timm have two
        several = answer if isinstance(answer, tuple | list) else [answer]
        layers = [layer for layer in several if isinstance(layer, nn.Module)]
        if layers and all(isinstance(layer, HEADS) for layer in layers):
            return {path for path, module in modules.items() if module in layers}
        if layers and not any(isinstance(part, HEADS) for layer in layers for part in layer.modules()):
            return set()  # the model has no output layer, such as timm with num_classes=0
    # not m.weight: where spectral_norm computes it, reading it changes the state of the computation
    weights = {path: m._parameters.get("weight") for path, m in modules.items()}
    tables = {id(weights[p]) for p, m in modules.items() if isinstance(m, nn.Embedding)} - {id(None)}
    if tied := [p for p, m in modules.items() if isinstance(m, nn.Linear) and id(weights[p]) in tables]:
        return {tied[-1]}
    if traced is not None and traced.heads:
        return {p for p, m in modules.items() if any(id(w) in traced.heads for w in m._parameters.values())}
    last = _last(model)
    return None if last is None else {path for path, module in modules.items() if module is last}


def _last(module: nn.Module) -> nn.Module | None:
    """Return the Linear that runs last in a plain nn.Sequential, or None."""
    module = inside(module)[0]
    if type(module).forward is nn.Sequential.forward:
        layers = [child for child in module if any(p.dim() > 1 for p in child.parameters())]  # type: ignore[attr-defined]
        return _last(layers[-1]) if layers else None
    return module if isinstance(module, nn.Linear) else None


def check_module(model: object) -> None:
    """Raise UserError for anything but a torch module, and for a TorchScript module, whose layers cannot be told apart."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise UserError(
            f"model is a {type(model).__name__}, not an ordinary torch module: give the module itself, before "
            "torch.jit.script; for one matrix use fire_core.project_, for a file of weights `fire-core apply`"
        )


def unwrapped(name: str) -> str:
    """Return a parameter name without the prefixes of DDP, torch.compile, FSDP and activation checkpointing."""
    inner = re.sub(r"_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.", "", name)
    return inner.removeprefix("module.")


def identity(parameter: Tensor) -> object:
    """Return a key that is equal for one Parameter found twice and for two with the same memory, shape and strides."""
    if not _in_memory(parameter):
        return id(parameter)
    return (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.device)


def refuse_overlaps(tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError for different tensors over one range of memory. Tied ones must be given once."""
    held = [(name, t) for name, t in tensors.items() if _in_memory(t)]
    spans = sorted((str(t.device), t.data_ptr(), name, _reach(t) * t.element_size()) for name, t in held)
    for (device, start, other, size), (next_device, next_start, name, _) in itertools.pairwise(spans):
        if device == next_device and next_start < start + size:
            raise UserError(
                f"parameters {other!r} and {name!r} overlap in memory, and are neither one tied parameter nor apart: give "
                "one of them memory of its own, as in layer.weight = nn.Parameter(layer.weight.detach().clone())"
            )


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether a tensor has more entries than places in memory, as after `expand`."""
    return _in_memory(tensor) and _reach(tensor) < tensor.numel()


def _reach(tensor: Tensor) -> int:
    """Return the number of entries from the first place in memory to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _in_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has a range of memory: not one of a class of its own, such as a quantised weight."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
