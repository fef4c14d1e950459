"""Which weights hold several matrices, and in which order their rows lie.

The order is known where a module declares it, where a run on an example shows it (`trace`), and for the classes in `KNOWN`,
whose code was read. It is never concluded from a name or a shape: these can only show that a weight *may* hold several
matrices, and such a weight is left out, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.modules import batchnorm, conv, instancenorm

from fire_core.errors import UserError
from fire_core.targets.table import ATTENTION, role_of, shorten
from fire_core.targets.trace import Parts, Rows, Traced

NORMS = (
    batchnorm._BatchNorm,
    instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
ADDED = (
    "pos_embed",
    "cls_token",
    "dist_token",
    "reg_token",
    "position_embedding",
    "mask_token",
    "class_embedding",
)
HOW_TO_TELL = "give find_targets an example, or set fused_rows on the layer"


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

    parts: (name, rows) of each; if empty, the weight is one matrix. transposed: stored as (in, out). why: the reason that
    targets give. why_out: if not empty, the reason that the whole weight is left out.
    """

    parts: Parts = ()
    transposed: bool = False
    kind: str = "linear"
    why: str = ""
    why_out: str = ""


def size_of(rows: Rows) -> int:
    """Return the number of rows."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def in_order(sizes: Mapping[str, int]) -> Parts:
    """Return parts of the given numbers of rows, one after the other."""
    starts = [sum(list(sizes.values())[:i]) for i in range(len(sizes) + 1)]
    return tuple((name, slice(*ends)) for name, ends in zip(sizes, pairwise(starts), strict=True))


def equal(names: str) -> Callable[[Any, int], dict[str, int]]:
    """Return a reader of parts of equal size, one after the other."""
    parts = names.split()
    return lambda owner, rows: dict.fromkeys(parts, rows // len(parts))


def grouped_heads(owner: Any, rows: int) -> dict[str, int]:
    """Return the sizes of q, k and v where several heads of q share one of k and v; the key and value heads are counted."""
    narrow = owner.num_key_value_heads * owner.head_dim
    return {"q": rows - 2 * narrow, "k": narrow, "v": narrow}


# attribute, reader, and classes whose forward pass was read, as package.file.class
LAYERS: tuple[tuple[str, Callable[[Any, int], dict[str, int] | None], str], ...] = (
    (
        "qkv",
        equal("q k v"),
        "timm.attention.Attention timm.attention.AttentionRope timm.beit.Attention timm.cait.TalkingHeadAttn "
        "timm.coat.FactorAttnConvRelPosEnc timm.convit.MHSA timm.davit.ChannelAttention timm.davit.ChannelAttentionV2 "
        "timm.davit.WindowAttention timm.diff_attention.DiffAttention timm.edgenext.CrossCovarianceAttn "
        "timm.eva.EvaAttention timm.fastvit.Attention timm.hiera.MaskUnitAttention timm.hieradet_sam2.MultiScaleAttention "
        "timm.metaformer.Attention timm.mvitv2.MultiScaleAttention timm.nest.Attention timm.swin_transformer.WindowAttention "
        "timm.swin_transformer_v2.WindowAttention timm.swin_transformer_v2_cr.WindowMultiHeadAttention "
        "timm.twins.LocallyGroupedAttn timm.vision_transformer_relpos.RelPosAttention timm.vision_transformer_sam.Attention "
        "timm.visformer.Attention timm.volo.Attention timm.xcit.XCA timm.attention_pool2d.RotAttentionPool2d "
        "timm.attention_pool2d.AttentionPool2d "
        "transformers.blip.BlipAttention transformers.blip_2.Blip2Attention transformers.glm4v.Glm4vVisionAttention "
        "transformers.cohere_compass.CohereCompassVisionAttention transformers.deepseek_ocr2.DeepseekOcr2SamVisionAttention "
        "transformers.dots3_note.Dots3NoteVisionAttention transformers.ernie4_5_vl_moe.Ernie4_5_VLMoeVisionAttention "
        "transformers.florence2.Florence2VisionChannelAttention transformers.florence2.Florence2VisionWindowAttention "
        "transformers.glm4v_moe.Glm4vMoeVisionAttention transformers.glm5_next.Glm5NextVisionAttention "
        "transformers.glm_image.GlmImageVisionAttention transformers.glm_ocr.GlmOcrVisionAttention "
        "transformers.got_ocr2.GotOcr2VisionAttention transformers.hiera.HieraMaskUnitAttention "
        "transformers.instructblip.InstructBlipAttention transformers.instructblipvideo.InstructBlipVideoAttention "
        "transformers.mgp_str.MgpstrAttention transformers.pp_formulanet.PPFormulaNetVisionAttention "
        "transformers.pp_ocrv5_mobile_rec.PPOCRV5MobileRecAttention "
        "transformers.pp_ocrv5_server_rec.PPOCRV5ServerRecAttention "
        "transformers.pp_ocrv6_small_rec.PPOCRV6SmallRecAttention transformers.qwen2_5_vl.Qwen2_5_VLVisionAttention "
        "transformers.qwen2_vl.VisionAttention transformers.qwen3_5.Qwen3_5VisionAttention "
        "transformers.qwen3_5_moe.Qwen3_5MoeVisionAttention transformers.qwen3_omni_moe.Qwen3OmniMoeVisionAttention "
        "transformers.qwen3_vl.Qwen3VLVisionAttention transformers.qwen3_vl_moe.Qwen3VLMoeVisionAttention "
        "transformers.qwen4_exp.Qwen4ExpVisionAttention transformers.sam.SamVisionAttention "
        "transformers.sam.SamVisionSdpaAttention transformers.sam2.Sam2MultiScaleAttention "
        "transformers.sam_hq.SamHQVisionAttention transformers.seggpt.SegGptAttention "
        "transformers.slanext.SLANeXtVisionAttention transformers.timesformer.TimesformerSelfAttention "
        "transformers.unlimited_ocr.UnlimitedOcrSamVisionAttention transformers.vitdet.VitDetAttention",
    ),
    ("qkv", lambda m, rows: equal("k v" if m.use_global else "q k v")(m, rows), "timm.gcvit.WindowAttentionGlobal"),
    (
        "qkv",  # head_first: the q, k and v of a head lie side by side
        lambda m, rows: None if m.head_first else equal("q k v")(m, rows),
        "timm.attention2d.Attention2d timm.maxxvit.AttentionCl",
    ),
    (
        "qkv",
        lambda m, rows: {"q": m.dim_out_qk, "k": m.dim_out_qk, "v": m.dim_out_v},
        "timm.bottleneck_attn.BottleneckAttn",
    ),
    ("in_proj", lambda m, rows: dict(zip(("mlp", "q", "k", "v"), m.in_split)), "timm.vision_transformer.ParallelScalingBlock "
     "timm.vision_transformer.DiffParallelScalingBlock"),
    ("qk", equal("q k"), "timm.convit.GPSA timm.tnt.Attention"),
    (
        "kv",
        equal("k v"),
        "timm.volo.ClassAttention timm.twins.GlobalSubSampleAttn timm.pvt_v2.Attention timm.attention_pool.AttentionPoolLatent",
    ),
    ("fc1", equal("first second"), "timm.mlp.GluMlp"),
    (
        "Wqkv",
        equal("q k v"),
        "transformers.mpt.MptAttention transformers.modernbert.ModernBertAttention",
    ),
    ("Wqkv", grouped_heads, "transformers.dbrx.DbrxAttention"),
    ("qkv_proj", grouped_heads, "transformers.phi3.Phi3Attention transformers.phi4_multimodal.Phi4MultimodalAttention"),
    ("att_proj", equal("q k v"), "transformers.bark.BarkSelfAttention transformers.bark.BarkSelfFlashAttention2"),
    ("c_attn", equal("q k v"), "transformers.openai.Attention"),
    (
        "c_attn",
        lambda m, rows: equal("k v" if m.is_cross_attention else "q k v")(m, rows),
        "transformers.gpt2.GPT2Attention transformers.imagegpt.ImageGPTAttention "
        "transformers.decision_transformer.DecisionTransformerGPT2Attention",
    ),
    ("qkv_linear", equal("q k v"), "transformers.layoutlmv2.LayoutLMv2SelfAttention"),
    (
        "to_kv",
        equal("k v"),
        "transformers.granite_speech.GraniteSpeechConformerAttention transformers.evolla.EvollaSequenceCompressorAttention "
        "transformers.granite_speech_plus.GraniteSpeechPlusConformerAttention",
    ),
    (
        "gate_up_proj",
        equal("gate up"),
        "transformers.phi3.Phi3MLP transformers.glm.GlmMLP transformers.glm4.Glm4MLP transformers.glm4v.Glm4vTextMLP "
        "transformers.dia.DiaMLP transformers.glm_image.GlmImageTextMLP transformers.glm_ocr.GlmOcrTextMLP "
        "transformers.phi4_multimodal.Phi4MultimodalMLP",
    ),
    ("gate_up_proj", equal("up gate"), "transformers.phi4_multimodal.Phi4MultimodalAudioMLP"),
    ("Wi", equal("up gate"), "transformers.modernbert.ModernBertMLP transformers.modernbert_decoder.ModernBertDecoderMLP"),
    (
        "input_linear",
        equal("gate up"),
        "transformers.granitemoeshared.GraniteMoeSharedMLP transformers.granitemoehybrid.GraniteMoeHybridMLP "
        "transformers.granitemoe_swa.GraniteMoeSWAMLP",
    ),
    ("fc1", equal("up gate"), "transformers.moonshine.MoonshineDecoderMLP "
     "transformers.moonshine_streaming.MoonshineStreamingDecoderMLP"),
)
KNOWN = {(owner, name): read for name, read, owners in LAYERS for owner in owners.split()}

FUSED = re.compile(
    r"qkv|kvq|(?<![a-z])w?(kv|qk|q_k|k_v)(?![a-z])|q_?k_?v|query_key|key_value|w_?pack|c_attn|att_proj|in_proj|w_?12|w_?13"
    r"|gate_?(and_)?up|up_?gate|fused|packed|bcx"
)
"""Names of weights that hold several matrices in some models, at any place of the path."""
GATED = re.compile(r"gate|gating|glu(?![a-z])|glu$|geglu|swiglu|reglu")
"""Names of gates, of which some are stored together with what they multiply."""


def outputs_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (outputs, inputs) of a Linear, a convolution, or transformers' Conv1D with a weight of its own, else None."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() < 2:
        return None
    first, second = weight.shape[:2]
    if isinstance(module, conv._ConvNd):
        outwards = (second * module.groups, first), (first, second * module.groups)
        return outwards[not isinstance(module, conv._ConvTransposeNd)]
    if is_transposed(module):
        return second, first
    return (first, second) if isinstance(module, nn.Linear) else None


def is_transposed(module: nn.Module) -> bool:
    """Return whether the module is transformers' Conv1D, which stores (in, out)."""
    return hasattr(module, "nf") and any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def class_read(module: nn.Module) -> str:
    """Return package.file.class of the class that defines the forward pass of a module."""
    forward = type(module).forward
    words = forward.__module__.split(".")
    return f"{words[0]}.{words[-1].removeprefix('modeling_')}.{forward.__qualname__.removesuffix('.forward')}"


