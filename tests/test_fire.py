"""fire(): the published formula, the exact projection, and what happens to awkward weights."""

import math

import pytest
import torch
from torch import nn

from fire_core import UserError, find_targets, fire
from fire_core.metrics import deviation_from_isometry
from vision.models import build

SHAPES = {"channels": 3, "image_size": 32, "classes": 10}


def published(w: torch.Tensor, iterations: int) -> torch.Tensor:
    """The paper's Algorithm 1, written down plainly: one 2-D matrix, python loop."""
    x = w / w.norm()
    wide = x.shape[1] > x.shape[0]
    x = x.T if wide else x
    for _ in range(iterations):
        x = 1.5 * x - 0.5 * x @ (x.T @ x)
    return (x.T if wide else x) * math.sqrt(w.shape[0] / w.shape[1])


def published_model(net: nn.Module, iterations: int) -> dict[str, torch.Tensor]:
    """Every Linear and Conv2d weight after the published algorithm, tap by tap."""
    result = {}
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):
            result[f"{name}.weight"] = published(module.weight.detach(), iterations)
        elif isinstance(module, nn.Conv2d):
            w = module.weight.detach().clone()
            taps = w.shape[2] * w.shape[3]
            for i in range(w.shape[2]):
                for j in range(w.shape[3]):
                    w[:, :, i, j] = published(w[:, :, i, j], iterations) / taps
            result[f"{name}.weight"] = w
    return result


@pytest.mark.parametrize(
    ("name", "settings"),
    [("resnet18", {}), ("vit_tiny", {}), ("vgg16", {"width": 32})],
)
def test_equals_the_published_formula(name, settings):
    torch.manual_seed(0)
    net = build(name, **(SHAPES | ({"image_size": 64} if name == "vgg16" else {})), **settings)
    untouched = {n: p.detach().clone() for n, p in net.named_parameters()}
    expected = published_model(net, 10)
    report = fire(net, iterations=10)
    for key, parameter in net.named_parameters():
        want = expected.get(key, untouched[key])
        assert (parameter - want).norm() <= 1e-5 * want.norm().clamp_min(1e-12), key
    assert report.changed == set(expected)


def test_exact_projection_on_fresh_models():
    torch.manual_seed(0)
    net = build("resnet18", **SHAPES, width=16)
    weights = {n: p.detach().double() for n, p in net.named_parameters()}
    report = fire(net, solver="exact")
    assert max(row.dfi_factor for row in report.treated()) <= 1e-8
    row = next(r for r in report.treated() if r.name.endswith("[1,1]"))
    u, _, vh = torch.linalg.svd(weights[row.parameter][:, :, 1, 1], full_matrices=False)
    want = u @ vh * math.sqrt(row.shape[0] / row.shape[1]) / 9
    got = dict(net.named_parameters())[row.parameter][:, :, 1, 1].double()
    assert (got - want).norm() <= 1e-3 * want.norm()


def test_report_figures_by_hand():
    net = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.diag(torch.tensor([3.0, 4.0])))
    report = fire(net, solver="exact", initial={"weight": torch.zeros(2, 2)})
    (row,) = report.treated()
    assert torch.allclose(net.weight, torch.eye(2), atol=1e-6)
    assert row.dfi_before == pytest.approx((9 - 1) ** 2 + (16 - 1) ** 2)
    assert row.sfe == pytest.approx(2**2 + 3**2, rel=1e-5)
    assert row.sfe_relative == pytest.approx(13 / 25, rel=1e-5)
    assert (row.norm_before, row.norm_after) == (pytest.approx(5.0), pytest.approx(math.sqrt(2)))
    assert "weight" in str(report) and report.summary()["targets"] == 1


def test_five_iterations_leave_a_gpt_sized_matrix_far_from_orthogonal():
    torch.manual_seed(0)
    net = nn.Linear(768, 768, bias=False)
    direction = net.weight.detach().clone()
    row = fire(net, iterations=5).treated()[0]
    assert row.dfi_factor > 600
    assert torch.cosine_similarity(direction.flatten(), net.weight.detach().flatten(), dim=0) > 0.999


def test_strength_interpolates():
    torch.manual_seed(0)
    a = nn.Linear(6, 4)
    start = a.weight.detach().clone()
    full = nn.Linear(6, 4)
    full.load_state_dict(a.state_dict())
    fire(full)
    fire(a, strength=0.25)
    assert torch.allclose(a.weight, start + 0.25 * (full.weight - start), atol=1e-6)
    with pytest.raises(UserError, match=r"strength=1\.5"):
        fire(a, strength=1.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_named_and_nothing_changes(bad):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        net[1].weight[0, 0] = bad
    first = net[0].weight.detach().clone()
    with pytest.raises(UserError, match=r"1\.weight"):
        fire(net)
    assert torch.equal(net[0].weight, first)


def test_zero_matrix_raises_or_is_skipped_with_the_reason():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.init.zeros_(net[1].weight)
    first = net[0].weight.detach().clone()
    with pytest.raises(UserError, match=r"1\.weight.*degenerate='skip'"):
        fire(net)
    assert torch.equal(net[0].weight, first)
    report = fire(net, degenerate="skip")
    skipped = next(r for r in report.rows if r.name == "1.weight")
    assert (skipped.action, skipped.reason) == ("skipped", "all-zero matrix")
    assert net[1].weight.abs().sum() == 0 and report.changed == {"0.weight"}


@pytest.mark.parametrize("solver", ["newton_schulz", "exact", "fast"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scale_of_the_input_does_not_matter(solver, scale):
    torch.manual_seed(0)
    plain = nn.Linear(8, 5, bias=False)
    scaled = nn.Linear(8, 5, bias=False)
    with torch.no_grad():
        scaled.weight.copy_(plain.weight * scale)
    fire(plain, solver=solver)
    fire(scaled, solver=solver)
    assert torch.allclose(plain.weight, scaled.weight, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1), (3, 9)])
def test_thin_shapes(shape):
    torch.manual_seed(0)
    net = nn.Linear(shape[1], shape[0], bias=False)
    row = fire(net, solver="exact").treated()[0]
    assert row.dfi_factor < 1e-8


def test_rank_one_is_completed_and_said_so():
    net = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.outer(torch.arange(1.0, 5.0), torch.ones(4)))
    row = fire(net, solver="exact").treated()[0]
    assert row.completed and row.dfi_factor < 1e-8


