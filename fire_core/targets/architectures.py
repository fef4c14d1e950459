"""Fused, transposed and stacked layers of well-known architectures, as one table.

Each entry of `LAYERS` names a class (a pattern for fnmatch, compared with base classes too), one attribute of that
class (a layer or a parameter), and a function that reads the parts and their sizes from an instance. Sizes are never
guessed: a weight that looks fused is left out, with the reason, if they are not known or do not add up to its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules import conv

from fire_core.errors import UserError
from fire_core.targets.table import role_of

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Place:
    """The place of a parameter in a model: the module that holds it, that module's parents, and its names.

    path: name of the module. parents: outermost first. parameter_name: the name in `model.named_parameters()`.
    aliases: all names, with and without the prefixes of wrappers. tied: also held by an Embedding. head: output layer.
    """

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
        """Name of the parameter under `path`; a tied parameter can have another `parameter_name`."""
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


@dataclass(frozen=True)
class Layout:
    """How the output rows of one weight are divided into parts.

    sizes: the parts in the order of the rows, as (name, number of rows); if empty, the weight is one matrix.
    transposed: stored as (in, out). why: the reason that targets give. why_out: if not empty, the reason that the whole
    weight is left out.
    """

    sizes: Sizes = ()
    transposed: bool = False
    kind: str = "linear"
    why: str = ""
    why_out: str = ""

    @property
    def total(self) -> int:
        """Number of output rows of all parts together."""
        return sum(size for _, size in self.sizes)

    def picks(self) -> Iterator[tuple[str, slice, int]]:
        """Yield (name, rows, number of rows) of each part."""
        start = 0
        for name, size in self.sizes:
            yield name, slice(start, start + size), size
            start += size


@dataclass(frozen=True)
class Layer:
    """One entry of `LAYERS`.

    owner: pattern for the class that holds the attribute `name`, a layer or a parameter.
    read: returns the Layout of that attribute, given the owner, or None where the entry does not apply.
    """

    owner: str
    name: str
    read: Callable[[Any], Layout | None]


def integer(owner: Any, *names: str) -> int | None:
    """Return the first of these attributes that is an integer, of `owner` or else of its `config`, or None."""
    for holder in (owner, getattr(owner, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def qkv(q: int, k: int, v: int) -> Layout:
    """Return the layout of a fused q/k/v, in whole blocks of rows."""
    return Layout((("q", q), ("k", k), ("v", v)), why="part of a fused q/k/v")


def qkv_in_order(name: str) -> Callable[[Any], Layout | None]:
    """Return a reader for `name` with q, then k, then v: sizes are numbers of heads times the width of one head.

    The owner holds the numbers of heads. The width of one head is the owner's, or else the model's width, or the
    layer's number of inputs, divided by the number of heads.
    """

    def read(owner: Any) -> Layout | None:
        """Return None for an unknown number of heads, and where k or v have a width of their own."""
        heads = integer(owner, "num_heads", "num_attention_heads", "n_head", "n_heads", "heads", "nhead")
        kv_heads = integer(
            owner, "num_kv_heads", "num_key_value_heads", "n_kv_head", "n_kv_heads", "kv_heads"
        )
        width = integer(owner, "head_dim", "head_size", "attention_head_size", "dim_head", "d_head")
        if heads is None or any(
            "key_dim" in attribute or "val_dim" in attribute for attribute in vars(owner)
        ):
            return None
        if width is None:
            model = integer(owner, "embed_dim", "n_embd", "hidden_size", "d_model", "inner_dim", "dim")
            width = (model or inputs_of(getattr(owner, name))) // heads
        return qkv(heads * width, (kv_heads or heads) * width, (kv_heads or heads) * width)

    return read


def kv_in_order(name: str) -> Callable[[Any], Layout | None]:
    """Return a reader for `name` with k, then v; sizes as in `qkv_in_order`."""

    def read(owner: Any) -> Layout | None:
        """Return None where `qkv_in_order` does."""
        whole = qkv_in_order(name)(owner)
        return None if whole is None else replace(whole, sizes=whole.sizes[1:], why="part of a fused k/v")

    return read


def inputs_of(layer: Any) -> int:
    """Return the number of inputs of a Linear, or of transformers' Conv1D, which stores (in, out)."""
    return int(layer.weight.shape[0 if hasattr(layer, "nf") else 1])


def gate_and_up(mate: str, *parts: str) -> Callable[[Any], Layout | None]:
    """Return a reader for two halves named `parts`, each as wide as the input of the next layer, `mate`."""

    def read(owner: Any) -> Layout | None:
        """Return None for an owner without a Linear layer `mate`."""
        width = integer(getattr(owner, mate, None), "in_features")
        return (
            None
            if width is None
            else Layout(tuple((part, width) for part in parts), why="half of a gated layer")
        )

    return read


def experts(name: str) -> Callable[[Any], Layout | None]:
    """Return a reader for stacks of experts in transformers, by the owner's `is_transposed` and `is_concatenated`."""

    def read(owner: Any) -> Layout | None:
        """Return None for an owner without `is_transposed`."""
        transposed = getattr(owner, "is_transposed", None)
        if transposed is None:
            return None
        layout = Layout(transposed=transposed, kind="expert", why="one expert")
        if name != "gate_up_proj":
            return layout
        if not owner.is_concatenated:
            return replace(
                layout, why_out="interleaved gate and up halves: set stacked_matrices to treat them whole"
            )
        width = getattr(owner, name).shape[2 if transposed else 1] // 2
        return replace(layout, sizes=(("gate", width), ("up", width)), why="gate or up half of one expert")

    return read