def layout_of(place: Place, traced: Traced | None) -> Layout:
    """Return the layout of a parameter of at least two dimensions.

    `fused_rows` of the module comes first, then what is known of its class, then `traced`. Raises UserError if
    `fused_rows` is not a dict of integers that add up to the rows.
    """
    module, owner = place.module, place.parents[-1] if place.parents else None
    sizes = outputs_of(module) if place.attribute == "weight" else None
    transposed = sizes is not None and is_transposed(module)
    layout = Layout(transposed=transposed, why="weight of Conv1D, stored (in, out)" if transposed else "")
    if place.attribute == "weight" and hasattr(module, "fused_rows"):
        rows = place.parameter.shape[0 if sizes and not transposed else -1 if transposed else -2]
        parts = _declared(place, rows)
        _prove(place, parts, traced)
        return replace(layout, parts=parts, why="part of a fused layer, as the module declares")
    if type(module) is nn.MultiheadAttention:
        if place.attribute == "in_proj_weight":
            return Layout(in_order(equal("q k v")(module, len(place.parameter))), why="part of a fused q/k/v")
        return Layout(why=f"{place.attribute[0]} of MultiheadAttention")
    if sizes is None and (place.parameter.dim() == 3 or "Router" in type(module).__name__):
        return _of_experts(place) or layout
    if sizes is None or owner is None:
        return layout
    leaf = place.path.rpartition(".")[2]
    read = KNOWN.get((class_read(owner), leaf))
    known = read(owner, sizes[0]) if read else None
    if known is not None and sum(known.values()) == sizes[0]:
        return replace(layout, parts=in_order(known), why=_why(known))
    if traced is not None and not transposed:
        key = id(place.parameter)
        if key in traced.whole:
            return layout
        if key in traced.parts and (not isinstance(module, conv._ConvNd) or module.groups == 1):
            parts = traced.parts[key]
            return replace(layout, parts=parts, why=f"{_why(dict(parts))}, as the example shows")
    reason = may_be_fused(place, sizes)
    if not reason:
        return layout
    if traced is not None:
        unseen = traced.unclear.get(id(place.parameter), "the example does not use it")
    else:
        unseen = "which a file does not show (pass --model)" if type(place.parents[0]) is nn.Module else HOW_TO_TELL
    return replace(layout, kind="unclear", why_out=f"may hold several matrices ({reason}): {unseen}")


