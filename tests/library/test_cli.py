"""inspect, apply and targets on files: the same numbers as in memory, and nothing treated that a file does not show."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fire_core import UserError, fire
from fire_core.checkpoints.command_line import main
from fire_core.checkpoints.files import open_checkpoint
from fire_core.checkpoints.targets import targets_of
from fire_core.checkpoints.treat import spectra, treat_file
from fire_core.solvers.polar import polar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)
        self.head.is_head = True


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(12, 6)
        self.c_attn = nn.Linear(6, 18, bias=False)
        self.c_attn.fused_rows = {"q": 6, "k": 6, "v": 6}
        self.lm_head = nn.Linear(6, 12, bias=False)
        self.lm_head.weight = self.wte.weight


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def run(*arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def included(path: Path, rule: str = "all", model: str | None = None, key: str | None = None) -> set[str]:
    return {target.parameter for target in targets_of(open_checkpoint(path, key), rule, model)[0].included}


def assert_same(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.allclose(actual[name], tensor, atol=1e-6), name


def test_apply_on_safetensors_equals_fire_in_memory(tmp_path: Path, net: Net) -> None:
    save_file(net.state_dict(), tmp_path / "in.safetensors", {"format": "pt", "note": "kept"})
    before = (tmp_path / "in.safetensors").read_bytes()
    assert run("apply", tmp_path / "in.safetensors", "--targets=-head.*", tmp_path / "out.safetensors") == 0
    fire(net, targets="-head.*")
    assert_same(load_file(tmp_path / "out.safetensors"), net.state_dict())
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "kept"}
    assert (tmp_path / "in.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors"]


def test_apply_on_a_torch_file_keeps_all_else(tmp_path: Path, net: Net) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    net.fc(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    content = {"epoch": 3, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "in.pt")
    assert run("apply", tmp_path / "in.pt", tmp_path / "out.pt", "--solver", "exact") == 0
    result, old = (torch.load(tmp_path / name, weights_only=True) for name in ("out.pt", "in.pt"))
    assert torch.equal(old["model"]["fc.weight"], net.fc.weight), "the input file must stay as it was"
    fire(net, solver="exact")
    assert_same(result["model"], net.state_dict())
    assert result["epoch"] == 3 and len(result["optimizer"]["state"]) == len(old["optimizer"]["state"])


def test_apply_reads_the_entry_that_key_names(tmp_path: Path, net: Net) -> None:
    actor = {**net.state_dict(), "fused": torch.ones(6, 2)}
    torch.save({"agent": {"actor": actor}, "steps": 1}, tmp_path / "in.pt")
    assert "fused" not in included(tmp_path / "in.pt", "all", f"{__name__}:Net", "agent.actor")
    for key in ([], ["--key", "agent.critic"], ["--key", ""]):
        assert run("apply", tmp_path / "in.pt", tmp_path / "out.pt", *key) == 2
    assert run("apply", tmp_path / "in.pt", tmp_path / "out.pt", "--key", "agent.actor") == 0
    fire(net)
    written = torch.load(tmp_path / "out.pt", weights_only=True)["agent"]["actor"]
    assert torch.equal(written.pop("fused"), torch.ones(6, 2))
    assert_same(written, net.state_dict())


def test_inspect_gives_the_spectrum(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    basis = torch.linalg.qr(torch.randn(4, 4))[0]
    weight = torch.diag(torch.tensor([2.0, 1.0, 1.0, 0.5])) @ basis
    save_file({"fc.weight": weight, "fc.bias": torch.zeros(4)}, tmp_path / "in.safetensors")
    checkpoint = open_checkpoint(tmp_path / "in.safetensors")
    (found,) = spectra(checkpoint, targets_of(checkpoint)[0])
    figures = {"norm": 2.5, "largest": 2.0, "median": 1.0, "smallest": 0.5, "condition": 4.0, "dfi": 9.5625}
    for name, value in figures.items():
        assert found[name] == pytest.approx(value, rel=1e-5)
    assert run("inspect", tmp_path / "in.safetensors") == 0
    head, row, *rest = capsys.readouterr().out.splitlines()
    assert head.split() == list(found) and "fc.weight" in rest[2], "and the table of targets"
    assert row.split() == f"fc.weight 4x4 2.5 2 1 0.5 4 {found['effective_rank']:.3g} 9.56".split()


def test_a_file_alone_cannot_split_a_fused_layer_but_a_model_can(tmp_path: Path) -> None:
    model = Tied()
    state = model.state_dict()
    del state["lm_head.weight"]
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(state, source)
    assert run("apply", source, out) == 2, "the fused layer and the embedding stay out"
    assert run("apply", source, out, "--model", f"{__name__}:Tied") == 0
    fire(model)
    assert_same(load_file(out), {name: model.state_dict()[name] for name in state})


def test_tied_weights_of_a_torch_file_are_projected_once(tmp_path: Path) -> None:
    model = Tied()
    copied = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(model.state_dict(), tmp_path / "in.pt")
    torch.save(copied, tmp_path / "copies.pt")
    torch.save(copied | {"wte.weight": torch.ones(12, 6)}, tmp_path / "differ.pt")
    for name, options in (("in", []), ("copies", ["--model", f"{__name__}:Tied"])):
        files = tmp_path / f"{name}.pt", tmp_path / f"{name}_new.pt"
        assert run("apply", *files, "--targets=lm_head", *options) == 0
    shared, both = (torch.load(tmp_path / f"{n}_new.pt", weights_only=True) for n in ("in", "copies"))
    assert shared["lm_head.weight"].data_ptr() == shared["wte.weight"].data_ptr()
    fire(model, targets="lm_head")
    assert_same(shared, model.state_dict())
    assert_same(both, model.state_dict())
    checkpoint = open_checkpoint(tmp_path / "differ.pt")
    with pytest.raises(UserError, match="tied in the model, but differ"):
        treat_file(checkpoint, targets_of(checkpoint, "all", f"{__name__}:Tied")[0], None)


def test_the_head_of_a_file_is_told_by_a_tied_table_or_not_at_all(tmp_path: Path) -> None:
    weight, source = torch.randn(4, 4), tmp_path / "in.pt"
    torch.save({"lm_head.weight": weight, "fc.weight": weight + 1}, source)
    for rule in ("no_head", "head", "-head", "mlp,no_head"):
        with pytest.raises(UserError, match="needs the output layers"):
            included(source, rule)
    assert included(source, "-lm_head") == {"fc.weight"}
    torch.save({"lm_head.weight": weight, "fc.weight": weight + 1, "wte.weight": weight}, source)
    assert included(source, "head") == {"lm_head.weight"} and included(source, "no_head") == {"fc.weight"}
    torch.save({"lm_head.weight": weight, "fc.weight": weight + 1, "wte.weight": weight.clone()}, source)
    assert included(source, "all") == {"fc.weight"}, "stored a second time as a table"


TABLES = """emb value_embeds.1 item_embedding wte encoder.embed.0 vq.codebooks Emb.table lookup_table x.EMBED.y
    transformer.WTE vocab word_vectors encoder user_factors net.patch_embed""".split()  # noqa: SIM905
V, D = 50, 16  # rows of a vocabulary, width of the model
BODY = {"up.weight": (64, D), "down.weight": (D, 64), "q.weight": (D, D)}


@pytest.mark.parametrize("name", TABLES)
def test_what_may_be_a_table_stays_out_of_a_bare_file(tmp_path: Path, name: str) -> None:
    """By its name, or because it has as many rows as the output layer, as `encoder` of torch's language model has."""
    shape = {"user_factors": (20 * D, D), "vq.codebooks": (2, V, D)}.get(name, (V, D))
    shapes = {f"{name}.weight": shape, **BODY, "decoder.weight": (V, D), "decoder.bias": (V,)}
    shapes["patch_embed.proj.weight"] = (D, 3, 4)
    save_file({n: torch.randn(shape) for n, shape in shapes.items()}, tmp_path / "in.safetensors")
    assert included(tmp_path / "in.safetensors") == {*BODY, "decoder.weight", "patch_embed.proj.weight"}


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "net.model._orig_mod.", "student."])
def test_prefixes_of_wrappers_are_stripped_before_a_model_is_asked(tmp_path: Path, prefix: str) -> None:
    state = {f"{prefix}{name}": tensor for name, tensor in Tied().state_dict().items()}
    other = {f"teacher.{name}": tensor.clone() for name, tensor in Tied().state_dict().items()}
    torch.save({"state_dict": {**other, **state, "criterion.weight": torch.ones(2, 2)}}, tmp_path / "in.pt")
    table, _ = targets_of(open_checkpoint(tmp_path / "in.pt"), "all", f"{__name__}:Tied")
    assert {t.parameter for t in table.included} == {f"{prefix}c_attn.weight", f"{prefix}wte.weight"}
    assert len(table.included) == 4, "q, k, v and the tied weight"
    assert "looks like a copy" in next(t.reason for t in table if t.parameter == "teacher.c_attn.weight")
    with pytest.raises(UserError, match="has no weight of"):
        included(tmp_path / "in.pt", model="torch.nn:Identity")


