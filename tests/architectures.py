"""Real architectures with few layers; `python -m tests.architectures` prints docs/concepts/architectures.md."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from unittest.mock import patch

import torch
from torch import nn

from fire_core.targets import find_targets
from vision.torchvision_import import import_torchvision

if find_spec("torchvision") is not None:
    import_torchvision()


def _language_model(name: str, **settings: object) -> nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **settings))


gpt2 = partial(_language_model, "gpt2", n_layer=2)
llama = partial(_language_model, "llama", num_hidden_layers=2, num_key_value_heads=8)
phi3 = partial(_language_model, "phi3", num_hidden_layers=2, num_key_value_heads=8)
mixtral = partial(_language_model, "mixtral", num_hidden_layers=2)


def _timm(name: str, **settings: object) -> nn.Module:
    import timm

    return timm.create_model(name, **settings)


vit = partial(_timm, "vit_tiny_patch16_224", depth=2)
convnext = partial(_timm, "convnext_tiny", depths=(1, 1, 1, 1))
mha = partial(nn.TransformerEncoderLayer, 512, 8)  # torch's own encoder layer


def show() -> None:
    """Print the targets of all of them, without memory for their weights."""
    for name in ("gpt2", "llama", "phi3", "mixtral", "vit", "convnext", "mha"):
        with torch.device("meta"):
            print(f"targets from tests.architectures:{name}", find_targets(globals()[name]()), "", sep="\n")


def shortened(name: str) -> nn.Module:
    """Return a model of timm with at most two of each run of equal blocks, or all of them where it needs them all."""
    import timm

    model = timm.create_model(name)
    if name.startswith(("edgenext", "efficientvit_m", "hgnet", "res2net")):
        return model
    for module in list(model.modules()):
        if type(module) in (nn.Sequential, nn.ModuleList) and len(module) > 2:
            kept, previous, run = [], None, 0
            for child in module.named_children():
                kind = (type(child[1]), tuple(p.shape for p in child[1].parameters()))
                run = run + 1 if kind == previous and kind[1] else 1
                previous = kind
                kept += [child] if run <= 2 else []
            numbered = type(module) is nn.ModuleList
            module._modules = {str(i) if numbered else key: child for i, (key, child) in enumerate(kept)}
    return model


@contextmanager
def without_initialisation() -> Iterator[None]:
    """Build modules whose parameters have no values yet, which is fast."""
    names = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    with patch.multiple(nn.init, **{name: lambda tensor, *arguments, **settings: tensor for name in names}):
        yield


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "n_embd": 32, "n_layer": 2, "n_head": 4, "d_model": 32, "n_heads": 4,
    "n_layers": 2, "max_seq_len": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "ffn_dim": 48,
    "decoder_ffn_dim": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "num_layers": 2, "rotary_dim": 4,
    "n_positions": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
    "n_inner": None, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


def small_language_model(name: str, **settings: object) -> nn.Module | None:
    """Return a tiny model of transformers for twelve tokens, or None where SIZES do not fit; `...` leaves a default."""
    import transformers

    try:
        config = transformers.AutoConfig.for_model(name)
        for part in filter(None, (config, getattr(config, "text_config", None))):
            for key, value in (SIZES | settings).items():
                if value is not ... and hasattr(part, key) and not callable(getattr(part, key)):
                    setattr(part, key, value)
            for key in ("layer_types", "mlp_layer_types"):
                if key not in settings and isinstance(getattr(part, key, None), list):
                    setattr(part, key, getattr(part, key)[: part.num_hidden_layers])
        build = transformers.AutoModelForCausalLM.from_config
        with torch.device("meta"):  # some configurations have further sizes, and their models stay large
            if sum(p.numel() for p in build(config).parameters()) > 2e7:
                return None
        torch.manual_seed(0)
        model = build(config, attn_implementation="eager").eval()
        with torch.no_grad():
            model(input_ids=torch.arange(2, 14)[None])
    except Exception:
        return None
    return model


if __name__ == "__main__":
    show()