def test_half_precision_and_strided_weights():
    torch.manual_seed(0)
    reference = nn.Linear(16, 8, bias=False)
    half = nn.Linear(16, 8, bias=False).bfloat16()
    half.load_state_dict(reference.state_dict())
    strided = nn.Linear(16, 8, bias=False)
    strided.weight = nn.Parameter(reference.weight.detach().T.contiguous().T)
    assert not strided.weight.is_contiguous()
    for net in (reference, half, strided):
        fire(net, solver="exact")
    assert half.weight.dtype == torch.bfloat16
    assert torch.allclose(half.weight.float(), reference.weight, atol=5e-2)
    assert torch.allclose(strided.weight, reference.weight, atol=1e-5)


def test_parameters_keep_identity_and_memory():
    net = build("cnn", channels=1, image_size=28, classes=10)
    optimizer = torch.optim.Adam(net.parameters())
    before = {name: (id(p), p.data_ptr()) for name, p in net.named_parameters()}
    fire(net)
    assert before == {name: (id(p), p.data_ptr()) for name, p in net.named_parameters()}
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {v[0] for v in before.values()}


def test_tied_weights_are_projected_once_with_the_official_scale():
    embedding, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    head.weight = embedding.weight
    net = nn.ModuleDict({"embedding": embedding, "head": head})
    report = fire(net, solver="exact")
    assert len(report.treated()) == 1
    assert torch.linalg.svdvals(embedding.weight).tolist() == pytest.approx([math.sqrt(50 / 8)] * 8, rel=1e-4)
    assert embedding.weight is head.weight


def test_unknown_words_are_named():
    net = nn.Linear(3, 3)
    with pytest.raises(UserError, match="newton"):
        fire(net, solver="newton")
    with pytest.raises(UserError, match="frobenus"):
        fire(net, normalize="frobenus")
    with pytest.raises(UserError, match="sometimes"):
        fire(net, degenerate="sometimes")
    with pytest.raises(UserError, match="muon"):
        fire(net, scale="muon")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("scale", "offical"),
        ("normalize", "spektral"),
        ("iterations", 0),
        ("iterations", 2.5),
        ("iterations", "10"),
        ("precision", "bf8"),
        ("tolerance", -1),
        ("strength", "half"),
        ("initial", [1]),
    ],
)
def test_bad_settings_are_one_line_that_names_them(setting, value):
    with pytest.raises(UserError, match=setting) as caught:
        fire(nn.Linear(3, 3), **{setting: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [torch.eye(3), nn.Linear(3, 3).state_dict(), None])
def test_what_is_no_module_is_named(model):
    with pytest.raises(UserError, match=f"model is a {type(model).__name__}"):
        fire(model)


def test_weights_that_cannot_be_changed_are_named():
    with torch.device("meta"), pytest.raises(UserError, match="'weight' is on the meta device"):
        fire(nn.Linear(3, 3))
    with torch.inference_mode():
        frozen = nn.Linear(3, 3)
    with pytest.raises(UserError, match=r"'weight' was made under torch\.inference_mode"):
        fire(frozen)
    with torch.inference_mode():
        assert fire(frozen).changed == {"weight"}


def test_a_table_of_another_model_is_refused():
    table = find_targets(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    with pytest.raises(UserError, match=r"'0\.weight' is of another model"):
        fire(nn.Linear(3, 3), targets=table)
    with pytest.raises(UserError, match=r"'1\.weight' is \(3, 3\) in the table and \(2, 3\) in the model"):
        fire(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), targets=table)


def test_the_report_is_of_the_weight_as_stored():
    torch.manual_seed(0)
    net = nn.Linear(32, 32, bias=False).bfloat16()
    before = net.weight.detach().float()
    row = fire(net, solver="exact").treated()[0]
    after = net.weight.detach().float()
    assert (
        row.dfi_after == pytest.approx(deviation_from_isometry(after).item(), rel=1e-4)
        and row.dfi_after > 1e-5
    )
    assert row.norm_after == pytest.approx(after.norm().item(), rel=1e-6)
    assert row.sfe == pytest.approx((after - before).square().sum().item(), rel=1e-5)
    assert row.residual == pytest.approx(row.dfi_factor, rel=1e-3, abs=1e-9) and row.residual < 1e-8


def test_the_report_is_the_same_under_autocast():
    torch.manual_seed(0)
    plain, inside = nn.Linear(48, 48), nn.Linear(48, 48)
    inside.load_state_dict(plain.state_dict())
    expected = fire(plain, solver="exact").treated()
    with torch.autocast("cpu", torch.bfloat16):
        assert fire(inside, solver="exact").treated() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_may_be_spread_over_devices():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    expected = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    expected.load_state_dict(net.state_dict())
    net[1].cuda()
    fire(net, solver="exact")
    fire(expected, solver="exact")
    assert net[0].weight.device.type == "cpu" and net[1].weight.device.type == "cuda"
    assert all(torch.allclose(a.cpu(), b, atol=1e-5) for a, b in zip(net.parameters(), expected.parameters()))
