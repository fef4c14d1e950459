"""Fused, transposed and stacked layers of published architectures, as one table.

Each entry of `LAYERS` names a class (a pattern for fnmatch, compared with base classes too), one attribute of that
class (a layer or a parameter), and a function that reads the parts and their sizes from an instance. Sizes are never
guessed: a weight that looks fused is left out, with the reason, if they are not known or do not add up to its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

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
    repeats: how many times the pattern of parts occurs (q/k/v head by head). transposed: stored as (in, out).
    why: the reason that targets give. left_out: names of parts that are not targets, with reasons.
    why_out: if not empty, the reason that the whole weight is left out.
    """

    sizes: Sizes = ()
    repeats: int = 1
    transposed: bool = False
    kind: str = "linear"
    why: str = ""
    why_out: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of output rows of all parts together."""
        return self.repeats * sum(size for _, size in self.sizes)

    def picks(self) -> Iterator[tuple[str, slice | list[int], int]]:
        """Yield (name, rows, number of rows) of each part; rows are a slice, or a list of indices if scattered."""
        period, start = sum(size for _, size in self.sizes), 0
        for name, size in self.sizes:
            if self.repeats == 1:
                yield name, slice(start, start + size), size
            elif size == 1:
                yield name, slice(start, None, period), self.repeats
            else:
                rows = [turn * period + start + i for turn in range(self.repeats) for i in range(size)]
                yield name, rows, len(rows)
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


def qkv(q: int, k: int, v: int, repeats: int = 1) -> Layout:
    """Return the layout of a fused q/k/v: whole blocks of rows, or `repeats` times q, k and v of one head."""
    how = "" if repeats == 1 else ", rows interleaved head by head"
    return Layout((("q", q), ("k", k), ("v", v)), repeats, why=f"part of a fused q/k/v{how}")


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
        width = getattr(owner, name).shape[2 if transposed else 1] // 2
        layout = replace(layout, why="gate or up half of one expert")
        if owner.is_concatenated:
            return replace(layout, sizes=(("gate", width), ("up", width)))
        return replace(layout, sizes=(("gate", 1), ("up", 1)), repeats=width)

    return read


def head_by_head(m: Any) -> Layout:
    """Return the layout of a fused q/k/v that holds q, k and v of one head after those of another."""
    return qkv(m.head_dim, m.head_dim, m.head_dim, m.num_heads)


def falcon(m: Any) -> Layout:
    """Return the layout of the fused q/k/v of any of the three Falcon generations."""
    if m.new_decoder_architecture:
        return qkv(m.num_heads // m.num_kv_heads * m.head_dim, m.head_dim, m.head_dim, m.num_kv_heads)
    if m.multi_query:
        return qkv(m.num_heads * m.head_dim, m.head_dim, m.head_dim)
    return head_by_head(m)


def gpt2(m: Any) -> Layout:
    """Return the layout of the fused q/k/v of GPT-2, or of the fused k/v in cross-attention."""
    if getattr(m, "is_cross_attention", False):
        return Layout((("k", m.split_size), ("v", m.split_size)), why="part of a fused k/v")
    return qkv(m.split_size, m.split_size, m.split_size)


def gpt_bigcode(m: Any) -> Layout:
    """Return the layout of the fused q/k/v, or k/v, of GPTBigCode, with one k and v for all heads or one for each."""
    if m.is_cross_attention:
        return Layout((("k", m.head_dim), ("v", m.head_dim)), m.num_heads, why="part of a fused k/v")
    if m.multi_query:
        return qkv(m.embed_dim, m.kv_dim, m.kv_dim)
    return head_by_head(m)


def gated_q(m: Any) -> Layout:
    """Return the layout of q and an output gate, interleaved head by head."""
    sizes = (("q", m.head_dim), ("gate", m.head_dim))
    return Layout(
        sizes, m.q_proj.out_features // (2 * m.head_dim), why="q or output gate, interleaved head by head"
    )


def delta_net_qkvz(m: Any) -> Layout:
    """Return the layout of q, k, v and the output gate of a gated delta net, interleaved head by head."""
    value = m.num_v_heads // m.num_k_heads * m.head_v_dim
    sizes = (("q", m.head_k_dim), ("k", m.head_k_dim), ("v", value), ("gate", value))
    return Layout(sizes, m.num_k_heads, why="part of a fused q/k/v/gate, interleaved head by head")


def mamba(inner: str, rank: str, state: str) -> Callable[[Any], Layout]:
    """Return a reader for the input projection of a Mamba block or, with an empty `inner`, the one to dt, B and C.

    The arguments name the owner's attributes that hold the sizes.
    """

    def read(m: Any) -> Layout:
        sizes = (("dt", getattr(m, rank)), ("B", getattr(m, state)), ("C", getattr(m, state)))
        return Layout(sizes, why="part of a fused state-space projection")

    def read_in(m: Any) -> Layout:
        return Layout(
            (("x", getattr(m, inner)), ("gate", getattr(m, inner))), why="x or gate of a state space"
        )

    return read_in if inner else read


def mamba2(inner: str, state: str, groups: str, heads: str) -> Callable[[Any], Layout]:
    """Return a reader for the input projection of a Mamba-2 block; the arguments name attributes that hold sizes."""

    def read(m: Any) -> Layout:
        width, group = getattr(m, inner), getattr(m, groups) * getattr(m, state)
        sizes = (("gate", width), ("x", width), ("B", group), ("C", group), ("dt", getattr(m, heads)))
        return Layout(
            sizes, why="part of a fused state-space projection", left_out={"dt": STATE_SPACE["dt_proj"]}
        )

    return read


STATE_SPACE = {
    "A_log": "decay rates of a state space, not a feature map",
    "D": "skip gains of a state space, not a feature map",
    "dt_bias": "time steps of a state space, not a feature map",
    "dt_proj": "sets the time steps of a state space: initialised to a range, not a feature map",
}

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
    # transformers: fused attention
    Layer("*GPT2Attention", "c_attn", gpt2),
    Layer("ImageGPTAttention", "c_attn", gpt2),
    Layer("GPTBigCodeAttention", "c_attn", gpt_bigcode),
    Layer(
        "GPTNeoX*Attention",
        "query_key_value",
        lambda m: qkv(m.head_size, m.head_size, m.head_size, integer(m, "num_attention_heads") or 0),
    ),
    Layer("BloomAttention", "query_key_value", head_by_head),
    Layer("PersimmonAttention", "query_key_value", head_by_head),
    Layer("Falcon*Attention", "query_key_value", falcon),
    Layer(
        "CodeGenAttention",
        "qkv_proj",
        lambda m: Layout(
            (("q", m.embed_dim // 4), ("v", m.embed_dim // 4), ("k", m.embed_dim // 4)),
            4,
            why="part of a fused q/v/k",
        ),
    ),
    Layer("Qwen3NextAttention", "q_proj", gated_q),
    Layer("Qwen3NextGatedDeltaNet", "in_proj_qkvz", delta_net_qkvz),
    Layer("*GatedDeltaNet", "in_proj_qkv", lambda m: qkv(m.key_dim, m.key_dim, m.value_dim)),
    Layer(
        "Deepseek*Attention",
        "kv_b_proj",
        lambda m: Layout(
            (("k", m.qk_nope_head_dim), ("v", m.v_head_dim)),
            m.num_heads,
            why="part of a fused k/v, head by head",
        ),
    ),
    Layer(
        "Deepseek*Attention",
        "kv_a_proj_with_mqa",
        lambda m: Layout((("latent", m.kv_lora_rank), ("k", m.qk_rope_head_dim)), why="latent or rotary k"),
    ),
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
    Layer(
        "Llama4TextExperts",
        "gate_up_proj",
        lambda m: Layout(
            (("gate", m.expert_dim), ("up", m.expert_dim)), 1, True, "expert", "gate or up half of one expert"
        ),
    ),
    Layer("Llama4TextExperts", "down_proj", lambda m: Layout((), 1, True, "expert", "one expert")),
    *(Layer("*Experts", name, experts(name)) for name in ("gate_up_proj", "up_proj", "down_proj")),
    Layer("*Router", "weight", lambda m: Layout(kind="router", why="router of experts")),
    # state spaces
    Layer("*MambaMixer", "in_proj", mamba("intermediate_size", "", "")),
    Layer("*MambaMixer", "x_proj", mamba("", "time_step_rank", "ssm_state_size")),
    Layer("Mamba", "in_proj", mamba("d_inner", "", "")),
    Layer("Mamba", "x_proj", mamba("", "dt_rank", "d_state")),
    Layer("*Mamba2Mixer", "in_proj", mamba2("intermediate_size", "ssm_state_size", "n_groups", "num_heads")),
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

LOOKS_FUSED = {layer.name for layer in LAYERS if layer.owner == "*"} | {
    "query_key_value",
    "kv_proj",
    "in_proj_qkvz",
}


def known_layout(place: Place) -> Layout | None:
    """Return the layout of one parameter of at least two dimensions, or None for an ordinary one.

    `fused_rows` of the parameter's module comes first, then the entries of `LAYERS` for that module, then those for the
    module around it. Raises UserError if `fused_rows` is not a dict of integers.
    """
    module: Any = place.module
    attribute, layout = place.attribute, None
    outputs = place.parameter.shape[-2]
    transposed = hasattr(module, "nf") and any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    if transposed:
        outputs = place.parameter.shape[-1]
        layout = Layout(transposed=True, why="weight of Conv1D, stored (in, out)")
    if attribute == "weight" and hasattr(module, "fused_rows"):
        sizes = _declared(place)
        return Layout(sizes, transposed=transposed, why="part of a fused layer, as the module declares")
    leaf = place.path.rpartition(".")[2]
    layered = attribute == "weight" and (transposed or isinstance(module, nn.Linear))
    found = _read(module, attribute) or (
        _read(place.parents[-1], leaf) if layered and place.parents else None
    )
    if found is not None:
        found = replace(found, transposed=found.transposed or transposed)
    elif layered and leaf in LOOKS_FUSED:
        return Layout(why_out="looks fused, but its parts are not known: set fused_rows on the layer")
    elif layered and outputs == 3 * inputs_of(module) and role_of(place.name, place.parents) == "attention":
        return Layout(
            why_out="looks fused (three times its inputs, in attention): set fused_rows on the layer"
        )
    if found is not None and found.sizes and place.parameter.dim() == 2 and found.total != outputs:
        sizes_text = " + ".join(f"{name} {size}" for name, size in found.sizes)
        why_out = (
            f"looks fused, but {sizes_text}, {found.repeats} times, is not its {outputs} rows: set fused_rows"
        )
        return Layout(why_out=why_out)
    return found or layout


def _declared(place: Place) -> Sizes:
    """Return the parts that the user's `fused_rows` declares: a name and a number of rows for each."""
    declared: Any = place.module.fused_rows
    if not isinstance(declared, Mapping) or not all(isinstance(size, int) for size in declared.values()):
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