W = {"fc.weight": torch.randn(8, 8), "fc.bias": torch.zeros(8), "out.weight": torch.randn(4, 8)}
AVERAGE = {name: tensor + 0.01 for name, tensor in W.items()}
WRAPPED = {"module." + name: tensor for name, tensor in AVERAGE.items()}
MOMENTS = {"state": {0: {"exp_avg": torch.ones(8, 8)}, 1: {"exp_avg": torch.ones(8)}}}


@pytest.mark.parametrize(
    "content, treated, left",
    [
        ({"state_dict": W, "state_dict_ema": AVERAGE, "optimizer": MOMENTS}, "state_dict", "state_dict_ema"),
        ({"model": W, "ema": {"module": AVERAGE, "updates": 3}}, "model", "ema.module"),
        ({"model": W, "averaged": {"n_averaged": torch.tensor(2), **WRAPPED}}, "model", "averaged"),
        ({"model": {"module." + n: t for n, t in W.items()}, "ema": AVERAGE}, "model", "ema"),
        ({"model": W, "ema": {"shadow_params": list(AVERAGE.values())}}, "model", "ema.shadow_params"),
        ({"state_dict": AVERAGE, "ema_state_dict": W, "message_hub": {}}, "ema_state_dict", "state_dict"),
        (
            {"state_dict": W, "callbacks": {"EMA": {"weights": AVERAGE}}},
            "state_dict",
            "callbacks.EMA.weights",
        ),
    ],
)
def test_apply_treats_what_training_resumes_from_and_names_the_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: dict, treated: str, left: str
) -> None:
    torch.save(content, tmp_path / "in.pt")
    assert run("apply", tmp_path / "in.pt", tmp_path / "out.pt", "--solver=exact", "--targets=*fc") == 0
    said = capsys.readouterr().out
    assert f"look like copies of these weights: {left}\n" in said
    new = torch.load(tmp_path / "out.pt", weights_only=True)
    for entry in (treated, left):
        weights = new
        for word in entry.split("."):
            weights = weights[word]
        weights = list(weights.values()) if isinstance(weights, dict) else weights
        weight = next(tensor for tensor in weights if tensor.shape == (8, 8))
        assert torch.allclose(torch.linalg.svdvals(weight), torch.ones(8), atol=1e-4) == (entry == treated)


