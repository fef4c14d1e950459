"""A Mixture-of-Experts and a Mamba model in training: every target learns, is projected, and learns again."""

import pytest
import torch
from torch import Tensor, nn

from fire_core.projection import fire
from fire_core.targets import find_targets

pytest.importorskip("transformers")
from test_targets_architectures import build

pytestmark = pytest.mark.reference
MODELS = {"mixtral": {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 3}, "mamba": {}}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Losses of predicting sequences in which each token is the one before it plus 3."""
    losses = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        tokens = (torch.randint(64, (8, 1), generator=draw) + 3 * torch.arange(16)) % 64
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def spectra(model: nn.Module, name: str) -> list[Tensor]:
    """Singular values of the blocks that a reader of the architecture would cut out by hand."""
    weights = {key: value.detach() for key, value in model.named_parameters()}
    if name == "mixtral":
        gate_up = weights["model.layers.0.mlp.experts.gate_up_proj"]
        down = weights["model.layers.0.mlp.experts.down_proj"]
        blocks = [half for expert in gate_up for half in (expert[:48], expert[48:])] + list(down)
    else:
        inner = weights["backbone.layers.0.mixer.in_proj.weight"]
        blocks = [*inner.chunk(2), weights["backbone.layers.0.mixer.out_proj.weight"]]
    return [torch.linalg.svdvals(block) for block in blocks]


@pytest.mark.parametrize("name", MODELS)
def test_targets_learn_before_and_after_they_are_projected(name: str) -> None:
    model = build(name, **MODELS[name]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    targets = find_targets(model).included
    for projected in (False, True):
        before = [target.matrix(model).detach().clone() for target in targets]
        losses = train(model, optimizer, 30)
        assert losses[-1] < 0.5 * losses[0]
        for target, old in zip(targets, before, strict=True):
            assert (old != target.matrix(model)).float().mean() > 0.9, f"{target.name} did not learn"
        if not projected:
            assert all(values.max() > 1.05 * values.min() for values in spectra(model, name))
            others = {key: value.detach().clone() for key, value in model.named_parameters()}
            changed = fire(model, solver="exact").changed
            assert changed == {target.parameter for target in targets}
            for values in spectra(model, name):
                torch.testing.assert_close(values, values.mean().expand_as(values), rtol=1e-4, atol=0)
            for key in others.keys() - changed:
                assert torch.equal(model.get_parameter(key), others[key]), f"{key} is no target"
