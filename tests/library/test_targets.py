"""Targets: which matrices are found, as views of the parameter, with the published scale, and what rules pick."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fire_core import UserError, fire
from fire_core.targets import find_targets, list_targets, match_parameters
from tests.tiny_nets import untouched


def mixed() -> nn.Module:
    """One layer of each kind that holds something special."""
    embeddings = {"tokens": nn.Embedding(10, 4), "positions": nn.Embedding(3, 4)}
    maps = {"grouped": nn.Conv2d(8, 16, 3, groups=4), "depthwise": nn.Conv2d(8, 8, 3, groups=8)}
    maps |= {"up": nn.ConvTranspose1d(6, 4, 2), "norm": nn.BatchNorm2d(8)}
    linear = {"fused": declared(nn.Linear(4, 12), q=4, k=6, v=2), "head": nn.Linear(4, 10, bias=False)}
    model = nn.ModuleDict({**embeddings, "attention": nn.MultiheadAttention(4, 2), **maps, **linear})
    model.head.weight = model.tokens.weight
    return model


def declared(layer: nn.Module, **rows: int) -> nn.Module:
    layer.fused_rows = rows
    return layer


def names(model: nn.Module, rule: object = "all") -> list[str]:
    return [target.name for target in find_targets(model, rule).included]


KERNELS = [(nn.Conv1d, (3,)), (nn.Conv2d, (3, 2)), (nn.Conv3d, (2, 1, 3)), (nn.ConvTranspose1d, (2,))]


@pytest.mark.parametrize("layer, kernel", KERNELS)
def test_each_tap_of_a_convolution_is_a_view_with_the_published_scale(layer: type, kernel: tuple) -> None:
    model = nn.Sequential(layer(2, 8, kernel))
    chosen = find_targets(model).included
    assert len(chosen) == math.prod(kernel)
    last = chosen[-1]
    assert last.name == f"0.weight[{','.join(str(k - 1) for k in kernel)}]"
    assert last.shape == (8, 2) and last.scale == pytest.approx(math.sqrt(8 / 2) / math.prod(kernel))
    with torch.no_grad():
        last.matrix(model).fill_(7.0)
    weight = model[0].weight.flatten(2)
    assert (weight[:, :, -1] == 7).all() and not (weight[:, :, :-1] == 7).any()
    last.write(model, values := torch.arange(16.0).view(8, 2))
    assert torch.equal(last.matrix(model), values)


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_matrices_of_groups_are_the_maps_of_the_groups(layer: type) -> None:
    model = nn.Sequential(layer(4, 6, 1, groups=2, bias=False))
    first, second = (target.matrix(model) for target in find_targets(model).included)
    x = torch.randn(1, 4, 1, 1)
    expected = torch.cat([first @ x[0, :2, 0, 0], second @ x[0, 2:, 0, 0]])
    assert torch.allclose(model(x)[0, :, 0, 0], expected, atol=1e-6)


def test_fused_layers_are_split_as_declared_or_as_torch_has_them() -> None:
    model = mixed()
    k = {t.name: t for t in find_targets(model)}["fused.weight[k]"]
    assert (k.shape, k.scale) == ((6, 4), pytest.approx(math.sqrt(6 / 4)))
    assert torch.equal(k.matrix(model), model.fused.weight[4:10])
    table = {t.name: t for t in find_targets(model, "attention")}
    assert torch.equal(table["attention.in_proj_weight[v]"].matrix(model), model.attention.in_proj_weight[8:])
    fused = ("attention.in_proj_weight", "fused.weight")
    assert names(model, "qk") == [f"{name}[{part}]" for name in fused for part in "qk"]
    unequal = nn.ModuleList([nn.MultiheadAttention(4, 2, kdim=6, vdim=5)])
    assert [t.shape for t in find_targets(unequal, "attention").included] == [(4, 4), (4, 6), (4, 5), (4, 4)]
    for wrong in ({"q": 4, "k": 4}, [4, 4, 4], {"q": "4"}):
        model.fused.fused_rows = wrong
        with pytest.raises(UserError, match="fused"):
            find_targets(model)


def test_presets_patterns_exclusions_and_callables() -> None:
    model = mixed()
    everything = set(names(model))
    conv = {name for name in everything if name.startswith(("grouped", "up"))}
    assert set(names(model, "conv")) == conv
    assert set(names(model, "linear")) == everything - conv == set(names(model, "no_conv"))
    assert names(model, "head") == ["head.weight"]
    assert set(names(model, "no_head")) == set(names(model, "no_embedding")) == everything - {"head.weight"}
    assert set(names(model, ["conv", "-grouped"])) == {"up.weight[0]", "up.weight[1]"}
    assert set(names(model, "no_head,no_conv")) == everything - conv - {"head.weight"}
    assert names(model, ["no_head", "up"]) == ["up.weight[0]", "up.weight[1]"]
    assert set(names(model, "up, head")) == {"up.weight[0]", "up.weight[1]", "head.weight"}
    assert names(model, "fused.weight.q") == ["fused.weight[q]"]
    assert names(model, "tokens.weight") == names(model, "head.weight") == ["head.weight"]
    assert names(model, lambda target: target.shape == (6, 4)) == ["fused.weight[k]"]


def test_weights_of_other_kinds_stay_out() -> None:
    integers = torch.zeros(4, 4, dtype=torch.int8)
    model, kinds = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(8, 8, 3, groups=8)), ["", "depthwise"]
    model[0].lora_A = nn.Linear(4, 2, bias=False)
    model[0].lora = nn.ModuleDict({"A": nn.Linear(4, 2, bias=False)})
    for weight, reason in (
        (integers, "torch.int8"),
        (torch.randn(4, 6).to_sparse(), "sparse"),
        (torch.randn(9).as_strided((4, 6), (1, 1)), "share one place"),
        (Quantised(integers), "stored as Quantised"),
    ):
        model.append(nn.Linear(4, 4)).requires_grad_(False)
        model[-1].weight = nn.Parameter(weight, requires_grad=False)
        kinds.append(reason)
    table = {t.name: t for t in find_targets(model)}
    assert [t.name for t in table.values() if t.included] == ["0.weight"]
    assert table["0.lora_A.weight"].kind == table["0.lora.A.weight"].kind == "lora"
    assert all(reason in table[f"{number}.weight"].reason for number, reason in enumerate(kinds))
    with pytest.raises(UserError, match="run one batch"):
        find_targets(nn.Sequential(nn.LazyLinear(3)))


def test_match_parameters_gives_whole_layers() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(3, 4), nn.Linear(4, 2))
    layers = {"linear": "23", "3.weight": "3", "1": "1", "conv,head": "03", "linear,-head": "2"}
    for rule, found in layers.items():
        assert match_parameters(model, rule) == [f"{i}.{kind}" for i in found for kind in ("weight", "bias")]
    model.c_attn, model.depth = nn.Linear(4, 12, bias=False), nn.Conv2d(4, 4, 3, groups=4, bias=False)
    assert "c_attn.weight" in match_parameters(model, "linear") and "c_attn.weight" not in names(model)
    assert "depth.weight" in match_parameters(model, "conv")
    [layer.requires_grad_(False) for layer in (model[0], model.c_attn, model.depth)]
    assert match_parameters(model, "all") == [f"{i}.{kind}" for i in "23" for kind in ("weight", "bias")]


def test_reparametrised_layers_stay_out_and_keep_their_state() -> None:
    old = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2))
    new = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(3, 3, 1)), nn.Linear(3, 2))
    with untouched(new[0]):  # its buffers, too
        fire(new)
    assert names(old) == names(new) == ["1.weight"]
    weights = [t for t in find_targets(old) if t.module == "0" and t.kind != "bias"]
    assert all("reparametrised" in t.reason for t in weights)


def test_a_model_that_says_it_has_no_head_has_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity())
    model.get_classifier = lambda: model[2]
    assert names(model, "no_head") == ["0.weight", "1.weight"]
    model[2] = nn.Linear(4, 2)
    assert names(model, "head") == ["2.weight"]
    model.get_classifier = lambda: (model[1], model[2])
    assert names(model, "head") == ["1.weight", "2.weight"] and names(model, "no_head") == ["0.weight"]
    model[2] = nn.Conv2d(4, 2, 1)
    model.get_classifier = lambda: model[2]
    assert names(model, "no_head") == ["0.weight", "1.weight"]


class Quantised(torch.Tensor):
    """A weight of torchao: it says that it is float32, and its values are not (pytorch/ao 214)."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "Quantised":
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0])
        raise NotImplementedError(function)


