"""fire(): the published formula, the exact projection, and what happens to awkward weights."""

import math
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import nn

import fire_core
from fire_core import FireSettings, UserError, find_targets, fire, project_, reset_optimizer_state
from fire_core.engine import treat_tensors
from fire_core.measure.metrics import deviation_from_isometry
from fire_core.report import Treated
from fire_core.solvers.polar import polar
from language.model import Decoder, Shape
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


@pytest.mark.slow
def test_equals_the_published_formula_on_gpt_of_the_paper():
    """q, k and v of the fused weight are matrices of their own; the tied embedding is the output layer."""
    torch.manual_seed(0)
    net = Decoder(Shape())
    expected = {}
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            parts = module.weight.detach().split(768) if name.endswith("c_attn") else [module.weight.detach()]
            expected[f"{name}.weight"] = torch.cat([published(part, 5) for part in parts])
    expected["wte.weight"] = published(net.wte.weight.detach(), 5)
    report = fire(net, iterations=5)
    weights = dict(net.named_parameters())
    for key, want in expected.items():
        assert (weights[key] - want).norm() <= 1e-5 * want.norm(), key
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


@pytest.mark.parametrize("solver", ["newton_schulz", "exact"])
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
    with pytest.raises(UserError, match=r"has no parameter '0\.weight'"):
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


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def weights_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def test_the_engine_takes_any_mapping_of_tensors():
    net = two_layers()
    tensors = weights_of(net)
    table = find_targets(net)
    report = treat_tensors(
        tensors, table, lambda stack, group: Treated(stack / 2), action="halved", method="half"
    )
    assert torch.equal(tensors["1.weight"], net[1].weight / 2) and torch.equal(tensors["1.bias"], net[1].bias)
    assert report.changed == {"0.weight", "1.weight"}
    assert [id(p) for p in report.parameters] == [id(tensors["0.weight"]), id(tensors["1.weight"])]


@pytest.mark.parametrize("wrong", ["nan", "shape", "error"])
def test_a_failure_in_the_second_stack_leaves_the_model_alone(wrong):
    net = two_layers()
    before = weights_of(net)

    def treat(stack, group):
        if group[0].name == "0.weight":
            return Treated(stack / 2)
        if wrong == "error":
            raise torch.OutOfMemoryError("no memory left")
        return Treated(stack * float("nan") if wrong == "nan" else stack[:, :1])

    parameters = dict(net.named_parameters())
    message = {"nan": r"NaN.*1\.weight", "shape": r"made \(1, 1, 6\) of a stack", "error": "no memory"}[wrong]
    with pytest.raises((UserError, torch.OutOfMemoryError), match=message):
        treat_tensors(parameters, find_targets(net), treat, action="halved")
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_figures_read_late_are_those_of_the_treatment():
    read_at_once, read_late = two_layers(), two_layers()
    rows = fire(read_at_once).rows
    report = fire(read_late)
    with torch.no_grad():
        read_late[0].weight.zero_()
    assert report.rows == rows


def test_a_dry_run_reports_and_writes_nothing():
    net, other = two_layers(), two_layers()
    before = weights_of(net)
    report = fire(net, dry_run=True)
    assert report.treated() == fire(other).treated() and not report.changed and not report.parameters
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert "would change (dry run)" in str(report)


def test_min_norm_is_a_floor():
    net = two_layers()
    with torch.no_grad():
        net[1].weight.mul_(1e-6 / net[1].weight.norm())
    with pytest.raises(UserError, match=r"norm 1e-06 is below min_norm=0\.001 in 1\.weight"):
        fire(net, min_norm=1e-3)
    report = fire(net, min_norm=1e-3, degenerate="skip")
    assert report.changed == {"0.weight"}
    assert report.rows[2].reason == "norm 1e-06 is below min_norm=0.001"


def test_initial_scale_gives_back_the_starting_norm():
    net = two_layers()
    start = weights_of(net)
    with torch.no_grad():
        net[0].weight.mul_(5.0)
    plain = two_layers()
    fire(plain, solver="exact")
    fire(net, solver="exact", scale="initial", initial=start)
    assert net[0].weight.norm().item() == pytest.approx(start["0.weight"].norm().item(), rel=1e-6)
    directions = [w.detach() / w.norm() for w in (net[0].weight, plain[0].weight)]
    assert torch.allclose(*directions, atol=1e-6)
    with pytest.raises(UserError, match="scale='initial' needs the starting weights"):
        fire(net, scale="initial")
    before = weights_of(net)
    for bad, words in (
        ({"0.weight": start["0.weight"]}, r"initial holds no 1\.weight"),
        (start | {"1.weight": torch.zeros(3, 6)}, r"starting weights of 1\.weight are zero"),
        (
            start | {"1.weight": torch.full((3, 6), torch.nan)},
            r"starting weights of 1\.weight are zero or not finite",
        ),
    ):
        with pytest.raises(UserError, match=words):
            fire(net, scale="initial", initial=bad)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_polar_and_fire_have_the_same_defaults():
    """Except for the solver, which is exact where one matrix is asked for."""
    parameters = signature(polar).parameters
    shared = {f.name: f.default for f in fields(FireSettings) if f.name in parameters and f.name != "solver"}
    assert shared == {name: parameters[name].default for name in shared}
    assert len(shared) == 4


