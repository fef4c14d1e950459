"""Module trees around the tensors of a checkpoint, so that target rules work where only names and shapes are known.

The kind of layer follows from the shape: a 2-D "weight" is a Linear, a 3-D to 5-D "weight" is a convolution. A file does
not show everything, so what may be something else is left out, with the reason: what may be a table that is looked up,
convolutions with one input channel, gains, weights that look fused, layers that are transposed in GPT-2 but not in later
models with the same names, and 3-D weights with a large last dimension. Grouped convolutions cannot be told from others.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fire_core.targets.model_targets import identity

TABLES = re.compile(
    r"emb|code_?book|vocab|look_?up|dictionary|word_?vec"  # anywhere in the path
    r"|(?:^|\.)(?:wte|wpe|tok|tokens?|pos|positions?|table|shared|relative_attention_bias)\.weight$"
)
NO_TABLES = re.compile("ensembl|assembl|member|embed_out")  # the last is the output layer of GPT-NeoX
OUTPUTS = re.compile(  # output layers have as many rows as a vocabulary, too
    r"(?:^|\.)(?:lm_head|embed_out|output_projection|head|head_dist|classifier|score|qa_outputs)(?:\.(?:\d+|fc))?\.weight$"
)
TALL = 8  # times as many rows as columns: wider than the feed-forward layers of common models
LONGEST_KERNEL = 15  # of one dimension: a stack of matrices and a bilinear form have more columns
CONVOLUTIONS: dict[int, Any] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


def skeleton(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a module whose `named_parameters()` are the given floating-point tensors, under their names, not copied.

    Other tensors (counters, masks) and running statistics of norm layers are left out. Tensors over the same memory
    with the same shape become one parameter. The module has no forward pass.
    """
    statistics = ("running_mean", "running_var")
    known = {n: t for n, t in tensors.items() if t.is_floating_point() and not n.endswith(statistics)}
    memory, tables = {name: identity(tensor) for name, tensor in known.items()}, _tables(known)
    holders, layers = Counter(memory.values()), dict[str, nn.Module]()
    for name, tensor in known.items():
        path, _, attribute = name.rpartition(".")
        if name in tables and holders[memory[name]] > 1:  # the Linear that holds the same weight decides
            layers[path] = nn.Embedding(1, 1, device="meta")
        elif attribute == "weight":
            word, bias = path.rpartition(".")[2], known.get(f"{path}.bias")
            layers[path] = _layer(word, tensor, bias, tables.get(name, ""))
    root, shared = nn.Module(), dict[object, nn.Parameter]()
    for name, tensor in known.items():
        *words, attribute = name.split(".")
        module: Any = root
        for depth, word in enumerate(words, start=1):
            module = module._modules.setdefault(word, layers.get(".".join(words[:depth]), nn.Module()))
        parameter = nn.Parameter(tensor, requires_grad=False)
        module._parameters[attribute] = shared.setdefault(memory[name], parameter)
    return root


def _tables(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the weights that may be tables, by their name or because they have as many rows as a vocabulary.

    The rows of what may be a table by its name, and those of output layers, count as vocabularies. An output layer has
    a bias or a usual name, and no layer of the file has as many inputs as it has rows.
    """
    flat = {n: t for n, t in tensors.items() if t.dim() == 2 and n.rpartition(".")[2] == "weight"}
    named = {name for name in flat if TABLES.search(NO_TABLES.sub("", name.lower()))}
    # a stack of tables, unlike the convolution of a "patch_embed.proj", is itself named like one
    stacks = [n for n, t in tensors.items() if t.dim() == 3 and n.endswith(".weight")]
    named |= {n for n in stacks if TABLES.search(".".join(n.lower().split(".")[-2:]))}
    heads = {n for n in flat if OUTPUTS.search(n) or n.removesuffix("weight") + "bias" in tensors} - named
    inputs = {tensor.shape[1] for tensor in tensors.values() if tensor.dim() > 1}
    sizes = {tensors[name].shape[-2] for name in named | heads} - inputs
    found = dict.fromkeys(named, "named like a table that is looked up, or near one")
    for name, tensor in flat.items():
        rows, columns = tensor.shape
        if name not in named | heads and rows not in inputs and (rows in sizes or rows > TALL * columns):
            found[name] = "as many rows as a vocabulary: a table that is looked up, or an output layer"
    return found


def _layer(word: str, tensor: Tensor, bias: Tensor | None, unclear: str) -> nn.Module:
    """Return the layer, with a weight to be replaced, that has a weight of this shape and this last word of its path."""
    dim = tensor.dim()
    if re.search(r"norm(?!al)|^ln_?\d*$", word.lower()):
        unclear = unclear or "named like a norm: gains"
    if bias is not None and bias.dim() > 1:
        unclear = unclear or "with a bias of several dimensions: gains of a norm, or a stack"
    if dim == 2 and word in ("c_fc", "c_proj"):
        unclear = unclear or "stored as (in, out) by GPT-2, (out, in) by others"
    if dim in CONVOLUTIONS and tensor.shape[1] == 1:
        unclear = unclear or "one input channel: a depthwise convolution or a grey image"
    if dim == 3 and tensor.shape[2] > LONGEST_KERNEL:
        unclear = unclear or "three dimensions, the last one large: a stack of matrices or a long kernel"
    if dim == 2 and not unclear:
        return nn.Linear(1, 1, bias=False, device="meta")
    if dim in CONVOLUTIONS and not unclear:
        return CONVOLUTIONS[dim](tensor.shape[1], 1, 1, bias=False, device="meta")
    layer: Any = nn.Module()
    if unclear:
        layer.cannot_tell = f"{unclear}, which a file does not show (pass --model)"
    return layer
