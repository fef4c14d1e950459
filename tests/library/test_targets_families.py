"""Every family of timm and every causal language model of transformers: no weight is cut wrongly.

Two independent witnesses: a trace on the meta device, which says which rows reach which factor of a product, for every
weight; and, with random values, that with v at zero the output does not depend on q and k, nor on one half of a gate with
the other at zero.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tests.architectures as architectures
from fire_core.targets import Target, find_targets
from fire_core.targets.rows import trace_rows

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.reference, pytest.mark.timeout(1800)]
# with v at zero, these depend on q or k for reasons of their own
ON_THEIR_OWN = {
    "coat": "a convolution of v has a bias and is multiplied by q",
    "davit": "in attention over channels, q is what the values are to others",
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


def test_every_family_of_timm() -> None:
    total: Counter = Counter()
    wrong, dependent, proved = [], [], 0
    for family, name in architectures.timm_families():
        with torch.device("meta"):
            model = architectures.shortened(name)
        size = model.pretrained_cfg.get("input_size", (3, 224, 224))
        found, bad = count(model, torch.empty(1, *size, device="meta"))
        total += found
        wrong += [f"{name}: {target}" for target in bad]
        if any(
            part.startswith(("v", "second")) for t in find_targets(model).included for part in parts_of(t)[:1]
        ):
            with architectures.without_initialisation():
                real = filled(architectures.shortened(name))
            images = torch.randn(1, *size)
            answer = depends(real, lambda real=real, images=images: real(images))
            proved += answer is False
            dependent += [family] if answer else []
    print(f"timm: {dict(total)}, {proved} families proved")
    assert not wrong and set(dependent) <= set(ON_THEIR_OWN)
    assert proved > 20 and total["whole"] > 3000 and total["left out"] < 0.05 * total["whole"]


def test_every_causal_language_model_of_transformers() -> None:
    total: Counter = Counter()
    wrong, dependent, built, proved = [], [], 0, 0
    tokens = torch.arange(2, 14)[None]
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        model = architectures.small_language_model(name)
        if model is None:
            continue
        built += 1
        found, bad = count(model, {"input_ids": tokens})
        total += found
        wrong += [f"{name}: {target}" for target in bad]
        answer = depends(filled(model), lambda model=model: model(input_ids=tokens).logits)
        proved += answer is False
        dependent += [name] if answer else []
    print(f"transformers: {built} built, {dict(total)}, {proved} proved")
    assert not wrong and not dependent
    assert built > 100 and proved > 5
