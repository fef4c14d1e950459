"""Fused rows and heads: known, declared or shown by an example, and otherwise left out; never concluded from a name.

The layers are those of public bug reports, each with a forward pass in which the order of the rows can be read.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fire_core import UserError, find_targets, fire
from fire_core.targets.rows import trace_rows


class LegacyAttention(nn.Module):
    """guided-diffusion and LDM: heads are split before q, k and v, as the released weights have it."""

    def __init__(self, channels: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Conv1d(channels, 3 * channels, 1, bias=False)
        self.proj_out = nn.Conv1d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, time = x.shape
        width = channels // self.heads
        q, k, v = self.qkv(x).reshape(batch * self.heads, 3 * width, time).split(width, dim=1)
        scores = torch.softmax(torch.einsum("bct,bcs->bts", q, k) / math.sqrt(width), dim=-1)
        return x + self.proj_out(torch.einsum("bts,bcs->bct", scores, v).reshape(batch, channels, time))


class LoopOverHeads(nn.Module):
    """The rows of each head are q, k and v, and each head has products of its own."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = []
        for head in self.qkv(x).chunk(self.heads, dim=-1):
            q, k, v = head.chunk(3, dim=-1)
            mixed.append(torch.softmax(q @ k.mT, dim=-1) @ v)
        return self.out(torch.cat(mixed, dim=-1))


class GatedSum(nn.Module):
    """The two halves of one layer are added to those of another one before they become a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.later, self.out = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (self.plain(x) + self.later(x)).chunk(2, dim=-1)
        return self.out(torch.sigmoid(gate) * up)


class GroupedHeads(nn.Module):
    """InternLM2's order: for each group the q of its heads, then its k, then its v; with a rotation of q and k."""

    def __init__(self, width: int = 64, heads: int = 8, groups: int = 2, name: str = "wqkv") -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.name = heads, groups, width // heads, name
        setattr(self, name, nn.Linear(width, (heads + 2 * groups) * self.size, bias=False))
        self.wo = nn.Linear(width, width, bias=False)

    def rotated(self, x: Tensor) -> Tensor:
        angle = torch.linspace(0, 1, x.shape[-1])
        first, second = x.chunk(2, dim=-1)
        return x * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        fused = getattr(self, self.name)(x).unflatten(-1, (self.groups, -1, self.size))
        q, k, v = fused[..., :-2, :].flatten(-3, -2), fused[..., -2, :], fused[..., -1, :]
        q, k, v = self.rotated(q).transpose(1, 2), self.rotated(k).transpose(1, 2), v.transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class GatedQuery(nn.Module):
    """Qwen3.5's order: q_proj holds the query and then the gate of each head."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, 2 * width, bias=False)
        self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, dim=-1)
        k, v = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.k_proj, self.v_proj))
        mixed = nn.functional.scaled_dot_product_attention(*(p.transpose(1, 2) for p in (q, k, v)))
        return self.o_proj(mixed.transpose(1, 2).flatten(2) * torch.sigmoid(gate.flatten(2)))


class SwiGLU(nn.Module):
    """DINOv2."""

    def __init__(self, width: int = 32, hidden: int = 48) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(nn.functional.silu(gate) * up)


class GEGLU(nn.Module):
    """diffusers: the layer stands in a module of its own, its reader elsewhere."""

    def __init__(self, width: int = 32, hidden: int = 48) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.proj(x).chunk(2, dim=-1)
        return up * nn.functional.gelu(gate)


def diffusers_feed_forward() -> nn.Module:
    return nn.Sequential(GEGLU(), nn.Dropout(0.0), nn.Linear(48, 32))


class ShortConvolution(nn.Module):
    """LFM2: in_proj holds B, C and x, and x passes a depthwise convolution between the products."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.conv = nn.Conv1d(width, width, 3, groups=width, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        b, c, values = self.in_proj(x).transpose(-1, -2).chunk(3, dim=-2)
        return self.out_proj((c * self.conv(b * values)[..., : x.shape[1]]).transpose(-1, -2))