@pytest.mark.parametrize(
    "options, solver, settings, scale",
    [
        ("", "newton_schulz", {"iterations": 10}, 1.5**0.5),
        ("--solver=quintic --iterations=5 --scale=none", "quintic", {"iterations": 5}, 1.0),
        ("--solver=exact --scale=none --tolerance=1e-9", "exact", {"tolerance": 1e-9}, 1.0),
    ],
)
def test_the_options_of_apply_are_the_settings_of_fire_and_a_dry_run_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, options: str, solver: str, settings: dict, scale: float
) -> None:
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    save_file({"a.weight": weight, "b.weight": torch.eye(5)}, source)
    assert run("apply", source, "--dry-run", *options.split()) == 0
    dry = capsys.readouterr().out
    assert not out.exists() and "2 targets would change" in dry
    assert run("apply", source, out, *options.split()) == 0
    assert set(dry.splitlines()[:3]) <= set(capsys.readouterr().out.splitlines()), "the same figures"
    expected = polar(weight, solver, **settings).factor
    assert torch.allclose(load_file(out)["a.weight"], scale * expected, atol=1e-6)


def test_a_file_that_appears_while_the_weights_are_treated_is_not_overwritten(tmp_path, monkeypatch):
    from fire_core.checkpoints import treat

    save_file({"fc.weight": torch.randn(4, 4)}, tmp_path / "in.safetensors")
    out, project = tmp_path / "out.safetensors", treat.project

    def slow(*arguments, **settings):
        out.write_text("of another process")
        return project(*arguments, **settings)

    monkeypatch.setattr(treat, "project", slow)
    assert run("apply", tmp_path / "in.safetensors", out) == 2
    assert out.read_text() == "of another process"