class NormalisedLinear(nn.Linear):
    """A linear layer whose class speaks of norms."""


class Own(nn.Module):
    """A class that nobody knows, with and without declarations."""

    def __init__(self, **declared: object) -> None:
        super().__init__()
        self.weight, self.table = (nn.Parameter(torch.randn(4, 3)) for _ in range(2))
        self.stack, self.shift = (nn.Parameter(torch.randn(2, *sides)) for sides in ((4, 3), (1, 4)))
        self.__dict__.update(declared)


IN = [  # model, rule, and what is in
    (nn.Sequential(NormalisedLinear(3, 2)), "all", "0.weight"),
    (nn.Sequential(nn.Linear(0, 3), nn.Linear(3, 2)), "all", "1.weight"),
    (nn.Sequential(Own(), nn.Linear(2, 2)), "all", "1.weight"),
    (Own(fused_rows={"a": 1, "b": 3}, stacked_matrices=True), "all", "weight[a] weight[b] stack[0] stack[1]"),
    (Own(stacked_matrices="in_out"), lambda target: target.shape == (3, 4), "stack[0] stack[1]"),
    (nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)), "all", "1.weight"),
    (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).requires_grad_(False), "all", "0.weight 1.weight"),
    (torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))), "1.weight", "_orig_mod.1.weight"),
    (nn.ModuleDict({"module": nn.Sequential(nn.Linear(3, 3))}), "0.weight", "module.0.weight"),
    (nn.ModuleDict({"qkv": nn.Conv1d(2, 6, 1), "o": nn.Conv1d(2, 2, 1)}), "all", "o.weight[0]"),
    (nn.Sequential(nn.ModuleList([nn.Linear(5, 8), nn.Linear(2, 8)]), nn.Linear(2, 2)), "all", "1.weight"),
    (nn.Sequential(nn.Linear(2, 14), nn.Linear(2, 2)), "all", "1.weight"),
    (nn.ModuleDict(dict(o=nn.Linear(2, 2), adaLN=nn.Sequential(nn.Linear(2, 12)))), "all", "o.weight"),
    (declared(nn.Conv1d(3, 4, 1), q=1, k=1, v=2), "qk", "weight[q,0] weight[k,0]"),
    (declared(nn.Conv1d(3, 4, 2), q=1, k=1, v=2), "weight.q", "weight[q,0] weight[q,1]"),
]


