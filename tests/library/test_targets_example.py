"""Fused rows and heads of public bug reports: known, declared, shown by an example, or left out; never by a name."""

import math

import pytest
import torch
from torch import Tensor, nn

from fire_core import UserError, find_targets, fire
from fire_core.measure.dormancy import dormancy
from fire_core.passes import call
from fire_core.targets.rows import trace_rows
from tests.polar_cases import oracle
from tests.tiny_nets import Net, replica, untouched


def legacy_attention(net: Net, x: Tensor) -> Tensor:
    """guided-diffusion and LDM: heads are split before q, k and v, as the released weights have it."""
    batch, channels, time = x.shape
    q, k, v = net.qkv(x).reshape(4 * batch, 3 * channels // 4, time).split(channels // 4, dim=1)
    scores = torch.softmax(torch.einsum("bct,bcs->bts", q, k) / math.sqrt(channels // 4), dim=-1)
    return x + net.proj_out(torch.einsum("bts,bcs->bct", scores, v).reshape(batch, channels, time))


def loop_over_heads(net: Net, x: Tensor) -> Tensor:
    """The rows of each head are q, k and v, and each head has products of its own."""
    mixed = []
    for head in net.qkv(x).chunk(4, dim=-1):
        q, k, v = head.chunk(3, dim=-1)
        mixed.append(torch.softmax(q @ k.mT, dim=-1) @ v)
    return net.out(torch.cat(mixed, dim=-1))


def grouped_heads(heads: int = 8, groups: int = 2, name: str = "wqkv") -> Net:
    """InternLM2's order: for each group the q of its heads, then its k, then its v; with a rotation of q and k."""

    def rotated(x: Tensor) -> Tensor:
        angle = torch.linspace(0, 1, x.shape[-1])
        first, second = x.chunk(2, dim=-1)
        return x * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()

    def forward(net: Net, x: Tensor) -> Tensor:
        fused = getattr(net, name)(x).unflatten(-1, (groups, -1, 64 // heads))
        q, k, v = fused[..., :-2, :].flatten(-3, -2), fused[..., -2, :], fused[..., -1, :]
        q, k, v = rotated(q).transpose(1, 2), rotated(k).transpose(1, 2), v.transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return net.wo(mixed.transpose(1, 2).flatten(2))

    fused = nn.Linear(64, (heads + 2 * groups) * 64 // heads, bias=False)
    return Net(forward, **{name: fused}, wo=nn.Linear(64, 64, bias=False))


def gated_query(net: Net, x: Tensor) -> Tensor:
    """Qwen3.5's order: q_proj holds the query and then the gate of each head."""
    q, gate = net.q_proj(x).unflatten(-1, (4, -1)).chunk(2, dim=-1)
    k, v = (layer(x).unflatten(-1, (4, -1)) for layer in (net.k_proj, net.v_proj))
    mixed = nn.functional.scaled_dot_product_attention(*(p.transpose(1, 2) for p in (q, k, v)))
    return net.o_proj(mixed.transpose(1, 2).flatten(2) * torch.sigmoid(gate.flatten(2)))


def short_convolution(net: Net, x: Tensor) -> Tensor:
    """LFM2: in_proj holds B, C and x, and x passes a depthwise convolution between the products."""
    b, c, values = net.in_proj(x).transpose(-1, -2).chunk(3, dim=-2)
    return net.out_proj((c * net.conv(b * values)[..., : x.shape[1]]).transpose(-1, -2))


def conformer(net: Net, x: Tensor) -> Tensor:
    x = nn.functional.glu(net.pointwise_conv1(x), dim=1)
    return net.pointwise_conv2(nn.functional.silu(net.norm(net.depthwise_conv(x))))


def swiglu_net() -> Net:
    """DINOv2."""

    def forward(net: Net, x: Tensor) -> Tensor:
        gate, up = net.w12(x).chunk(2, dim=-1)
        return net.w3(nn.functional.silu(gate) * up)

    return Net(forward, w12=nn.Linear(32, 96), w3=nn.Linear(48, 32))


def geglu(net: Net, x: Tensor) -> Tensor:
    """diffusers: the layer stands in a module of its own, its reader elsewhere."""
    up, gate = net.proj(x).chunk(2, dim=-1)
    return up * nn.functional.gelu(gate)


def modulated(net: Net, x: Tensor) -> Tensor:
    """A gain and a shift of what no layer has made."""
    gain, shift = net.film(x).chunk(2, dim=-1)
    return net.head(gain * x + shift)


def guarded(net: Net, x: Tensor) -> Tensor:
    fused = net.qkv(x)
    q, k, v = torch.where(fused.isfinite(), fused, torch.zeros_like(fused)).chunk(3, dim=-1)
    return net.out(torch.softmax(q @ k.mT, dim=-1) @ v)


def mixture(net: Net, x: Tensor) -> Tensor:
    share, new = net.fused(x).chunk(2, dim=-1)
    return net.head(torch.lerp(net.old(x), new, share))


def by_head(width: int, parts: int, heads: int = 4) -> list[list[int]]:
    """Rows of each part where each head has `width` rows of every part."""
    return torch.arange(heads * parts * width).view(heads, parts, width).transpose(0, 1).flatten(1).tolist()


FUSED = {  # net, its example, the fused weight, and the rows of its matrices
    "legacy": (lambda: Net(legacy_attention, qkv=nn.Conv1d(32, 96, 1), proj_out=nn.Conv1d(32, 32, 1)),
               (2, 32, 5), "qkv.weight", by_head(8, 3)),
    "loop": (lambda: Net(loop_over_heads, qkv=nn.Linear(32, 96), out=nn.Linear(32, 32)),
             (2, 5, 32), "qkv.weight", by_head(8, 3)),
    "grouped": (grouped_heads, (2, 5, 64), "wqkv.weight",
                [part.flatten().tolist() for part in torch.arange(96).view(2, 48).split([32, 8, 8], dim=1)]),
    "gated query": (lambda: Net(gated_query, q_proj=nn.Linear(32, 64), k_proj=nn.Linear(32, 32),
                                v_proj=nn.Linear(32, 32), o_proj=nn.Linear(32, 32)),
                    (2, 5, 32), "q_proj.weight", by_head(8, 2)),
    "film": (lambda: Net(modulated, film=nn.Linear(8, 16), head=nn.Linear(8, 3)),
             (3, 8), "film.weight", by_head(8, 2, heads=1)),
    "guarded": (lambda: Net(guarded, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)),
                (2, 5, 8), "qkv.weight", by_head(8, 3, heads=1)),
    "lerp": (lambda: Net(mixture, fused=nn.Linear(8, 16), old=nn.Linear(8, 8), head=nn.Linear(8, 3)),
             (3, 8), "fused.weight", by_head(8, 2, heads=1)),
    "w12": (swiglu_net, (3, 32), "w12.weight", by_head(48, 2, heads=1)),
    "geglu": (lambda: nn.Sequential(Net(geglu, proj=nn.Linear(32, 96)), nn.Dropout(0.0), nn.Linear(48, 32)),
              (3, 32), "0.proj.weight", by_head(48, 2, heads=1)),
    "short convolution": (lambda: Net(short_convolution, in_proj=nn.Linear(16, 48), out_proj=nn.Linear(16, 16),
                                      conv=nn.Conv1d(16, 16, 3, groups=16, padding=2)),
                          (2, 7, 16), "in_proj.weight", by_head(16, 3, heads=1)),
    "conformer": (lambda: Net(conformer, pointwise_conv1=nn.Conv1d(16, 32, 1),
                              depthwise_conv=nn.Conv1d(16, 16, 3, padding=1, groups=16), norm=nn.BatchNorm1d(16),
                              pointwise_conv2=nn.Conv1d(16, 16, 1)),
                  (2, 16, 9), "pointwise_conv1.weight", by_head(16, 2, heads=1)),
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

    weight = model.get_parameter(name)
    start = weight.detach().clone().flatten(1)
    found = [t for t in find_targets(model, example=torch.randn(shape)).included if t.parameter == name]
    numbers = torch.arange(float(len(start))).view(-1, *[1] * (weight.dim() - 1)).expand_as(weight)
    assert sorted(t.matrix({name: numbers})[:, 0].int().tolist() for t in found) == sorted(expected)
    report = fire(model, solver="exact", scale="none", example=torch.randn(shape))
    for part in expected:
        assert torch.allclose(weight.detach().flatten(1)[part], oracle(start[part]).float(), atol=1e-4)
    assert name in report.changed and "left out" not in str(report)


def test_the_report_says_what_is_left_out_and_which_share_was_treated() -> None:
    model = nn.Sequential(swiglu_net(), nn.Linear(32, 4))
    report, whole = fire(model), sum(p.numel() for p in model.parameters())
    assert report.share == (32 * 48 + 32 * 4) / whole
    assert str(report).endswith("1 of 3 weights left out: 0.w12.weight")
    assert f"{report.share:.1%} of {whole:,} parameters" in str(report)
    assert {row.parameter: row.action for row in report.rows}["0.w12.weight"] == "left out"


@pytest.mark.parametrize("name", "wqkv linear_qkv qkv_fused attn qkv_layer W_pack in_proj Wqkv qkv".split())  # noqa: SIM905
def test_grouped_heads_stay_out_under_any_name(name: str) -> None:
    attention = nn.ModuleDict({"attention": grouped_heads(name=name), "feed_forward": nn.Linear(64, 64)})
    assert {t.parameter for t in find_targets(attention).unclear} == {f"attention.{name}.weight"}


def test_a_declaration_is_tested_by_an_example() -> None:
    model = grouped_heads(heads=8, groups=1)  # one group: q, k and v lie one after the other
    model.wqkv.fused_rows = {"q": 64, "k": 8, "v": 8}
    find_targets(model, example=torch.randn(1, 3, 64))
    model.wqkv.fused_rows = {"q": 56, "k": 8, "v": 16}
    with pytest.raises(UserError, match="the rows called 'v' belong to"):
        find_targets(model, example=torch.randn(1, 3, 64))


def test_an_example_leaves_the_model_as_it_was_and_one_that_cannot_be_run_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="Linear cannot be run on it") as caught:
        find_targets(nn.Linear(3, 2), example=torch.ones(1, 4))
    assert "\n" not in str(caught.value)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)).train()
    example, state = torch.randn(5, 4), torch.get_rng_state()
    with untouched(model):
        find_targets(model, "no_head", example=example)
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_both_terms_of_a_sum_are_cut_as_the_sum_is() -> None:
    def gated_sum(net: Net, x: Tensor) -> Tensor:
        gate, up = (net.plain(x) + net.later(x)).chunk(2, dim=-1)
        return net.out(torch.sigmoid(gate) * up)

    net = Net(gated_sum, plain=nn.Linear(32, 96), later=nn.Linear(32, 96), out=nn.Linear(48, 32))
    table = find_targets(net, example=torch.randn(2, 32))
    assert [t.shape for t in table.included] == [(48, 32)] * 4 + [(32, 48)]


LOST = {"cumsum": lambda z: z.cumsum(-1)[:, :8], "prod": lambda z: z.view(-1, 4, 8).prod(1)}


def test_a_weight_stays_out_that_the_example_does_not_reach_or_follow() -> None:
    net = Net(lambda net, x: net.out(x), qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))
    table = find_targets(net, example=torch.randn(2, 8))
    assert [t.module for t in table.included] == ["out"]
    assert table.unclear[0].reason.endswith("the example does not show how its rows are used")
    for name, change in LOST.items():
        cell = Net(lambda net, x, f=change: net.out(f(net.fc(x))), fc=nn.Linear(8, 32), out=nn.Linear(8, 8))
        (out,) = find_targets(cell, example=torch.randn(2, 8)).unclear
        assert "32 outputs are 4 times" in out.reason and out.reason.endswith(f"be followed through {name}")
    gru = Net(None, gru_linear=nn.Linear(20, 24), norm=nn.LayerNorm(24), out=nn.Linear(8, 2))
    assert [t.module for t in find_targets(gru).included] == ["out"]
    gru.ready = nn.GRU(24, 8)  # reads what the layer and its norm make
    assert "gru_linear" in {t.module for t in find_targets(gru).included}
    encoder = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    assert not trace_rows(encoder, torch.randn(2, 5, 8)).unclear


def test_plain_layers_stay_one_matrix() -> None:
    def plain(net: Net, x: Tensor) -> Tensor:
        x = torch.relu_(net.norm(net.deep(net.stem(x)))).mean((2, 3))
        y = x + nn.functional.gelu(net.in_proj(x))
        z = net.b(torch.cat((x, y), dim=-1))
        return net.head(z * torch.sigmoid(net.squeeze(z)))

    images = {"stem": nn.Conv2d(3, 8, 3, padding=1), "deep": nn.Conv2d(8, 8, 3, padding=1, groups=8)}
    dense = {"in_proj": nn.Linear(8, 8), "b": nn.Linear(16, 8), "squeeze": nn.Linear(8, 8)}
    model = Net(plain, **images, norm=nn.BatchNorm2d(8), **dense, head=nn.Linear(8, 3))
    assert [t.module for t in find_targets(model).unclear] == ["in_proj"], "by its name"
    example = torch.randn(2, 3, 6, 6)
    assert not find_targets(model, example=example).unclear
    seen = trace_rows(model, example)
    assert not seen.parts and not seen.unclear
    assert len(seen.whole) == sum(p.dim() > 1 for p in model.parameters())


HEADS = {  # what runs, the layers in the order of their declaration, and the heads
    "declared first": (lambda net, x: net.out(torch.relu(net.b(torch.relu(net.a(x))))), "out a b", "out"),  # SB3
    "policy": (lambda net, x: (torch.distributions.Bernoulli(None, net.b(net.a(x))), net.c(x)), "a b c", "b c"),
    "two": (lambda net, x: (net.mean(x := net.a(x).relu()), net.std(x).tanh()), "a mean std", "mean std"),
    "residual": (lambda net, x: (x := net.a(x)) + net.b(torch.relu(x)), "a b", ""),  # read by layers of its own
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
def test_heads_follow_execution_or_are_refused(kind: str) -> None:
    function, names, heads = HEADS[kind]
    model, example = Net(function, **{name: nn.Linear(10, 10) for name in names.split()}), torch.randn(3, 10)

    def layers(rule: str, **given: Tensor) -> set[str]:
        return {target.module for target in find_targets(model, rule, **given).included}

    for rule in ("head", "no_head", "all,-head"):
        with pytest.raises(UserError, match="set is_head = True"):
            layers(rule)
    if not heads:
        with pytest.raises(UserError, match="is_head"):
            layers("head", example=example)
        return
    assert layers("head", example=example) == set(heads.split())
    assert layers("no_head", example=example) == set(names.split()) - set(heads.split())
    for name in heads.split():
        model.get_submodule(name).is_head = True
    assert layers("head") == set(heads.split())


def test_a_plain_sequential_runs_in_its_order() -> None:
    first, last = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 3), nn.Tanh())
    model = nn.Sequential(first, last)
    for net, prefix in ((model, ""), (torch.compile(model), "_orig_mod."), (replica(model), "module.")):
        assert [t.name for t in find_targets(net, "head").included] == [f"{prefix}1.0.weight"]


def test_compiled_graphs_stay_in_use_and_batches_come_from_any_device() -> None:
    model, runs, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), [], torch.randn(3, 4)
    net = torch.compile(model, backend=lambda graph, _: lambda *given: runs.append(1) or graph(*given))
    for look in (lambda: find_targets(net, example=x), lambda: dormancy(net, [x])):
        net(x), look(), net(x)
    assert len(runs) == 4 and call(model.to("meta"), x).is_meta