def of_unknown_parts(owner: Any) -> Layout:
    """Return the layout of a weight that is fused in an order of its own: it is left out."""
    return Layout(why_out=UNKNOWN_PARTS)


UNKNOWN_PARTS = "looks fused, but its parts are not known: set fused_rows on the layer"

ADDED = (
    "pos_embed",
    "cls_token",
    "dist_token",
    "reg_token",
    "position_embedding",
    "mask_token",
    "class_embedding",
)

LAYERS: tuple[Layer, ...] = (
    # torch
    Layer("MultiheadAttention", "in_proj_weight", lambda m: qkv(m.embed_dim, m.embed_dim, m.embed_dim)),
    Layer("MultiheadAttention", "q_proj_weight", lambda m: Layout(why="q of MultiheadAttention")),
    Layer("MultiheadAttention", "k_proj_weight", lambda m: Layout(why="k of MultiheadAttention")),
    Layer("MultiheadAttention", "v_proj_weight", lambda m: Layout(why="v of MultiheadAttention")),
    # rows of q, k and v interleaved, or in another order than their names say
    Layer("GPTBigCodeAttention", "c_attn", of_unknown_parts),
    Layer("CodeGenAttention", "qkv_proj", of_unknown_parts),
    Layer("Qwen3NextAttention", "q_proj", of_unknown_parts),
    # timm
    Layer(
        "*ParallelScalingBlock",
        "in_proj",
        lambda m: Layout(tuple(zip(("mlp", "q", "k", "v"), m.in_split)), why="part of a fused MLP and q/k/v"),
    ),
    # gated feed-forward layers
    Layer("GluMlp", "fc1", gate_and_up("fc2", "first", "second")),
    Layer("ModernBertMLP", "Wi", gate_and_up("Wo", "up", "gate")),
    Layer("*", "gate_up_proj", gate_and_up("down_proj", "gate", "up")),
    # experts
    *(Layer("*Experts", name, experts(name)) for name in ("gate_up_proj", "up_proj", "down_proj")),
    Layer("*Router", "weight", lambda m: Layout(kind="router", why="router of experts")),
    # any other class: these names mean q, k, v (or k, v) one after the other
    *(
        Layer("*", name, qkv_in_order(name))
        for name in ("qkv", "to_qkv", "c_attn", "Wqkv", "qkv_proj", "in_proj_qkv", "att_proj")
    ),
    *(Layer("*", name, kv_in_order(name)) for name in ("kv", "to_kv", "Wkv")),
)

LAYERS_BY_NAME = {
    name: [layer for layer in LAYERS if layer.name == name] for name in {l.name for l in LAYERS}
}

LOOKS_FUSED = {layer.name for layer in LAYERS if layer.owner == "*"}
LOOKS_FUSED |= {"query_key_value", "kv_proj", "in_proj_qkvz", "kv_b_proj", "kv_a_proj_with_mqa"}


def known_layout(place: Place) -> Layout | None:
    """Return the layout of one parameter of at least two dimensions, or None for an ordinary one.

    `fused_rows` of the parameter's module comes first, then the entries of `LAYERS` for that module, then those for the
    module around it. Raises UserError if `fused_rows` is not a dict of integers.
    """
    module: Any = place.module
    attribute, layout = place.attribute, None
    convolution = isinstance(module, conv._ConvNd) and not isinstance(module, conv._ConvTransposeNd)
    convolution = convolution and module.groups == 1
    outputs = place.parameter.shape[0 if convolution else -2]
    transposed = hasattr(module, "nf") and any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    if transposed:
        outputs = place.parameter.shape[-1]
        layout = Layout(transposed=True, why="weight of Conv1D, stored (in, out)")
    if attribute == "weight" and hasattr(module, "fused_rows"):
        sizes = _declared(place)
        return Layout(sizes, transposed=transposed, why="part of a fused layer, as the module declares")
    leaf = place.path.rpartition(".")[2]
    layered = attribute == "weight" and (transposed or convolution or isinstance(module, nn.Linear))
    found = _read(module, attribute) or (
        _read(place.parents[-1], leaf) if layered and place.parents else None
    )
    if found is not None:
        found = replace(found, transposed=found.transposed or transposed)
    elif layered and leaf in LOOKS_FUSED:
        return Layout(why_out=UNKNOWN_PARTS)
    elif layered and outputs == 3 * inputs_of(module) and role_of(place.name, place.parents) == "attention":
        return Layout(
            why_out="looks fused (three times its inputs, in attention): set fused_rows on the layer"
        )
    one_matrix = convolution or place.parameter.dim() == 2
    if found is not None and found.sizes and one_matrix and found.total != outputs:
        sizes_text = " + ".join(f"{name} {size}" for name, size in found.sizes)
        return Layout(why_out=f"looks fused, but {sizes_text} is not its {outputs} rows: set fused_rows")
    return found or layout


def _declared(place: Place) -> Sizes:
    """Return the parts that the user's `fused_rows` declares: a name and a number of rows for each."""
    declared: Any = place.module.fused_rows
    if not isinstance(declared, Mapping) or not all(
        type(size) is int and size > 0 for size in declared.values()
    ):
        raise UserError(
            f"fused_rows of {place.name!r} is {declared!r}: give a dict of part and number of rows, "
            'as in {"q": 768, "k": 128, "v": 128}'
        )
    return tuple((str(name), size) for name, size in declared.items())


def _read(owner: nn.Module, name: str) -> Layout | None:
    for layer in LAYERS_BY_NAME.get(name, ()):
        if any(fnmatchcase(cls.__name__, layer.owner) for cls in type(owner).__mro__):
            try:
                layout = layer.read(owner)
            except AttributeError:
                continue
            if layout is not None:
                return layout
    return None