class ConformerConvolution(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.pointwise_conv1 = nn.Conv1d(width, 2 * width, 1)
        self.depthwise_conv = nn.Conv1d(width, width, 3, padding=1, groups=width)
        self.norm, self.pointwise_conv2 = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.glu(self.pointwise_conv1(x), dim=1)
        return self.pointwise_conv2(nn.functional.silu(self.norm(self.depthwise_conv(x))))


def rows(*ranges: tuple[int, int]) -> list[int]:
    return [row for start, stop in ranges for row in range(start, stop)]


FUSED = {  # module, its example, the fused weight, and the rows of its matrices
    "legacy": (LegacyAttention, (2, 32, 5), "qkv.weight",
               [rows(*((24 * h + 8 * p, 24 * h + 8 * p + 8) for h in range(4))) for p in range(3)]),
    "loop": (LoopOverHeads, (2, 5, 32), "qkv.weight",
             [rows(*((24 * h + 8 * p, 24 * h + 8 * p + 8) for h in range(4))) for p in range(3)]),
    "grouped": (GroupedHeads, (2, 5, 64), "wqkv.weight",
                [rows((0, 32), (48, 80)), rows((32, 40), (80, 88)), rows((40, 48), (88, 96))]),
    "gated query": (GatedQuery, (2, 5, 32), "q_proj.weight",
                    [rows(*((16 * h + 8 * p, 16 * h + 8 * p + 8) for h in range(4))) for p in range(2)]),
    "w12": (SwiGLU, (3, 32), "w12.weight", [rows((0, 48)), rows((48, 96))]),
    "geglu": (diffusers_feed_forward, (3, 32), "0.proj.weight", [rows((0, 48)), rows((48, 96))]),
    "short convolution": (ShortConvolution, (2, 7, 16), "in_proj.weight",
                          [rows((0, 16)), rows((16, 32)), rows((32, 48))]),
    "conformer": (ConformerConvolution, (2, 16, 9), "pointwise_conv1.weight", [rows((0, 16)), rows((16, 32))]),
}  # fmt: skip


@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_weight_stays_out_and_an_example_cuts_it(kind: str) -> None:
    make, shape, name, expected = FUSED[kind]
    torch.manual_seed(0)
    model = make()
    table = find_targets(model)
    (out,) = [t for t in table if t.parameter == name]
    assert not out.included and "may hold several matrices" in out.reason
    assert str(table).endswith(f"1 of {len(table.parameters) + 1} weights left out: {name}")

    start = model.get_parameter(name).detach().clone().flatten(1)
    found = [t for t in find_targets(model, example=torch.randn(shape)).included if t.parameter == name]
    numbers = torch.arange(float(len(start))).view(-1, *[1] * (model.get_parameter(name).dim() - 1))
    cut = [t.matrix({name: numbers.expand_as(model.get_parameter(name))})[:, 0].int().tolist() for t in found]
    assert sorted(cut) == sorted(expected)
    report = fire(model, solver="exact", scale="none", example=torch.randn(shape))
    for part in expected:
        u, _, vh = torch.linalg.svd(start[part], full_matrices=False)
        assert torch.allclose(model.get_parameter(name).detach().flatten(1)[part], u @ vh, atol=1e-4)
    assert name in report.changed and "left out" not in str(report)


def test_the_report_says_what_is_left_out_and_which_share_was_treated() -> None:
    """An official Muon treats 2,048 of 11.2 M parameters of a ResNet-18, and nobody notices (WatChMaL 108)."""
    model = nn.Sequential(SwiGLU(), nn.Linear(32, 4))
    report = fire(model)
    whole = sum(p.numel() for p in model.parameters())
    assert report.share == (32 * 48 + 32 * 4) / whole
    assert str(report).endswith("1 of 3 weights left out: 0.w12.weight")
    assert f"{report.share:.1%} of {whole:,} parameters" in str(report)
    assert {row.parameter: row.action for row in report.rows}["0.w12.weight"] == "left out"


@pytest.mark.parametrize(
    "name", ["wqkv", "linear_qkv", "qkv_fused", "attn", "qkv_layer", "W_pack", "in_proj", "Wqkv", "qkv"]
)
def test_grouped_heads_stay_out_under_any_name(name: str) -> None:
    attention = nn.ModuleDict({"attention": GroupedHeads(name=name), "feed_forward": nn.Linear(64, 64)})
    out = {t.parameter for t in find_targets(attention).unclear}
    assert out == {f"attention.{name}.weight"}


def test_a_declaration_is_tested_by_an_example() -> None:
    model = GroupedHeads(heads=8, groups=1)  # one group: q, k and v lie one after the other
    model.wqkv.fused_rows = {"q": 64, "k": 8, "v": 8}
    find_targets(model, example=torch.randn(1, 3, 64))
    model.wqkv.fused_rows = {"q": 56, "k": 8, "v": 16}
    with pytest.raises(UserError, match="the rows called 'v' belong to"):
        find_targets(model, example=torch.randn(1, 3, 64))


def test_an_example_that_cannot_be_run_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="Linear cannot be run on it") as caught:
        find_targets(nn.Linear(3, 2), example=torch.ones(1, 4))
    assert "\n" not in str(caught.value)


