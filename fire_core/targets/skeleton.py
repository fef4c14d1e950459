"""Module trees around the tensors of a checkpoint, so that target rules work where only names and shapes are known.

The kind of layer follows from the shape: a 2-D "weight" is a Linear, unless its name is that of an embedding; a 3-D to
5-D "weight" is a convolution. Names and shapes do not show grouped or depthwise convolutions, transposed storage, or
how a fused layer splits. Three kinds of weight are therefore left out, with the reason: convolutions with one input
channel, weights that look fused, and layers that are transposed in GPT-2 but not in later models with the same names.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

EMBEDDING_NAMES = (
    "wte wpe embed embeddings embedding embed_tokens embed_positions embed_in tok_embeddings token_embedding tok_emb "
    "pos_emb word_embeddings position_embeddings token_type_embeddings position_embedding positional_embedding shared "
    "relative_attention_bias"
)
EMBEDDINGS = frozenset(EMBEDDING_NAMES.split())
EITHER_WAY = ("c_fc", "c_proj")
CONVOLUTIONS: dict[int, type[nn.Module]] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


class Unclear(nn.Module):
    """Placeholder for a layer whose weight has this shape in more than one kind of layer."""

    def __init__(self, kind: str, cannot_tell: str) -> None:
        super().__init__()
        self.kind, self.cannot_tell = kind, f"{cannot_tell}, which a file does not show (pass --model)"


def skeleton(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a module whose `named_parameters()` are the given floating-point tensors, under their names, not copied.

    Other tensors (counters, masks) and running statistics of norm layers are left out. Tensors over the same memory
    with the same shape become one parameter. The module has no forward pass.
    """
    root = nn.Module()
    shared: dict[object, nn.Parameter] = {}
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        if not tensor.is_floating_point() or attribute in ("running_mean", "running_var"):
            continue
        key = name if tensor.is_meta else (tensor.data_ptr(), tensor.shape, tensor.stride())
        parameter = shared.setdefault(key, nn.Parameter(tensor, requires_grad=False))
        _holder(root, path.split(".") if path else [], attribute, tensor)._parameters[attribute] = parameter
    return root


def _holder(root: nn.Module, words: list[str], attribute: str, tensor: Tensor) -> nn.Module:
    """Return the module at that path, made or replaced so that its kind fits the tensor; existing children are kept."""
    module = root
    for depth, word in enumerate(words, start=1):
        old, last = module._modules.get(word), depth == len(words)
        if old is None or (last and type(old) is nn.Module):
            new = _layer(word, attribute, tensor) if last else nn.Module()
            if old is not None:
                new._modules, new._parameters = old._modules, old._parameters
            module._modules[word] = new
        module = module._modules[word]  # type: ignore[assignment]
    return module


def _layer(word: str, attribute: str, tensor: Tensor) -> nn.Module:
    """Return the layer, still without parameters, to which a tensor of that name and shape belongs."""
    if attribute != "weight" or tensor.dim() not in (2, *CONVOLUTIONS):
        return nn.Module()
    if tensor.dim() == 2 and word in EITHER_WAY:
        return Unclear("linear", "stored as (in, out) by GPT-2, (out, in) by others")
    if tensor.dim() > 2 and tensor.shape[1] == 1:
        return Unclear("conv", "one input channel: a depthwise convolution or a grey image")
    flat = nn.Embedding if word in EMBEDDINGS else nn.Linear
    kind = flat if tensor.dim() == 2 else CONVOLUTIONS[tensor.dim()]
    layer: nn.Module = kind.__new__(kind)
    nn.Module.__init__(layer)
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        layer.groups, layer.in_channels = 1, tensor.shape[1]
    return layer
