"""Splitting of parameters into matrices, one function per kind of layer, and the list of all targets of a model.

Sizes are always read from the module. A layer that looks fused but whose parts are not known is left out, with the
reason. Your own model can declare them: `layer.fused_rows = {"q": 768, "k": 128, "v": 128}` on a Linear splits its
rows, and `module.stacked_matrices = True` makes the 3-D parameters of a module stacks of (out, in) matrices
(`= "in_out"` for stacks of (in, out)).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules import conv

from fire_core.errors import UserError
from fire_core.targets.architectures import ADDED, STATE_SPACE, known_layout
from fire_core.targets.memory import sharing
from fire_core.targets.roles import ATTENTION, role_of
from fire_core.targets.table import Layout, Part, Place, Target, TargetTable
from fire_core.targets.walk import NORMS, check_module, class_name, places

EVERYTHING = slice(None)
RECURRENT = re.compile(r"weight_(ih|hh|hr)_l\d+(_reverse)?")
REPARAMETRISED = "beside the weight: a gain, or part of a reparametrised weight (weight_norm): remove the reparametrisation"


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
        for part in split(place):
            reason = ""
            if part.included and some_train and not place.parameter.requires_grad:
                reason = "frozen (requires_grad is False while other parameters train)"
            elif part.included and over:
                reason = f"lies over the memory of {over[0]}, which is treated"
            elif part.included:
                treated.add(place.parameter_name)
            table.append(_target(place, part, reason))
    return table


def _target(place: Place, part: Part, why_out: str) -> Target:
    shape, scale = part.shape, 1.0
    if shape:
        scale = math.sqrt(shape[0] / shape[1]) / part.taps
    name = f"{place.name}[{part.label}]" if part.label else place.name
    return Target(
        name=name,
        parameter=place.parameter_name,
        kind=part.kind,
        index=part.index,
        transposed=part.transposed,
        shape=shape,
        scale=scale,
        included=part.included and not why_out,
        reason=why_out or part.reason,
        role=part.role,
        module=place.path,
        aliases=place.aliases,
        tied=place.tied,
    )


def split(place: Place) -> list[Part]:
    """Return the parts of one parameter: at least one, included or not."""
    role = "head" if place.head else role_of(place.name, (*place.parents, place.module))
    return [part if part.role or not role else replace(part, role=role) for part in _split(place)]


def _split(place: Place) -> Iterator[Part]:
    module, parameter = place.module, place.parameter
    skipped = _skipped(place)
    layout = known_layout(place) if skipped is None and parameter.dim() >= 2 else None
    if skipped is not None:
        yield skipped
    elif parameter.dim() == 3 and getattr(module, "stacked_matrices", False):
        why = f"one member of {class_name(module)}"
        yield from _known(
            place, Layout(transposed=module.stacked_matrices == "in_out", kind="ensemble", why=why)
        )
    elif layout is not None and parameter.dim() in (2, 3):
        yield from _known(place, layout)
    elif isinstance(module, nn.Linear | conv._ConvNd) and place.attribute != "weight":
        yield Part("other", REPARAMETRISED)
    elif isinstance(module, nn.Linear) and parameter.dim() == 2:
        yield Part("linear", f"weight of {class_name(module)}", True, shape=tuple(parameter.shape))
    elif isinstance(module, conv._ConvNd):
        yield from _conv(module, parameter)
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        yield Part("embedding", "embedding table: rows are looked up, not multiplied (tied to no Linear)")
    elif hasattr(module, "cannot_tell"):
        yield Part(str(module.kind), str(module.cannot_tell))
    elif isinstance(module, nn.RNNBase):
        yield from _recurrent(module, place.attribute, parameter)
    else:
        shape = f"{parameter.dim()}-D parameter of"
        if type(module) is nn.Module:  # of a file: see `skeleton`
            yield Part("other", f"{shape} a layer that a file does not show (pass --model)")
        else:
            yield Part("other", f"{shape} {class_name(module)}, not a known layer{_advice(place)}")


def _advice(place: Place) -> str:
    """Return a hint on how the user can include a parameter of an unknown layer."""
    if place.parameter.dim() == 3:
        return " (set stacked_matrices on the module to put it in)"
    if place.parameter.dim() == 2 and place.attribute == "weight":
        return " (set fused_rows on the module to put it in)"
    return ""


def _skipped(place: Place) -> Part | None:
    """Return the part of a parameter that holds no matrix in any layer, with the reason, or None."""
    module, parameter, attribute = place.module, place.parameter, place.attribute
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
        return Part("other", f"stored as {parameter.dtype}: only real floating-point weights can be treated")
    if parameter.layout is not torch.strided:
        return Part("other", f"{parameter.layout}: only dense weights can be treated")
    if any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape)):
        return Part(
            "other", "expanded: several entries share one place in memory and cannot be changed separately"
        )
    if any(word.startswith("lora_") for word in place.name.split(".")):
        return Part(
            "lora", "low-rank adapter: the product B A is the update, neither factor is a layer's matrix"
        )
    leaf = place.path.rpartition(".")[2]
    for word in (attribute, leaf):
        owners = (module, *place.parents[-1:]) if word in STATE_SPACE else ()
        if any(hasattr(owner, "A_log") and hasattr(owner, word) for owner in owners):
            return Part("state_space", STATE_SPACE[word])
    if attribute in ADDED:
        return Part("embedding", "learned token or position: added, not multiplied")
    if "bias" in attribute:
        return Part("bias", "bias: a vector")
    if parameter.numel() == 0:
        return Part("other", "empty parameter")
    if isinstance(module, NORMS) or ("norm" in class_name(module).lower() and parameter.dim() <= 1):
        return Part("norm", f"gain of {class_name(module)}")
    if "parametrizations" in place.name:
        return Part(
            "other", "parametrised weight: remove the parametrisation, or treat it where it is computed"
        )
    if parameter.dim() <= 1:
        return Part("scale", f"{parameter.dim()}-D parameter: a vector")
    return None


def _known(place: Place, layout: Layout) -> Iterator[Part]:
    """Yield the parts of a parameter with a known layout: fused rows, transposed storage, stacks of experts."""
    parameter = place.parameter
    if layout.why_out:
        yield Part(layout.kind, layout.why_out)
    elif parameter.dim() == 3:
        for i in range(parameter.shape[0]):
            yield from _blocks(place, layout, (i,), tuple(parameter.shape[1:]))
    else:
        yield from _blocks(place, layout, (), tuple(parameter.shape))


def _blocks(place: Place, layout: Layout, lead: tuple, stored: tuple[int, ...]) -> Iterator[Part]:
    """Yield the row blocks of one stored matrix, or blocks of columns with `layout.transposed`."""
    outputs, inputs = reversed(stored) if layout.transposed else stored
    prefix = [str(i) for i in lead]
    if not layout.sizes:
        yield Part(
            layout.kind, layout.why, True, ",".join(prefix), lead, layout.transposed, (outputs, inputs)
        )
        return
    if layout.total != outputs:
        sizes = " + ".join(f"{name} {size}" for name, size in layout.sizes)
        raise UserError(
            f"{place.name!r} has {outputs} output rows, but its parts add up to {layout.total} ({sizes}): "
            "correct fused_rows on the module"
        )
    whole = role_of(place.name, (*place.parents, place.module))
    for name, picked, size in layout.picks():
        index = (*lead, EVERYTHING, picked) if layout.transposed else (*lead, picked)
        why = layout.left_out.get(name, layout.why)
        head_by_head = name.split(".")[0]
        role = head_by_head if head_by_head in ATTENTION else "attention" if whole in ATTENTION else ""
        label = ",".join([*prefix, name])
        included = name not in layout.left_out
        if included and lead and layout.transposed and isinstance(picked, list):
            included, why = False, "scattered columns of a stack: no single view"
        yield Part(layout.kind, why, included, label, index, layout.transposed, (size, inputs), 1, role)


def _conv(module: conv._ConvNd, parameter: torch.Tensor) -> Iterator[Part]:
    """Yield one part per group and spatial tap of a convolution, of shape (out / groups, in / groups).

    A depthwise convolution, whose groups have one input channel each, holds no matrix: every block is a single column.
    """
    if module.groups > 1 and module.in_channels == module.groups:
        yield Part("conv", "depthwise convolution: each filter sees one channel, so there is no matrix")
        return
    transposed, first = isinstance(module, conv._ConvTransposeNd), parameter.shape[0] // module.groups
    taps = math.prod(parameter.shape[2:])
    shape = (parameter.shape[1], first) if transposed else (first, parameter.shape[1])
    why = f"one tap of {class_name(module)}" + (", one group" if module.groups > 1 else "")
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
    """Yield one part per gate of a recurrent weight; torch stacks the gates in the order of its documentation."""
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
        yield Part("recurrent", f"weight of {class_name(module)}", True, gate, index, False, (size, inputs))