def test_an_example_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    example, state = torch.randn(5, 4), torch.get_rng_state()
    find_targets(model, "no_head", example=example)
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_both_terms_of_a_sum_are_cut_as_the_sum_is() -> None:
    table = find_targets(GatedSum(), example=torch.randn(2, 32))
    assert [t.shape for t in table.included] == [(48, 32)] * 4 + [(32, 48)]


def test_plain_layers_stay_one_matrix() -> None:
    """Residual sums, rotations, norms, concatenations and depthwise convolutions cut nothing."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
            self.norm, self.in_proj, self.b = nn.BatchNorm2d(8), nn.Linear(8, 8), nn.Linear(16, 8)
            self.squeeze, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu_(self.norm(self.deep(self.stem(x)))).mean((2, 3))
            y = x + nn.functional.gelu(self.in_proj(x))
            z = self.b(torch.cat((x, y), dim=-1))
            return self.head(z * torch.sigmoid(self.squeeze(z)))

    model = Plain()
    assert [t.module for t in find_targets(model).unclear] == ["in_proj"], "by its name"
    example = torch.randn(2, 3, 6, 6)
    assert not find_targets(model, example=example).unclear
    seen = trace_rows(model, example)
    assert not seen.parts and not seen.unclear
    assert len(seen.whole) == sum(p.dim() > 1 for p in model.parameters())


class HeadFirst(nn.Module):
    """Stable-Baselines and many PPO nets: the head is declared before the features."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.a, self.b = nn.Linear(8, 4), nn.Linear(10, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.b(torch.relu(self.a(x)))))


class TwoHeads(nn.Module):
    """cleanrl's actor of SAC."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc_mean, self.fc_logstd = nn.Linear(10, 32), nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.fc1(x))
        return self.fc_mean(x), torch.tanh(self.fc_logstd(x))


class Headless(nn.Module):
    """A residual trunk: what it returns is read by layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x + self.b(torch.relu(x))


@pytest.mark.parametrize(
    "make, heads",
    [
        (HeadFirst, {"out"}),
        (TwoHeads, {"fc_mean", "fc_logstd"}),
        (Headless, set()),
    ],
)
def test_heads_follow_execution_or_are_refused(make: type[nn.Module], heads: set[str]) -> None:
    model = make()
    for rule in ("head", "no_head", "all,-head"):
        with pytest.raises(UserError, match="set is_head = True"):
            find_targets(model, rule)
    layers = {t.module for t in find_targets(model).included}
    example = torch.randn(3, 10)
    if heads:
        assert {t.module for t in find_targets(model, "head", example=example).included} == heads
        assert {t.module for t in find_targets(model, "no_head", example=example).included} == layers - heads
        for name in heads:
            model.get_submodule(name).is_head = True
        assert {t.module for t in find_targets(model, "head").included} == heads
    else:
        with pytest.raises(UserError, match="is_head"):
            find_targets(model, "head", example=example)


def test_a_plain_sequential_runs_in_its_order() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 3), nn.Tanh())
    )
    assert [t.name for t in find_targets(model, "head").included] == ["1.0.weight"]
    assert [t.name for t in find_targets(torch.compile(model), "head").included] == ["_orig_mod.1.0.weight"]