@pytest.mark.parametrize("model, rule, expected", IN)
def test_what_is_in(model: nn.Module, rule: str, expected: str) -> None:
    assert names(model, rule) == expected.split()


ELSEWHERE = nn.Linear(3, 2)
ELSEWHERE.weight.ds_shape = (5, 3)  # ZeRO stage 3 keeps its values on another rank
NOTHING = [  # model, rule, and what the error says
    (mixed(), "heat", "nearest: head"),
    (mixed(), "depthwise", "which is out: depthwise"),
    (nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)), "0.weight", "frozen"),
    (mixed(), "all,-nosuch.*", "'nosuch.*'"),
    (mixed(), lambda target: False, "no matrix"),
    (mixed(), ["head", 0], r"targets=\['head', 0\] is not a rule"),
    (ELSEWHERE, "all", "ZeRO stage 3"),
]


@pytest.mark.parametrize("model, rule, message", NOTHING)
def test_nothing_to_treat_is_an_error_that_names_what_exists(model, rule, message) -> None:
    with pytest.raises(UserError, match=message):
        find_targets(model, rule)


def test_attention_is_a_q_and_a_k_side_by_side() -> None:
    heads = nn.ModuleDict({name: nn.Linear(4, 2) for name in ("body", "value", "q")})
    assert [t.role for t in list_targets(heads).included] == ["", "", ""]
    block = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q_proj", "k_proj", "v_proj", "fc")})
    roles = {t.module: t.role for t in list_targets(nn.ModuleDict({"mixer": block})).included}
    assert roles == {"mixer.q_proj": "q", "mixer.k_proj": "k", "mixer.v_proj": "v", "mixer.fc": "attention"}


def test_targets_and_printed_names_can_be_passed_back() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Linear(4, 2))
    every = find_targets(model).included
    assert find_targets(model, every).included == every
    for chosen in ([every[5]], [every[12], every[-1]], every[9:11]):
        names_of = [t.name for t in chosen]
        for rule in (chosen, names_of, ",".join(names_of)):
            assert find_targets(model, rule).included == chosen
    assert len(find_targets(model, "all,-0.weight[1,2]").included) == len(every) - 1
