"""Targets of real architectures, built from small configurations: no weights are downloaded.

That a block of rows is v is proved by values: with it at zero, an attention layer forgets q and k.
"""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import tests.architectures  # noqa: F401 (its import makes that of torchvision possible)
from fire_core.targets import find_targets

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")

pytestmark = pytest.mark.reference
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def build(name: str, **settings: object) -> nn.Module:
    """A causal language model of transformers in evaluation mode, its biases random as well."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **TOKENS, **settings})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 14)[None] % 64).logits


GATED = {"intermediate_size": 48, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4}
FUSED = {
    "gpt2": GPT2,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 32},
    **dict.fromkeys(("phi3", "llama"), GATED),
}
GATED_QUERY = {**GATED, "head_dim": 8, "num_experts": 0, "layer_types": ["full_attention"]}
INTERLEAVED = {  # their fused layers lie in an order of their own
    "gpt_bigcode": ("attn.c_attn", {**GPT2, "multi_query": False}),
    "gpt_neox": ("attention.query_key_value", {"intermediate_size": 48}),
    "codegen": ("attn.qkv_proj", {**GPT2, "rotary_dim": 4}),
    "falcon": ("self_attention.query_key_value", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), ("self_attn.q_proj", GATED_QUERY)),
    "mamba": ("mixer.in_proj", {}),
    "gpt_oss": ("mlp.experts.gate_up_proj", {**GATED, "num_local_experts": 3}),
}


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_layers_stay_out_with_a_reason(name: str) -> None:
    layer, settings = INTERLEAVED[name]
    table = find_targets(build(name, **settings))
    (found,) = (t for t in table if f".{layer}" in t.parameter and t.kind != "bias")
    assert not found.included
    assert any(word in found.reason for word in ("not known", "interleaved", "may hold several matrices"))


@pytest.mark.parametrize("name", FUSED)
def test_q_k_and_v_rows_are_what_they_are_called(name: str) -> None:
    model = build(name, **FUSED[name])
    table = find_targets(model, "attention")
    ((q,), (k,), (v,)) = ([target for target in table.included if target.role == role] for role in "qkv")
    for target in (q, k, v):
        target.write(model, torch.randn(target.shape))
    start = logits(model)
    v.write(model, torch.zeros(v.shape))
    silent = logits(model)
    for target in (q, k):
        target.write(model, torch.randn(target.shape))
    assert torch.allclose(logits(model), silent, atol=1e-5) and not torch.allclose(silent, start, atol=1e-3)


def test_gpt2_table() -> None:
    model = build("gpt2", num_hidden_layers=2)
    table = find_targets(model)
    fused = [f"transformer.h.0.attn.c_attn.weight[{part}]" for part in "qkv"]
    assert [t.name for t in table.included][:4] == ["lm_head.weight", *fused]
    assert len(table.included) == 1 + 2 * 6
    fc = next(t for t in table if t.name == "transformer.h.0.mlp.c_fc.weight")
    assert fc.transposed and fc.shape == (128, 32) and fc.scale == 2.0
    assert torch.equal(fc.matrix(model), model.transformer.h[0].mlp.c_fc.weight.T)
    assert all(len(find_targets(model, rule).included) == 12 for rule in ("no_embedding", "no_head"))
    assert len(find_targets(model, "mlp").included) == 4


def test_expert_stacks_split_into_experts_and_halves() -> None:
    model = build("mixtral", **GATED, num_local_experts=3)
    experts = [t for t in find_targets(model).included if t.kind == "expert"]
    assert Counter(t.shape for t in experts) == {(48, 32): 6, (32, 48): 3}
    gate = next(t for t in experts if t.name.endswith("[1,gate]"))
    stack = model.get_parameter(gate.parameter)
    assert torch.equal(gate.matrix(model), stack[1][:48])
    gate.write(model, torch.ones(48, 32))
    assert (gate.matrix(model) == 1).all() and stack[0].abs().max() < 1


def test_a_class_whose_rows_no_table_can_tell_stays_out() -> None:
    """EfficientViM: one class of convolutions, which hold B, C and dt in one place and one matrix in another."""
    layer = timm.models.efficientvim.ConvLayer1d(4, 8, 1)
    table = find_targets(nn.Sequential(layer, nn.Linear(8, 2)))
    assert [target.parameter for target in table.unclear] == ["0.conv.weight"]
