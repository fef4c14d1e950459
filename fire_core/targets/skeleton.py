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


class DepthwiseOrGrey(nn.Module):
    """Placeholder for a convolution whose weight has one input channel."""

    kind = "conv"
    cannot_tell = "one input channel: a depthwise convolution or a grey image, which a file does not show (pass --model)"


class EitherWay(nn.Module):
    """Placeholder for a layer that some models store as (in, out) and others, under the same name, as (out, in)."""

    kind = "linear"
    cannot_tell = (
        "stored as (in, out) by GPT-2, (out, in) by others, which a file does not show (pass --model)"
    )


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
        holder = _holder(root, path.split(".") if path else [], attribute, tensor)
        holder._parameters[attribute] = parameter
    return root


def _holder(root: nn.Module, words: list[str], attribute: str, tensor: Tensor) -> nn.Module:
    """Return the module at that path, made or replaced so that its kind fits the tensor; existing children are kept."""
    parent = root
    for word in words[:-1]:
        parent = parent._modules.setdefault(word, nn.Module())  # type: ignore[assignment]
    if not words:
        return root
    kind = _kind(words[-1], attribute, tensor)
    old = parent._modules.get(words[-1])
    if old is None or (type(old) is nn.Module and kind is not nn.Module):
        new = kind.__new__(kind)
        nn.Module.__init__(new)
        if isinstance(new, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            new.groups, new.in_channels = 1, tensor.shape[1]
        if old is not None:
            new._modules, new._parameters = old._modules, old._parameters
        parent._modules[words[-1]] = new
    return parent._modules[words[-1]]  # type: ignore[return-value]


def _kind(word: str, attribute: str, tensor: Tensor) -> type[nn.Module]:
    if attribute != "weight" or tensor.dim() not in (2, *CONVOLUTIONS):
        return nn.Module
    if tensor.dim() == 2 and word in EITHER_WAY:
        return EitherWay
    if tensor.dim() == 2:
        return nn.Embedding if word in EMBEDDINGS else nn.Linear
    return DepthwiseOrGrey if tensor.shape[1] == 1 else CONVOLUTIONS[tensor.dim()]
