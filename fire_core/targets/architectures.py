"""How each parameter is cut into matrices: which hold several, and in which order their rows lie.

The order is known where a module declares it, where a run on an example shows it (`rows`), and for the classes in
known_layers.csv, whose code was read. It is never concluded from a name or a shape: these can only show that a weight
*may* hold several matrices, and such a weight is left out, with the reason.
"""

import csv
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from math import prod
from typing import Any

from torch import nn
from torch.nn.modules import batchnorm, conv, instancenorm

from fire_core.errors import UserError
from fire_core.targets.rows import Parts, Traced
from fire_core.targets.table import Target, role_of, shorten

NORMS = (
    *(batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    nn.LocalResponseNorm,
)
# names of weights that hold several matrices in some models, at any place of the path
FUSED = re.compile(
    r"kvq|(?<![a-z])w?(kv|qk|q_k|k_v)(?![a-z])|q_?k_?v|query_key|key_value|w_?pack|c_attn|att_proj|in_proj|w_?12|w_?13"
    r"|gate_?(and_)?up|up_?gate|fused|packed|adaln(?!_single\.emb)|modulation\.lin"
)
# names of gates, of which some are stored together with what they multiply
GATED = re.compile(r"gate|gating|glu(?![a-z])")
REPARAMETRISED = "beside the weight: a gain, or part of a reparametrised weight (weight_norm): remove the reparametrisation"
DEPTHWISE = "depthwise convolution: each filter sees one channel, so there is no matrix"
TABLE = "embedding table: rows are looked up, not multiplied (tied to no Linear)"
INTERLEAVED = "interleaved gate and up halves: set stacked_matrices to treat them whole"


@dataclass(frozen=True)
class Place:
    """A parameter, the module that holds it, and that module's parents, outermost first.

    whole: the target of the parameter before any matrix is found in it.
    """

    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    parents: tuple[nn.Module, ...]
    whole: Target


@dataclass(frozen=True)
class Layout:
    """How a parameter is cut into matrices of one kind, or, if it is not included, why it is left out.

    parts: (name, rows) of each; if empty, it is one matrix, or a stack. transposed: stored as (in, out).
    """

    kind: str
    why: str
    parts: Parts = ()
    transposed: bool = False
    included: bool = True


def left_out(kind: str, why: str) -> Layout:
    """Return the layout of a parameter that is not treated."""
    return Layout(kind, why, included=False)


def layout_of(place: Place, traced: Traced | None) -> Layout:
    """Return the layout of a parameter of at least two dimensions.

    Raises UserError if its module's `fused_rows` is not a dict of integers that add up to the rows, or is refuted.
    """
    module, name, dim = place.module, own_class(place.module).__name__, place.parameter.dim()
    is_weight, is_convolution = place.attribute == "weight", isinstance(place.module, conv._ConvNd)
    layout = _rows_of(place, traced)
    if not layout.included:
        return layout
    if dim == 3 and getattr(module, "stacked_matrices", False):
        outputs, shape = 2 if module.stacked_matrices == "in_out" else 1, place.parameter.shape
        others = [p for p in module.parameters(recurse=False) if p.dim() == 3 and p is not place.parameter]
        if shape[1] == 1 and any(p.shape[outputs] == shape[2] for p in others):
            return left_out("bias", "a bias for each member")
        return Layout("ensemble", f"one member of {name}", transposed=module.stacked_matrices == "in_out")
    if is_convolution and is_weight:
        groups: Any = module.groups
        transposed = isinstance(module, conv._ConvTransposeNd)
        if module.in_channels == groups > 1:
            return left_out("conv", DEPTHWISE)
        if layout.parts and (groups > 1 or transposed):
            return left_out("conv", "fused parts of a grouped or transposed convolution are not known")
        parts, also = layout.parts, f", {layout.why}" if layout.parts else ""
        if groups > 1:
            size, also = place.parameter.shape[0] // groups, ", one group"
            parts = in_order({f"group {group}": size for group in range(groups)})
        return Layout("conv", f"one tap of {name}{also}", parts, transposed)
    if layout.why and dim in (2, 3):
        return layout
    if (is_convolution or isinstance(module, nn.Linear)) and not is_weight:
        return left_out("other", REPARAMETRISED)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return left_out("embedding", TABLE)
    if hasattr(module, "cannot_tell"):  # of a file: see `skeleton`
        return left_out("unclear", str(module.cannot_tell))
    if type(module) is nn.Module:
        return left_out("other", f"{dim}-D parameter of a layer that a file does not show (pass --model)")
    declare = "stacked_matrices" if dim == 3 else "fused_rows" if dim == 2 and is_weight else ""
    advice = f" (set {declare} on the module to put it in)" if declare else ""
    return left_out("other", f"{dim}-D parameter of {name}, not a known layer{advice}")


def _rows_of(place: Place, traced: Traced | None) -> Layout:
    """Return the layout of the rows, without a reason if the layer is not known.

    What the module declares comes first, then what is known of its class, then what an example has shown.
    """
    module, attribute, key = place.module, place.attribute, id(place.parameter)
    sizes = outputs_of(module) if attribute == "weight" else None
    transposed = sizes is not None and not isinstance(module, nn.Linear | conv._ConvNd)
    why = f"weight of {own_class(module).__name__}" if sizes is not None else ""
    whole = Layout("linear", f"{why}, stored (in, out)" if transposed else why, transposed=transposed)
    if attribute == "weight" and hasattr(module, "fused_rows"):
        rows = sizes[0] if sizes else place.parameter.shape[-2]
        why = "part of a fused layer, as the module declares"
        return replace(whole, parts=_declared(place, rows, traced), why=why)
    if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
        if attribute == "in_proj_weight":
            return Layout("linear", "part of a fused q/k/v", in_order(dict.fromkeys("qkv", module.embed_dim)))
        return Layout("linear", f"{attribute[0]} of MultiheadAttention")
    if sizes is None or not place.parents:
        return _of_experts(place) or whole
    parts = known_parts(place, sizes[0])
    if parts:
        return replace(whole, parts=parts, why=f"part of a fused {'/'.join(dict(parts))}")
    if traced is not None and not transposed:
        if key in traced.whole:
            return whole
        if key in traced.parts and getattr(module, "groups", 1) == 1:
            return replace(whole, parts=traced.parts[key], why="part of a fused layer, as the example shows")
    reason = may_be_fused(place, *sizes) if parts is None else "its class uses them in several ways"
    unseen = "give find_targets an example, or set fused_rows on the layer"
    if traced is not None:
        unseen = traced.unclear.get(key, "the example does not show how its rows are used")
    elif type(place.parents[0]) is nn.Module:
        unseen = "which a file does not show (pass --model)"
    return left_out("unclear", f"may hold several matrices ({reason}): {unseen}") if reason else whole


def _declared(place: Place, rows: int, traced: Traced | None) -> Parts:
    """Return the parts that the user's `fused_rows` declares."""
    declared: Any = place.module.fused_rows
    sizes = declared.values() if isinstance(declared, Mapping) else [0]
    wrong = f"fused_rows of {place.whole.name!r}"
    if not all(type(size) is int and size > 0 for size in sizes) or sum(sizes) != rows:
        raise UserError(
            f"{wrong} is {declared!r}: give a dict of part and number of rows that add up to its {rows} rows, "
            'as in {"q": 768, "k": 128, "v": 128}'
        )
    parts = in_order({str(part): size for part, size in declared.items()})
    seen = traced.parts.get(id(place.parameter), ()) if traced is not None else ()
    for part, own in parts:
        uses = sorted(use for use, others in seen if not set(own).isdisjoint(others))
        if len(uses) > 1:
            raise UserError(
                f"{wrong}: the example shows that the rows called {part!r} belong to {shorten(uses)}; "
                "correct fused_rows, or delete it to cut the weight as the example shows"
            )
    return parts


def in_order(sizes: Mapping[str, int]) -> Parts:
    """Return parts of the given numbers of rows, one after the other."""
    stops = itertools.accumulate(sizes.values())
    return tuple((name, range(stop - size, stop)) for (name, size), stop in zip(sizes.items(), stops))


with files(__package__).joinpath("known_layers.csv").open(encoding="utf-8") as table:
    KNOWN = list(csv.DictReader(table))


def known_parts(place: Place, rows: int) -> Parts | None:
    """Return the parts of a layer of a class whose forward pass was read; () if no table can tell them, None if unknown.

    In known_layers.csv, a class is that whose forward pass was read, as package.file.class. `parts` are names in the order
    of the rows; a part with a size has it after "=" (numbers, and attributes of the owner or its config, multiplied), the
    others share the rest equally. The condition is an attribute that must be true, or false with "not" before it. Without
    parts, the rows are used in more ways than a table can say, and the weight is left out.
    """
    owner, attribute = place.parents[-1], place.whole.module.rpartition(".")[2]

    def value(f: str) -> Any:
        return int(f) if f.isdigit() else getattr(owner, f, None) or getattr(owner.config, f)

    forward = type(owner).forward
    words = forward.__module__.split(".")
    read = f"{words[0]}.{words[-1].removeprefix('modeling_')}.{forward.__qualname__.removesuffix('.forward')}"
    for row in KNOWN:
        if (row["class"], row["attribute"]) != (read, attribute):
            continue
        if (when := row["when"]) and bool(getattr(owner, when.split()[-1])) == when.startswith("not "):
            continue
        factors = dict(part.partition("=")[::2] for part in row["parts"].split())
        known = {name: prod(map(value, text.split("*"))) for name, text in factors.items() if text}
        share = (rows - sum(known.values())) // max(1, len(factors) - len(known))
        sizes = {name: known.get(name, share) for name in factors}
        return in_order(sizes) if sum(sizes.values()) == rows or not sizes else None
    return None


def _of_experts(place: Place) -> Layout | None:
    """Return the layout of routers and of stacks of experts in transformers, by what their modules say of themselves."""
    module, name, dim = place.module, place.attribute, place.parameter.dim()
    if not own_class(module).__module__.startswith("transformers."):
        return None
    if (dim, name) == (2, "weight") and "Router" in type(module).__name__:
        return Layout("router", "router of experts")
    transposed = getattr(module, "is_transposed", None)
    if transposed is None or dim == 2 or name not in ("gate_up_proj", "up_proj", "down_proj"):
        return None
    if name != "gate_up_proj":
        return Layout("expert", "one expert", transposed=transposed)
    if not module.is_concatenated:
        return left_out("expert", INTERLEAVED)
    halves = in_order(dict.fromkeys(("gate", "up"), place.parameter.shape[2 if transposed else 1] // 2))
    return Layout("expert", "gate or up half of one expert", halves, transposed)


def may_be_fused(place: Place, outputs: int, inputs: int) -> str:
    """Return why a weight may hold several matrices, by its names and by what reads it, or "".

    The reader is looked for among the layers that are declared after this one, in the smallest module around it that has
    any other. A norm of the outputs counts as one that reads all of them.
    """
    path = place.whole.module.lower()
    if outputs < 2 or getattr(place.module, "groups", 1) > 1:
        return ""
    if found := FUSED.search(path):
        return f"{found.group()} is in its name"
    leaf, role = path.rpartition(".")[2], role_of(place.whole.name, place.parents)
    before, after = _neighbours(place)
    read_by_layers = {takes for _, takes, norm in after if not norm}
    around = (*path.split(".")[-2:], type(place.parents[-1]).__name__.lower())
    normed = outputs in {takes for _, takes, norm in after if norm} - read_by_layers
    cell = normed and (outputs % 3 == 0 or outputs % 4 == 0) and re.search("gru|lstm", " ".join(around))
    if cell and not any(isinstance(m, nn.RNNBase | nn.RNNCellBase) for m in place.parents[-1].modules()):
        return f"in a recurrent cell, by its name, with {outputs} outputs that only a norm takes"
    if outputs not in {takes for _, takes, _ in after}:
        shares = (2, 3, 4, 6, 7, 9, 12) if place.parameter.dim() == 2 else (2, 3)  # bottlenecks have 4, too
        fits = [n for n in shares if outputs / n in read_by_layers and (n < 7 or outputs == n * inputs)]
        plain = max(place.parameter.shape[2:], default=1) == 1 and (role != "o" or outputs > inputs)
        if fits and plain:
            return f"its {outputs} outputs are {fits[0]} times what a later layer takes"
        named = re.match(r"(q|k|v|o|query|key|value)(_|$)", leaf)
        if role == "attention" and not named and after and outputs > max(inputs, after[0][1]):
            return f"in attention, with {outputs} outputs where the next layer takes {after[0][1]}"
    waiting = {made for made, _, norm in before if not norm} - {takes for _, takes, _ in before}
    if not after and place.parameter.dim() == 2 and outputs in waiting & {3 * inputs, 4 * inputs}:
        return f"a layer before it makes {outputs} outputs, too: perhaps the gates of a recurrent cell"
    is_reader = any(made % inputs == 0 for made, _, _ in before)
    if outputs not in read_by_layers and not is_reader and any(map(GATED.search, around)):
        return "a gate is in its name"
    three = role == "attention" and outputs == 3 * inputs
    return "three times as many outputs as inputs, in attention" if three else ""


Width = tuple[int, int, bool]  # outputs and inputs of a layer, and whether it is a norm


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


def outputs_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (outputs, inputs) of a Linear, a convolution, or transformers' Conv1D with a weight of its own, else None."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() < 2:
        return None
    first, second = weight.shape[:2]
    if isinstance(module, nn.Linear):
        return (first, second) if weight.dim() == 2 else None
    if isinstance(module, conv._ConvTransposeNd):
        return second * module.groups, first
    if isinstance(module, conv._ConvNd):
        return first, second * module.groups
    # transformers' Conv1D stores (in, out)
    named = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    return (second, first) if named and hasattr(module, "nf") else None


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the user wrote, without the one that FSDP2 puts in its place."""
    cls, *bases = type(module).__mro__
    return bases[1] if bases[0].__name__ == "FSDPModule" else cls