@pytest.mark.parametrize("setting", [{"iterations": 3}, {"normalize": "spectral"}])
def test_a_setting_without_effect_is_refused(setting):
    with pytest.raises(UserError, match="has no effect with solver='exact'"):
        fire(two_layers(), solver="exact", **setting)
    with pytest.raises(UserError, match="no setting 'strenght'; did you mean 'strength'"):
        FireSettings.of(strenght=0.5)


def test_project_changes_one_weight_in_place():
    torch.manual_seed(0)
    linear, conv = nn.Linear(5, 8), nn.Conv2d(3, 6, 3)
    expected = nn.Sequential(nn.Linear(5, 8), nn.Conv2d(3, 6, 3))
    expected[0].load_state_dict(linear.state_dict())
    expected[1].load_state_dict(conv.state_dict())
    fire(expected, solver="exact")
    for layer, other in zip((linear, conv), expected, strict=True):
        assert project_(layer.weight) is layer.weight
        assert torch.allclose(layer.weight, other.weight, atol=1e-6)
    assert deviation_from_isometry(project_(torch.randn(9, 4), scale=1.0)) < 1e-8
    with pytest.raises(UserError, match=r"shape \(3,\) holds no matrix"):
        project_(torch.ones(3))


def test_weights_over_one_memory_are_treated_once_and_forgotten_together():
    """Two Parameter objects over one storage, a transpose, and a slice; columns that only lie side by side are two."""
    torch.manual_seed(0)
    for kind in ("same", "transpose", "slice"):
        net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
        weight = net[0].weight.detach()
        view = {"same": weight, "transpose": weight.T, "slice": weight[:3]}[kind]
        net[1].weight = nn.Parameter(view)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
        net[0].weight.grad, net[1].weight.grad = (
            torch.ones_like(net[0].weight),
            torch.ones_like(net[1].weight),
        )
        optimizer.step()
        report = fire(net, solver="exact")
        (row,) = report.treated()
        assert row.norm_after == pytest.approx(net[0].weight.norm().item()) and row.dfi_after < 1e-8
        assert report.changed == {"0.weight", "1.weight"}
        assert reset_optimizer_state(optimizer, "clear_changed", report) == 2 and not optimizer.state
    buffer = torch.randn(4, 8)
    apart = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    apart[0].weight, apart[1].weight = nn.Parameter(buffer[:, :4]), nn.Parameter(buffer[:, 4:])
    assert len(fire(apart).treated()) == 2


def test_models_that_cannot_be_treated_are_one_clear_line():
    with pytest.raises(UserError, match="TorchScript"):
        fire(torch.jit.script(nn.Linear(3, 3)))
    sparse = nn.Linear(3, 3)
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(UserError, match=r"weight: torch\.sparse_coo: only dense weights"):
        fire(sparse)


def test_the_way_to_the_first_matrix_product_is_short_and_leads_down():
    """At most six calls deep, in at most eight files, and no call of a file that called this one."""
    root = str(Path(fire_core.__file__).parent)
    files, at_product = set(), []

    def watch(frame, event, called):
        inside = frame.f_code.co_filename.startswith(root)
        if event == "call" and inside:
            files.add(frame.f_code.co_filename)
        if event == "c_call" and called.__name__ in ("bmm", "baddbmm", "matmul", "mm"):
            sys.setprofile(None)
            while frame is not None:
                if frame.f_code.co_filename.startswith(root):
                    at_product.append(frame.f_code)
                frame = frame.f_back

    net = two_layers()
    sys.setprofile(watch)
    try:
        fire(net)
    finally:
        sys.setprofile(None)
    way = [Path(code.co_filename).name for code in reversed(at_product)]
    assert way == ["projection.py", "wrapped_models.py", "engine.py", "engine.py", "polar.py", "kernels.py"]
    assert len(files) <= 8, sorted(files)


def test_settings_are_listed_in_the_signature_of_fire():
    shown = signature(fire).parameters
    assert {f.name: f.default for f in fields(FireSettings)}.items() <= {
        name: parameter.default for name, parameter in shown.items()
    }.items()
    assert list(shown)[:5] == ["model", "targets", "initial", "dry_run", "group"]
    with pytest.raises(UserError, match="no setting 'itertions'; did you mean 'iterations'"):
        fire(two_layers(), itertions=5)


def test_version():
    assert fire_core.__version__[0].isdigit()


def test_every_argument_of_fire_is_described_in_its_own_text() -> None:
    arguments = list(signature(fire).parameters)[1:]
    assert len(arguments) > 10
    for name in arguments:
        assert f"\n        {name}: " in fire.__doc__, name
    assert "settings: " not in fire.__doc__
