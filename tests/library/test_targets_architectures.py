"""Targets of real architectures, built from small configurations: no weights are downloaded.
That a block of rows is v is proved by values: with it at zero, an attention layer forgets q and k. For all families of timm
and causal language models of transformers, a trace of the rows and the values say that no weight is cut wrongly."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tests.architectures as architectures
from fire_core.targets import Target, find_targets
from fire_core.targets.rows import trace_rows

transformers, timm = pytest.importorskip("transformers"), pytest.importorskip("timm")
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

pytestmark = pytest.mark.reference
build = partial(architectures.small_language_model, num_hidden_layers=1, n_layer=1, n_layers=1)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 14)[None] % 64).logits


INTERLEAVED = {  # their fused layers lie in an order of their own
    "gpt_neox": ("attention.query_key_value", {}),
    "qwen3_next": ("self_attn.q_proj", {"num_experts": 0, "layer_types": ["full_attention"]}),
    "mamba": ("mixer.in_proj", {"layer_types": ...}),
    "gpt_oss": ("mlp.experts.gate_up_proj", {}),
}


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_layers_stay_out_with_a_reason(name: str) -> None:
    layer, settings = INTERLEAVED[name]
    table = find_targets(build(name, **settings))
    (found,) = (t for t in table if f".{layer}" in t.parameter and t.kind != "bias")
    assert not found.included
    assert any(word in found.reason for word in ("not known", "interleaved", "may hold several matrices"))


@pytest.mark.parametrize("name", ["gpt2", "mpt", "phi3"])
def test_q_k_and_v_rows_are_what_they_are_called(name: str) -> None:
    model = build(name)
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


def test_expert_stacks_split_into_experts_and_halves() -> None:
    model = build("mixtral")
    gate = next(t for t in find_targets(model).included if t.name.endswith("[1,gate]"))
    stack = model.get_parameter(gate.parameter)
    assert torch.equal(gate.matrix(model), stack[1][:48])
    gate.write(model, torch.ones(48, 32))
    assert (gate.matrix(model) == 1).all() and stack[0].abs().max() < 1


def test_a_class_whose_rows_no_table_can_tell_stays_out() -> None:
    """EfficientViM: one class of convolutions, which hold B, C and dt in one place and one matrix in another."""
    table = find_targets(nn.Sequential(timm.models.efficientvim.ConvLayer1d(4, 8, 1), nn.Linear(8, 2)))
    assert [target.parameter for target in table.unclear] == ["0.conv.weight"]


# with v or up at zero, these depend on q, k or the gate for reasons of their own
ON_THEIR_OWN = {
    "coat": "a convolution of v has a bias and is multiplied by q",
    "davit": "in attention over channels, q is what the values are to others",
    "mambaout": "a convolution of one part of up has a bias and is multiplied by the gate",
    "mvitv2": "pooled q is added to the output",
}


def count(model: nn.Module, example: Any) -> tuple[Counter, list[str]]:
    """Return how many weights are whole, cut and left out, and the targets that hold rows of different factors."""
    seen, parameters = trace_rows(model, example), dict(model.named_parameters())
    table = find_targets(model)
    chosen = [t for t in table.included if t.kind in ("linear", "conv")]
    cut = {t.parameter for t in chosen if any(not p.isdigit() and "group" not in p for p in parts_of(t))}
    wrong = []
    for target in chosen:
        parameter = parameters[target.parameter]
        uses = {row: p for p, rows in seen.parts.get(id(parameter), ()) for row in listed(rows, parameter)}
        if uses and not target.transposed:
            rows = target.index[0] if target.index else slice(None)
            if len({uses[row] for row in listed(rows, parameter)}) > 1:
                wrong.append(target.name)
    whole = {t.parameter for t in chosen} - cut
    return Counter({"left out": len(table.unclear), "cut": len(cut), "whole": len(whole)}), wrong


def parts_of(target: Target) -> list[str]:
    """What the name of a target says of its rows; the taps of a convolution are numbers."""
    return [part for part in target.name.partition("[")[2].rstrip("]").split(",") if part]


def listed(rows: Any, parameter: Tensor) -> Any:
    return range(len(parameter))[rows] if isinstance(rows, slice) else rows


# a part, and the part at zero with which the output does not depend on it
PAIRS = {"q": "v", "k": "v", "gate": "up", "first": "second"}


def depends(model: nn.Module, run: Any) -> bool | None:
    """Return whether the output depends on q, k and gates with v and the other halves at zero; None if nothing is cut."""
    parts: dict[str, list[Target]] = {}
    for target in find_targets(model).included:
        parts.setdefault(next(iter(parts_of(target)), ""), []).append(target)
    owners = {t.parameter for name in PAIRS.values() for t in parts.get(name, ())}
    changed = [t for name in PAIRS for t in parts.get(name, ()) if t.parameter in owners]
    if not changed:
        return None
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for target in (t for name in set(PAIRS.values()) for t in parts.get(name, ())):
            target.write(model, torch.zeros(target.shape))
            if (bias := parameters.get(target.parameter.removesuffix("weight") + "bias")) is not None:
                bias.zero_()
        before = [leaf.clone() for leaf in tree_leaves(run()) if isinstance(leaf, Tensor)]
        for target in changed:
            target.write(model, torch.randn(target.shape))
        after = [leaf for leaf in tree_leaves(run()) if isinstance(leaf, Tensor)]
    return not torch.allclose(before[0], after[0], rtol=1e-4, atol=1e-4)


def filled(model: nn.Module) -> nn.Module:
    """Give every parameter a random value; norms keep a gain near 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fan = parameter[0].numel() if parameter.dim() > 1 else 100
            parameter.normal_(0, fan**-0.5).add_(float(parameter.dim() == 1 and name.endswith("weight")))
    return model.eval()


