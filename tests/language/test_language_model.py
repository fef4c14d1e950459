"""The decoder against an independent implementation, closed forms, and itself in another form."""

import math

import pytest
import torch

import tests.architectures  # noqa: F401 (its import makes that of torchvision possible)
from fire_core.targets import find_targets
from language.model import Decoder, Shape, adamw, token_loss

TINY = {"layers": 2, "heads": 4, "width": 32, "block": 16, "vocabulary": 61}


def tiny(**changes) -> Decoder:
    torch.manual_seed(0)
    return Decoder(Shape(**(TINY | changes)))


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(TINY["vocabulary"], (3, 16), generator=torch.Generator().manual_seed(seed))


def copied_reference(net: Decoder) -> torch.nn.Module:
    """transformers' GPT-2 with our weights; its biases are zero and stay so, as ours has none."""
    transformers, shape = pytest.importorskip("transformers"), net.shape
    config = transformers.GPT2Config(
        vocab_size=shape.vocabulary, n_positions=shape.block, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.heads, activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    reference, ours = transformers.GPT2LMHeadModel(config), dict(net.named_parameters())
    with torch.no_grad():
        for name, parameter in reference.transformer.named_parameters():
            if name.endswith("bias"):
                parameter.zero_().requires_grad_(False)
            else:  # transformers stores these projections as (in, out)
                flip = any(part in name for part in ("c_attn", "c_proj", "c_fc"))
                parameter.copy_(ours[name].T if flip else ours[name])
    return reference.train()


@pytest.mark.reference
def test_loss_equals_transformers_gpt2_at_start_and_after_20_steps(fidelity):
    net, largest = tiny(), 0.0
    reference = copied_reference(net)
    optimizers = [adamw(model, betas=(0.9, 0.95), weight_decay=0.1) for model in (net, reference)]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = 3e-3
    for step in range(21):
        inputs, targets = tokens(step), tokens(100 + step)
        losses = (net(inputs, targets), token_loss(reference(inputs).logits, targets))
        largest = max(largest, abs(losses[0].item() - losses[1].item()))
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    fidelity("reference", "fig3", "loss over 20 steps of AdamW, against GPT-2 of transformers", largest, 1e-4)
    # the steps did something: the start is ln 61 = 4.11 on random targets, then memory
    assert losses[0].item() < 4.6


def test_paper_model_has_73_targets_and_124_million_weights(fidelity):
    with torch.device("meta"):
        net = Decoder(Shape())
    table = {target.name: target for target in find_targets(net).included}
    fidelity("reference", "fig3", "number of projected matrices, counted by hand", abs(len(table) - 73), 0)
    by_hand = 50304 * 768 + 1024 * 768 + 12 * 12 * 768**2 + 25 * 768
    ours = sum(p.numel() for p in net.parameters())
    fidelity("reference", "fig3", "number of parameters, counted by hand", abs(ours - by_hand), 0)
    assert {"h.0.attn.c_attn.weight[q]", "h.11.attn.c_attn.weight[v]"} <= table.keys()
    assert all(target.shape == (768, 768) for name, target in table.items() if "c_attn" in name)
    assert not any("wpe" in name or "ln_" in name for name in table)
    [head] = [target for target in table.values() if target.shape == (50304, 768)]
    assert head.scale == pytest.approx(math.sqrt(50304 / 768))


def test_initial_weights_have_gpt2_spread():
    net = Decoder(Shape(layers=8, heads=4, width=256, block=64, vocabulary=512))
    for name, parameter in net.named_parameters():
        if parameter.dim() == 2:
            wanted = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # sqrt(2 * 8) = 4
            assert abs(float(parameter.detach().std()) / wanted - 1) < 0.03, name
        else:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
    assert net.lm_head.weight is net.wte.weight


@pytest.mark.parametrize("qkv", ["fused", "split"])
def test_grouped_queries_equal_full_attention_with_repeated_keys_and_values(qkv):
    grouped, full = tiny(key_value_heads=2, qkv=qkv), tiny()
    weights = grouped.state_dict()
    for place in ("h.0.attn", "h.1.attn"):
        names = [f"{place}.c_attn.weight"] if qkv == "fused" else [f"{place}.{n}_proj.weight" for n in "qkv"]
        q, *others = torch.cat([weights.pop(name) for name in names]).split((32, 16, 16))
        repeated = [part.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32) for part in others]
        weights[f"{place}.c_attn.weight"] = torch.cat([q, *repeated])
    full.load_state_dict(weights)
    assert torch.allclose(grouped(tokens()), full(tokens()), atol=1e-5)
    targets = find_targets(grouped).included
    assert len(targets) == 13
    shapes = [t.shape for t in targets if ".attn." in t.name and "c_proj" not in t.name]
    assert shapes[:3] == [(32, 32), (16, 32), (16, 32)]


@pytest.mark.parametrize("activation", ["squared_relu", "swiglu"])
def test_activations_by_hand(activation):
    net = tiny(activation=activation).h[0].mlp
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    hidden = x @ net.c_fc.weight.T
    if activation == "squared_relu":
        hidden = hidden.clamp(min=0) ** 2
    else:
        hidden = hidden[:, :96] / (1 + torch.exp(-hidden[:, :96])) * hidden[:, 96:]
    assert torch.allclose(net(x), hidden @ net.c_proj.weight.T, atol=1e-6)


def test_residual_lambdas_weigh_stream_and_embedding_and_start_neutral():
    plain, net = tiny(), tiny(residual_lambdas=True)
    assert torch.equal(plain(tokens()), net(tokens()))
    net(tokens(), tokens(2)).backward()
    assert net.residual_lambdas.grad.abs().min() > 0 and net.embedding_lambdas.grad[1].abs() > 0
    with torch.no_grad():
        net.residual_lambdas.copy_(torch.tensor([0.5, 2.0]))
        net.embedding_lambdas.copy_(torch.tensor([0.25, -1.0]))
        start = net.wte(tokens()) + net.wpe.weight
        by_hand = net.lm_head(net.ln_f(net.h[1](2.0 * net.h[0](0.75 * start) - start)))
        assert torch.allclose(net(tokens()), by_hand, atol=1e-6)
    assert [t.name for t in find_targets(net).included] == [t.name for t in find_targets(plain).included]
