"""Files: the numbers are those in memory, nothing is treated that a file does not show, damage gives one clear line."""

import json
import os
import resource
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fire_core import UserError, fire
from fire_core.checkpoints import treat
from fire_core.checkpoints.command_line import main
from fire_core.checkpoints.files import open_checkpoint
from fire_core.checkpoints.targets import targets_of
from fire_core.checkpoints.treat import spectra, treat_file
from fire_core.files import load_torch as read
from tests.architectures import small_language_model
from tests.polar_cases import gaussian


def make_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3), "bn": nn.BatchNorm2d(8), "fc": nn.Linear(8, 16)})
    net["head"] = nn.Linear(16, 4)
    net.head.is_head = True
    return net


def make_tied() -> nn.Module:
    """With a fused layer, whose rows are declared, and an output layer that is the embedding."""
    net = nn.ModuleDict({"wte": nn.Embedding(12, 6), "c_attn": nn.Linear(6, 18, bias=False)})
    net["lm_head"] = nn.Linear(6, 12, bias=False)
    net.c_attn.fused_rows = {"q": 6, "k": 6, "v": 6}
    net.lm_head.weight = net.wte.weight
    return net


NET, TIED = f"{__name__}:make_net", f"{__name__}:make_tied"
WEIGHTS = {"a.weight": gaussian(6, 4), "b.weight": torch.eye(5)}