def models_of_timm() -> Iterator[tuple]:
    """Family, a small model of it on the meta device, its example, and a function that returns it filled and how it runs."""
    small = "test_ tiny nano atto pico xxs _xs _s_ small _18 b0 _m0 _t0 femto".split()  # noqa: SIM905
    for family in timm.list_modules():
        if not (models := timm.list_models(module=family)):
            continue
        name = next((name for name in models if any(word in name for word in small)), models[0])
        with torch.device("meta"):
            model = architectures.shortened(name)
        size = 1, *model.pretrained_cfg.get("input_size", (3, 224, 224))

        def real(name: str = name, size: tuple = size) -> tuple[nn.Module, Any]:
            with architectures.without_initialisation():
                model = filled(architectures.shortened(name))
            images = torch.randn(size)
            return model, lambda: model(images)

        yield family, model, torch.empty(size, device="meta"), real


def models_of_transformers() -> Iterator[tuple]:
    tokens = torch.arange(2, 14)[None]
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if (model := architectures.small_language_model(name)) is not None:
            real = lambda model=model: (filled(model), lambda: model(input_ids=tokens).logits)  # noqa: E731
            yield name, model, {"input_ids": tokens}, real


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("models, least", [(models_of_timm, (50, 20)), (models_of_transformers, (100, 5))])
def test_no_weight_of_any_family_is_cut_wrongly(models: Any, least: tuple[int, int]) -> None:
    """`least`: how many are built, and how many proved by their values."""
    total, wrong, answers = Counter[str](), [], {}
    for name, model, example, real in models():
        found, bad = count(model, example)
        total += found
        wrong += [f"{name}: {target}" for target in bad]
        kinds = {part for target in find_targets(model).included for part in parts_of(target)[:1]}
        answers[name] = depends(*real()) if kinds & set(PAIRS.values()) else None
    proved = sum(answer is False for answer in answers.values())
    print(f"{models.__name__}: {len(answers)} built, {dict(total)}, {proved} proved")
    assert not wrong and {name for name, answer in answers.items() if answer} <= set(ON_THEIR_OWN)
    assert len(answers) > least[0] and proved > least[1]
    if models is models_of_timm:
        assert total["whole"] > 3000 and total["left out"] < 0.05 * total["whole"]
