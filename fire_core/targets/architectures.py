"""Which weights hold several matrices, and in which order their rows lie.

The order is known where a module declares it, where a run on an example shows it (`trace`), and for the classes in
known_layers.csv, whose code was read. It is never concluded from a name or a shape: these can only show that a weight
*may* hold several matrices, and such a weight is left out, with the reason.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib.resources import files
from math import prod
from typing import Any

from torch import nn
from torch.nn.modules import batchnorm, conv, instancenorm

from fire_core.errors import UserError
from fire_core.targets.rows import Parts, Rows, Traced
from fire_core.targets.table import role_of, shorten

NORMS = (
    *(batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    nn.LocalResponseNorm,
)
FUSED = re.compile(
    r"kvq|(?<![a-z])w?(kv|qk|q_k|k_v)(?![a-z])|q_?k_?v|query_key|key_value|w_?pack|c_attn|att_proj|in_proj|w_?12|w_?13"
    r"|gate_?(and_)?up|up_?gate|fused|packed"
)
"""Names of weights that hold several matrices in some models, at any place of the path."""
GATED = re.compile(r"gate|gating|glu(?![a-z])")
"""Names of gates, of which some are stored together with what they multiply."""
Width = tuple[int, int, bool]  # outputs and inputs of a layer, and whether it is a norm
INTERLEAVED = "interleaved gate and up halves: set stacked_matrices to treat them whole"


@dataclass(frozen=True)
class Place:
    """The place of a parameter in a model: the module that holds it, that module's parents, and its names.

    path: name of the module. name: of the parameter under `path`. parameter_name: that in `model.named_parameters()`, which
    is another one if the parameter is tied. parents: outermost first. aliases: all names, with and without the prefixes of
    wrappers. tied: also held by an Embedding. head: output layer.
    """

    path: str
    attribute: str
    name: str
    module: nn.Module
    parents: tuple[nn.Module, ...]
    parameter: nn.Parameter
    parameter_name: str
    aliases: tuple[str, ...]
    tied: bool
    head: bool


@dataclass(frozen=True)
class Layout:
    """How the output rows of one weight are divided into parts.

    parts: (name, rows) of each; if empty, the weight is one matrix. transposed: stored as (in, out). why: the reason that
    targets give. why_out: if not empty, the reason that the whole weight is left out.
    """

    parts: Parts = ()
    transposed: bool = False
    kind: str = "linear"
    why: str = ""
    why_out: str = ""


def each_row(rows: Rows) -> Sequence[int]:
    """Return the numbers of rows."""
    return range(rows.start, rows.stop) if isinstance(rows, slice) else rows


def in_order(sizes: Mapping[str, int]) -> Parts:
    """Return parts of the given numbers of rows, one after the other."""
    start, parts = 0, []
    for name, size in sizes.items():
        parts.append((name, slice(start, start + size)))
        start += size
    return tuple(parts)


with files(__package__).joinpath("known_layers.csv").open(encoding="utf-8") as table:
    KNOWN = list(csv.DictReader(table))


def known_parts(owner: nn.Module, attribute: str, rows: int) -> Parts | None:
    """Return the parts of a layer of `owner` whose forward pass was read; () if it has no table of them, None if unknown.

    In known_layers.csv, a class is that whose forward pass was read, as package.file.class. `parts` are names in the order
    of the rows; a part with a size has it after "=" (attributes of the owner or of its config, multiplied), the others
    share the rest equally. The condition is an attribute that must be true, or false with "not" before it. Without parts,
    the rows are used in more ways than a table can say, and the weight is left out.
    """
    forward = type(owner).forward
    words = forward.__module__.split(".")
    read = f"{words[0]}.{words[-1].removeprefix('modeling_')}.{forward.__qualname__.removesuffix('.forward')}"
    for row in KNOWN:
        if (row["class"], row["attribute"]) != (read, attribute):
            continue
        if (when := row["when"]) and bool(getattr(owner, when.split()[-1])) == when.startswith("not "):
            continue
        pairs = [part.partition("=") for part in row["parts"].split()]
        sizes = {name: _value(owner, size) for name, _, size in pairs if size}
        share = (rows - sum(sizes.values())) // max(1, len(pairs) - len(sizes))
        sizes = {name: sizes.get(name, share) for name, _, _ in pairs}
        return in_order(sizes) if sum(sizes.values()) == rows or not sizes else None
    return None


def _value(owner: Any, text: str) -> int:
    """Return the value of "2", "head_dim", "heads*head_dim" or "in_split.1" (an entry of a list)."""

    def attribute(holder: Any, name: str) -> Any:
        if name.isdigit():
            return holder[int(name)]
        return getattr(holder, name, None) or getattr(holder.config, name)

    return prod(int(f) if f.isdigit() else reduce(attribute, f.split("."), owner) for f in text.split("*"))


def outputs_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (outputs, inputs) of a Linear, a convolution, or transformers' Conv1D with a weight of its own, else None."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() < 2:
        return None
    first, second = weight.shape[:2]
    if is_transposed(module) or isinstance(module, conv._ConvTransposeNd):
        return second * getattr(module, "groups", 1), first
    if isinstance(module, conv._ConvNd):
        return first, second * module.groups
    return (first, second) if isinstance(module, nn.Linear) else None


def is_transposed(module: nn.Module) -> bool:
    """Return whether the module is transformers' Conv1D, which stores (in, out)."""
    return hasattr(module, "nf") and any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def class_name(module: nn.Module) -> str:
    """Return the name of the class that the user wrote, without the prefix FSDP that FSDP2 adds."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if name.startswith("FSDP") and len(type(module).__mro__) > 2 else name


def layout_of(place: Place, traced: Traced | None) -> Layout:
    """Return the layout of a parameter of at least two dimensions.

    `fused_rows` of the module comes first, then what is known of its class, then `traced`. Raises UserError if
    `fused_rows` is not a dict of integers that add up to the rows.
    """
    module = place.module
    sizes = outputs_of(module) if place.attribute == "weight" else None
    transposed = sizes is not None and is_transposed(module)
    layout = Layout(transposed=transposed, why="weight of Conv1D, stored (in, out)" if transposed else "")
    if place.attribute == "weight" and hasattr(module, "fused_rows"):
        declared = _declared(place, sizes[0] if sizes else place.parameter.shape[-2])
        _prove(place, declared, traced)
        return replace(layout, parts=declared, why="part of a fused layer, as the module declares")
    if type(module) is nn.MultiheadAttention:
        if place.attribute == "in_proj_weight":
            return Layout(in_order(dict.fromkeys("qkv", module.embed_dim)), why="part of a fused q/k/v")
        return Layout(why=f"{place.attribute[0]} of MultiheadAttention")
    if sizes is None or not place.parents:
        return _of_experts(place) or layout
    parts = known_parts(place.parents[-1], place.path.rpartition(".")[2], sizes[0])
    key = id(place.parameter)
    if parts:
        return replace(layout, parts=parts, why=f"part of a fused {'/'.join(dict(parts))}")
    if traced is not None and not transposed:
        if key in traced.whole:
            return layout
        if key in traced.parts and getattr(module, "groups", 1) == 1:
            return replace(layout, parts=traced.parts[key], why="part of a fused layer, as the example shows")
    reason = may_be_fused(place, *sizes) if parts is None else "its class uses them in several ways"
    if not reason:
        return layout
    unseen = "give find_targets an example, or set fused_rows on the layer"
    if traced is not None:
        unseen = traced.unclear.get(key, "the example does not use it")
    elif type(place.parents[0]) is nn.Module:
        unseen = "which a file does not show (pass --model)"
    return replace(layout, kind="unclear", why_out=f"may hold several matrices ({reason}): {unseen}")


def may_be_fused(place: Place, outputs: int, inputs: int) -> str:
    """Return why a weight may hold several matrices, by its names and by what reads it, or "".

    The reader is looked for among the layers that are declared after this one, in the smallest module around it that has
    any other. A norm of the outputs counts as one that reads all of them.
    """
    path = place.path.lower()
    if outputs < 2 or getattr(place.module, "groups", 1) > 1:
        return ""
    if found := FUSED.search(path):
        return f"{found.group()} is in its name"
    leaf, role = path.rpartition(".")[2], role_of(place.name, place.parents)
    before, after = _neighbours(place)
    read_by_layers = {takes for _, takes, norm in after if not norm}
    if outputs not in {takes for _, takes, _ in after}:
        share = next((n for n in (2, 3) if outputs / n in read_by_layers), 0)
        plain = max(place.parameter.shape[2:], default=1) == 1 and (role != "o" or outputs > inputs)
        if share and plain:
            return f"its {outputs} outputs are {share} times what a later layer takes"
        named = re.match(r"(q|k|v|o|query|key|value)(_|$)", leaf)
        if role == "attention" and not named and after and outputs > max(inputs, after[0][1]):
            return f"in attention, with {outputs} outputs where the next layer takes {after[0][1]}"
    around = (*path.split(".")[-2:], type(place.parents[-1]).__name__.lower())
    is_reader = any(made % inputs == 0 for made, _, _ in before)
    if outputs not in read_by_layers and not is_reader and any(map(GATED.search, around)):
        return "a gate is in its name"
    three = role == "attention" and outputs == 3 * inputs
    return "three times as many outputs as inputs, in attention" if three else ""


def _neighbours(place: Place) -> tuple[list[Width], list[Width]]:
    """Return the layers before and after this one in the smallest module that has others."""
    for parent in reversed(place.parents):
        before: list[Width] = []
        after: list[Width] = []
        side = before
        for module in parent.modules():
            gain = module._parameters.get("weight")
            if module is place.module:
                side = after
            elif isinstance(module, NORMS) or "norm" in type(module).__name__.lower():
                side += [(len(gain), len(gain), True)] if gain is not None and gain.dim() == 1 else []
            elif sizes := outputs_of(module):
                side.append((*sizes, False))
        if before or after:
            return before, after
    return [], []


def _of_experts(place: Place) -> Layout | None:
    """Return the layout of routers and of stacks of experts in transformers, by what their modules say of themselves."""
    module, name = place.module, place.attribute
    if not type(module).__module__.startswith("transformers."):
        return None
    if place.parameter.dim() == 2:
        router = name == "weight" and "Router" in type(module).__name__
        return Layout(kind="router", why="router of experts") if router else None
    transposed = getattr(module, "is_transposed", None)
    if transposed is None or name not in ("gate_up_proj", "up_proj", "down_proj"):
        return None
    if name != "gate_up_proj":
        return Layout(transposed=transposed, kind="expert", why="one expert")
    half = place.parameter.shape[2 if transposed else 1] // 2
    out = "" if module.is_concatenated else INTERLEAVED
    halves = in_order({"gate": half, "up": half})
    return Layout(halves, transposed, kind="expert", why="gate or up half of one expert", why_out=out)


def _declared(place: Place, rows: int) -> Parts:
    """Return the parts that the user's `fused_rows` declares: a name and a number of rows for each."""
    declared: Any = place.module.fused_rows
    if not isinstance(declared, Mapping) or not all(
        type(size) is int and size > 0 for size in declared.values()
    ):
        raise UserError(
            f"fused_rows of {place.name!r} is {declared!r}: give a dict of part and number of rows, "
            'as in {"q": 768, "k": 128, "v": 128}'
        )
    if sum(declared.values()) != rows:
        sizes = " + ".join(f"{name} {size}" for name, size in declared.items())
        raise UserError(
            f"{place.name!r} has {rows} output rows, but its parts add up to {sum(declared.values())} ({sizes}): "
            "correct fused_rows on the module"
        )
    return in_order({str(name): size for name, size in declared.items()})


def _prove(place: Place, parts: Parts, traced: Traced | None) -> None:
    """Raise UserError if the example shows that rows of one declared part are used in different ways."""
    seen = traced.parts.get(id(place.parameter), ()) if traced is not None else ()
    used = {row: name for name, rows in seen for row in each_row(rows)}
    for name, rows in parts:
        uses = {used[row] for row in each_row(rows)} if used else set()
        if len(uses) > 1:
            raise UserError(
                f"fused_rows of {place.name!r}: the example shows that the rows called {name!r} belong to "
                f"{shorten(sorted(uses))}; correct fused_rows, or delete it to cut the weight as the example shows"
            )