def run(*arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def fails(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    """The one line that a command ends with."""
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def write(content: object, path: Path) -> Path:
    """A file of either kind."""
    (save_file if path.suffix == ".safetensors" else torch.save)(content, path)
    return path


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def included(path: Path, rule: str = "all", model: str | None = None, key: str | None = None) -> set[str]:
    return {target.parameter for target in targets_of(open_checkpoint(path, key), rule, model)[0].included}


assert_same = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


SETTINGS = [  # of fire, as options of apply
    {},
    {"solver": "quintic", "iterations": 5, "scale": "none"},
    {"solver": "exact", "tolerance": 1e-9, "strength": 0.5},
    {"normalize": "spectral", "min_norm": 1.3, "degenerate": "skip"},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_apply_on_safetensors_equals_fire_in_memory_and_a_dry_run_writes_nothing(tmp_path, capsys, settings):
    net, source, out = make_net(), tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(net.state_dict(), source, {"format": "pt", "note": "kept"})
    before = source.read_bytes()
    options = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    given = ["apply", source, "--targets=-head.*", *options]
    assert run(*given, "--dry-run") == 0
    dry = capsys.readouterr().out
    assert files_in(tmp_path) == {"in.safetensors"} and "targets would change" in dry
    assert run(*given, out) == 0
    assert set(dry.splitlines()[:3]) <= set(capsys.readouterr().out.splitlines()), "the same figures"
    fire(net, targets="-head.*", **settings)
    assert_same(load_file(out), net.state_dict())
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "kept"}
    assert source.read_bytes() == before and files_in(tmp_path) == {"in.safetensors", "out.safetensors"}


def test_apply_on_a_torch_file_reads_the_entry_that_key_names_and_keeps_all_else(tmp_path: Path) -> None:
    net, out = make_net(), tmp_path / "out.pt"
    optimizer = torch.optim.Adam(net.parameters())
    net.fc(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    actor = {**net.state_dict(), "fused": torch.ones(6, 2)}
    content = {"args": Namespace(lr=1), "agent": {"actor": actor}, "optimizer": optimizer.state_dict()}
    source = write(content, tmp_path / "in.pt")
    assert "fused" not in included(source, "all", NET, "agent.actor")
    quantised = write(
        net.state_dict() | {"fc.weight": torch.ones(16, 8, dtype=torch.int8)}, tmp_path / "q.pt"
    )
    assert included(quantised, "all", NET) == {"conv.weight", "head.weight"}
    for key in ([], ["--key", "agent.critic"], ["--key", ""]):
        assert run("apply", source, out, *key) == 2
    assert run("apply", source, out, "--key", "agent.actor", "--solver", "exact") == 0
    result, old = read(out), read(source)
    assert_same(old["agent"]["actor"], actor)  # the input file stays as it was
    fire(net, solver="exact")
    assert_same(result["agent"]["actor"], {**net.state_dict(), "fused": torch.ones(6, 2)})
    assert result["args"].lr == 1 and len(result["optimizer"]["state"]) == len(old["optimizer"]["state"])


def test_inspect_gives_the_spectrum(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    weight = torch.diag(torch.tensor([2.0, 1.0, 1.0, 0.5])) @ torch.linalg.qr(torch.randn(4, 4))[0]
    source = write({"fc.weight": weight, "fc.bias": torch.zeros(4)}, tmp_path / "in.safetensors")
    checkpoint = open_checkpoint(source)
    (found,) = spectra(checkpoint, targets_of(checkpoint)[0])
    figures = {"norm": 2.5, "largest": 2.0, "median": 1.0, "smallest": 0.5, "condition": 4.0, "dfi": 9.5625}
    assert {name: found[name] for name in figures} == pytest.approx(figures, rel=1e-5)
    assert run("inspect", source) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == list(found)


def test_tied_weights_of_a_torch_file_are_projected_once(tmp_path: Path) -> None:
    model, out = make_tied(), tmp_path / "out.pt"
    copied = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source, copies = write(model.state_dict(), tmp_path / "in.pt"), write(copied, tmp_path / "copies.pt")
    differ = open_checkpoint(write(copied | {"wte.weight": torch.ones(12, 6)}, tmp_path / "differ.pt"))
    fire(model, targets="lm_head")
    for path, options in ((source, []), (copies, ["--model", TIED])):
        assert run("apply", path, out, "--targets=lm_head", *options) == 0
        written = read(out)
        assert_same(written, model.state_dict())
        tied = written["lm_head.weight"].data_ptr() == written["wte.weight"].data_ptr()
        assert tied == (path == source)
        out.unlink()
    with pytest.raises(UserError, match="tied in the model, but differ"):
        treat_file(differ, targets_of(differ, "all", TIED)[0], None)


def test_the_head_of_a_file_is_told_by_a_tied_table_or_not_at_all(tmp_path: Path) -> None:
    weight, path = torch.randn(4, 4), tmp_path / "in.pt"
    weights = {"lm_head.weight": weight, "fc.weight": weight + 1}
    write(weights, path)
    for rule in ("no_head", "head", "-head", "mlp,no_head"):
        with pytest.raises(UserError, match="needs the output layers"):
            included(path, rule)
    assert included(path, "-lm_head") == {"fc.weight"}
    write(weights | {"wte.weight": weight}, path)
    assert included(path, "head") == {"lm_head.weight"} and included(path, "no_head") == {"fc.weight"}
    write(weights | {"wte.weight": weight.clone()}, path)
    assert included(path, "all") == {"fc.weight"}, "stored a second time as a table"


TABLES = """emb value_embeds.1 item_embedding wte encoder.embed.0 vq.codebooks Emb.table lookup_table x.EMBED.y
    transformer.WTE vocab word_vectors encoder user_factors net.patch_embed relative_attention_bias""".split()  # noqa: SIM905
V, D = 50, 16  # rows of a vocabulary, width of the model
BODY = {"up.weight": (64, D), "down.weight": (D, 64), "q.weight": (D, D)}


@pytest.mark.parametrize("name", TABLES)
def test_what_may_be_a_table_stays_out_of_a_bare_file(tmp_path: Path, name: str) -> None:
    shapes = {"user_factors": (20 * D, D), "vq.codebooks": (2, V, D), "relative_attention_bias": (D, D)}
    shape = shapes.get(name, (V, D))
    shapes = {f"{name}.weight": shape, **BODY, "decoder.weight": (V, D), "decoder.bias": (V,)}
    shapes |= {"patch_embed.proj.weight": (D, 3, 4), "h.0.attn.c_attn.weight": (D, 3 * D)}
    shapes |= {"h.0.mlp.c_fc.weight": (D, 64), "h.0.mlp.c_proj.weight": (64, D), "experts.weight": (4, 64, D)}
    shapes |= {"h.0.attn.q_norm.weight": (4, D), "h.1.weight": (D, 6, 6), "h.1.bias": (D, 6, 6)}  # gains
    source = write({n: torch.randn(shape) for n, shape in shapes.items()}, tmp_path / "in.safetensors")
    assert included(source) == {*BODY, "decoder.weight", "patch_embed.proj.weight"}


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "net.model._orig_mod.", "student."])
def test_prefixes_of_wrappers_are_stripped_before_a_model_is_asked(tmp_path: Path, prefix: str) -> None:
    state = {f"{prefix}{name}": tensor for name, tensor in make_tied().state_dict().items()}
    other = {f"teacher.{name}": tensor.clone() for name, tensor in make_tied().state_dict().items()}
    content = {"state_dict": {**other, **state, "criterion.weight": torch.ones(2, 2)}}
    source = write(content, tmp_path / "in.pt")
    table, _ = targets_of(open_checkpoint(source), "all", TIED)
    assert {t.parameter for t in table.included} == {f"{prefix}c_attn.weight", f"{prefix}wte.weight"}
    assert len(table.included) == 4, "q, k, v and the tied weight"
    assert "looks like a copy" in next(t.reason for t in table if t.parameter == "teacher.c_attn.weight")
    with pytest.raises(UserError, match="has no weight of"):
        included(source, model="torch.nn:Identity")


W = {"fc.weight": torch.randn(8, 8), "fc.bias": torch.zeros(8), "out.weight": torch.randn(4, 8)}
AVERAGE = {name: tensor + 0.01 for name, tensor in W.items()}
WRAPPED = {"module." + name: tensor for name, tensor in AVERAGE.items()}
MOMENTS = {"state": {0: {"exp_avg": torch.ones(8, 8)}, 1: {"exp_avg": torch.ones(8)}}}
COPIES = [  # content of a file, the entry that is treated, and the one that is named and left
    ({"state_dict": W, "state_dict_ema": AVERAGE, "optimizer": MOMENTS}, "state_dict", "state_dict_ema"),
    ({"model": W, "averaged": {"n_averaged": torch.tensor(2), **WRAPPED}}, "model", "averaged"),
    ({"model": {"module." + n: t for n, t in W.items()}, "ema": AVERAGE}, "model", "ema"),
    ({"model": W, "ema": {"shadow_params": list(AVERAGE.values())}}, "model", "ema.shadow_params"),
    ({"state_dict": AVERAGE, "ema_state_dict": W, "message_hub": {}}, "ema_state_dict", "state_dict"),
    ({"model": W, "callbacks": {"EMA": {"weights": AVERAGE}}}, "model", "callbacks.EMA.weights"),
]


@pytest.mark.parametrize("content, treated, left", COPIES)
def test_apply_treats_what_training_resumes_from_and_names_copies(tmp_path, capsys, content, treated, left):
    source = write(content, tmp_path / "in.pt")
    assert run("apply", source, tmp_path / "out.pt", "--solver=exact", "--targets=*fc") == 0
    assert f"look like copies of these weights: {left}\n" in capsys.readouterr().out
    for entry in (treated, left):
        weights = read(tmp_path / "out.pt")
        for word in entry.split("."):
            weights = weights[word]
        weights = list(weights.values()) if isinstance(weights, dict) else weights
        weight = next(tensor for tensor in weights if tensor.shape == (8, 8))
        assert torch.allclose(torch.linalg.svdvals(weight), torch.ones(8), atol=1e-4) == (entry == treated)


def flipped_bit(path: Path) -> None:
    write(WEIGHTS, path)
    content = bytearray(path.read_bytes())
    content[content.index(WEIGHTS["b.weight"].numpy().tobytes()) + 5] ^= 16
    path.write_bytes(content)
    torch.load(path, weights_only=True)  # sees nothing


def index(text: str, folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "model.safetensors.index.json").write_text(text)


NESTED = '{"weight_map": ' + "[" * 200_000 + "]" * 200_000 + "}"
UNUSABLE = [
    ("x", lambda path: None, "does not exist"),
    ("x", os.mkfifo, "is neither a file of weights nor a folder"),
    ("x.pt", partial(write, {"model": nn.Linear(3, 3)}), "cannot be read safely"),  # code
    ("x.pt", partial(write, {**WEIGHTS, "c.weight": torch.eye(4).to_sparse()}), "is sparse"),
    ("x.pt", flipped_bit, "checksum"),
    ("x.pt", partial(write, {"a\x1b[2J.weight": torch.eye(3)}), "cannot be printed"),
    ("x.safetensors", partial(write, {"a." * 3000 + "weight": torch.eye(3)}), "3000 levels deep"),
    ("x.safetensors", lambda path: path.write_bytes(b"\xff" * 99), "cannot be read as safetensors"),
    ("x", partial(index, NESTED), "is not an index"),
    ("x", partial(index, '{"weight_map": {"a": "pipe"}}'), "not files of the folder"),
]


@pytest.mark.parametrize("name, make, said", UNUSABLE)
def test_sources_that_cannot_be_used_are_named_and_nothing_is_written(tmp_path, capsys, name, make, said):
    make(tmp_path / name)
    before = files_in(tmp_path)
    error = fails(capsys, "apply", tmp_path / name, tmp_path / f"new{Path(name).suffix}")
    assert said in error and "\x1b" not in error and files_in(tmp_path) == before


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_full_disk_or_an_interrupt_leaves_nothing(tmp_path, monkeypatch, capsys, suffix, interrupt):
    """A limit on the size of files fails in the same place as a full disk, in what torch and safetensors call."""
    source = write({"a.weight": torch.randn(500, 500)}, tmp_path / f"in{suffix}")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if interrupt:
        monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        code = run("apply", source, tmp_path / f"out{suffix}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == (130 if interrupt else 2) and capsys.readouterr().err.count("\n") == 1
    assert files_in(tmp_path) == {source.name}


def test_outputs_are_checked_before_any_work(tmp_path, monkeypatch, capsys):
    source, other = (write(WEIGHTS, tmp_path / name) for name in ("old.pt", "other.pt"))
    (link := tmp_path / "link.pt").symlink_to("nowhere")
    contents = {path: path.read_bytes() for path in (source, other)}
    monkeypatch.setattr(treat, "project", lambda *_, **__: pytest.fail("work"))
    for output in (source, other, link):
        assert "not overwritten" in fails(capsys, "apply", source, output)
    assert "should end in '.pt'" in fails(capsys, "apply", source, tmp_path / "new.bin")
    assert "File exists" in fails(capsys, "apply", source, source / "new.pt")
    assert {path: path.read_bytes() for path in contents} == contents


def test_a_file_that_appears_while_the_weights_are_treated_is_not_overwritten(tmp_path, monkeypatch):
    source, out, project = write(WEIGHTS, tmp_path / "in.pt"), tmp_path / "out.pt", treat.project

    def slow(*arguments, **settings):
        out.write_text("of another process")
        return project(*arguments, **settings)

    monkeypatch.setattr(treat, "project", slow)
    assert run("apply", source, out) == 2 and out.read_text() == "of another process"


@pytest.mark.reference
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("torch_files", [False, True])
def test_apply_on_a_folder_equals_fire_on_the_model(tmp_path, name, torch_files):
    pytest.importorskip("transformers")
    model = small_language_model(name)
    old, new = tmp_path / "old", tmp_path / "new" / "model.safetensors"
    model.save_pretrained(old, max_shard_size="20KB")
    assert len(list(old.glob("*.safetensors"))) > 1
    if torch_files:
        for file in old.glob("model*"):
            file.unlink()
        torch.save(model.state_dict(), old / "pytorch_model.bin")  # with the tied weight under both names
    rule = "all" if torch_files else "-head"
    assert run("apply", old, new, f"--targets={rule}", "--solver=exact") == 0
    report = fire(model, targets=rule, solver="exact")
    assert len(report.treated()) == len(targets_of(open_checkpoint(old), rule)[0].included) > 5
    model.config.save_pretrained(new.parent)
    again = dict(type(model).from_pretrained(new.parent).named_parameters())
    assert_same(again, dict(model.named_parameters()))


@pytest.mark.reference
def test_what_a_config_names_is_called_only_if_it_is_a_model_class(tmp_path):
    pytest.importorskip("transformers")
    write({"a.weight": torch.randn(4, 4)}, tmp_path / "pytorch_model.bin")
    config = {"model_type": "gpt2", "architectures": ["GPT2Config"], "n_layer": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is not a model"):
        targets_of(open_checkpoint(tmp_path), "all", None)