def _why(parts: Mapping[str, Any]) -> str:
    names = "/".join(parts)
    if names in ("gate/up", "up/gate", "first/second"):
        return "half of a gated layer"
    return f"part of a fused {names}" if len(parts) < 4 else f"part of a fused MLP and q/k/v"


def may_be_fused(place: Place, sizes: tuple[int, int]) -> str:
    """Return why a weight with (outputs, inputs) may hold several matrices, by its names and by what reads it, or "".

    The reader is unknown: it is looked for among the layers that are declared after this one, in the smallest module around
    it that has any other. A norm of the outputs counts as one that reads all of them.
    """
    outputs, inputs = sizes
    path = place.path.lower()
    if outputs < 2 or isinstance(place.module, conv._ConvNd) and place.module.groups > 1:
        return ""
    if found := FUSED.search(path):
        return f"{found.group()} is in its name"
    before, after = _neighbours(place)
    takes = {reads for _, reads in after}
    role = role_of(place.name, place.parents)
    plain = role in ("q", "k", "v", "o") or re.match(r"(q|k|v|o|query|key|value)(_|$)", path.rpartition(".")[2])
    if outputs not in takes:
        share = next((n for n in (2, 3) if outputs % n == 0 and outputs // n in takes), 0)
        if share and isinstance(place.module, nn.Linear | nn.Conv1d) or share and max(place.parameter.shape[2:], default=1) == 1:
            return f"its {outputs} outputs are {share} times what a later layer takes"
        if role == "attention" and not plain and after and outputs > after[0][1]:
            return f"a layer of attention with {outputs} outputs, and the next one takes {after[0][1]}"
        around = [path.rpartition(".")[2], *(type(parent).__name__.lower() for parent in place.parents[-1:])]
        if any(map(GATED.search, around)) and not any(made % inputs == 0 for made, _ in before):
            return "a gate is in its name"
    if role == "attention" and outputs == 3 * inputs:
        return "three times as many outputs as inputs, in attention"
    return ""


def _neighbours(place: Place) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (outputs, inputs) of the layers and norms before and after this one in the smallest module that has others."""
    for parent in reversed(place.parents):
        modules = list(parent.modules())
        here = next(i for i, module in enumerate(modules) if module is place.module)
        before, after = ([s for m in part if (s := _widths(m))] for part in (modules[:here], modules[here + 1 :]))
        if before or after:
            return before, after
    return [], []


def _widths(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, NORMS) or "norm" in type(module).__name__.lower():
        gain = module._parameters.get("weight")
        return None if gain is None or gain.dim() != 1 else (len(gain), len(gain))
    sizes = outputs_of(module)
    if sizes is not None and isinstance(module, conv._ConvNd) and module.groups == sizes[1]:
        return sizes[1], sizes[1]
    return sizes


def _of_experts(place: Place) -> Layout | None:
    """Return the layout of routers and of stacks of experts in transformers, by what their modules say of themselves."""
    module, name = place.module, place.attribute
    if not type(module).__module__.startswith("transformers."):
        return None
    if place.parameter.dim() == 2:
        return Layout(kind="router", why="router of experts") if name == "weight" else None
    transposed = getattr(module, "is_transposed", None)
    if transposed is None or name not in ("gate_up_proj", "up_proj", "down_proj"):
        return None
    layout = Layout(transposed=transposed, kind="expert", why="one expert")
    if name != "gate_up_proj":
        return layout
    if not module.is_concatenated:
        return replace(layout, why_out="interleaved gate and up halves: set stacked_matrices to treat them whole")
    rows = place.parameter.shape[2 if transposed else 1]
    return replace(layout, parts=in_order(equal("gate up")(module, rows)), why="gate or up half of one expert")


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
    used = {row: name for name, rows in seen for row in _listed(rows)}
    for name, rows in parts:
        uses = {used[row] for row in _listed(rows)} if used else set()
        if len(uses) > 1:
            raise UserError(
                f"fused_rows of {place.name!r}: the example shows that the rows called {name!r} belong to "
                f"{shorten(sorted(uses))}; correct fused_rows, or delete it to cut the weight as the example shows"
            )


def _listed(rows: Rows) -> Iterator[int]:
    yield from range(rows.start, rows.stop) if isinstance(rows, slice) else rows
