"""Checkpoints that are damaged, crafted or odd: one clear line or the right numbers, never a traceback or a leak."""

import json
import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fire_core.checkpoints import files
from fire_core.checkpoints.command_line import main
from fire_core.solvers.polar import polar

WEIGHTS = {
    "a.weight": torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),
    "b.weight": torch.eye(5),
}


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def fails(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    """The one line that a command ends with."""
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def folder_of(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    return folder


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("in/data.pkl", bytes(1000))


def saved(content: object):
    return lambda path: torch.save(content, path)


def named(name: str):
    """A file of either kind whose weight has this name."""
    return lambda path: (save_file if path.suffix == ".safetensors" else torch.save)(
        {name: torch.eye(3)}, path
    )


def flipped_bit(path: Path) -> None:
    torch.save(WEIGHTS, path)
    content = bytearray(path.read_bytes())
    content[content.index(WEIGHTS["b.weight"].numpy().tobytes()) + 5] ^= 16
    path.write_bytes(content)
    torch.load(path, weights_only=True)  # torch sees nothing


def without_pickle(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("in/data/0", bytes(96))


def truncated(path: Path) -> None:
    save_file(WEIGHTS, path)
    path.write_bytes(path.read_bytes()[:100])


def index(text: str):
    def make(folder: Path) -> None:
        folder.mkdir()
        os.mkfifo(folder / "pipe")
        (folder / "model.safetensors.index.json").write_text(text)

    return make


NESTED = '{"weight_map": ' + "[" * 200_000 + "]" * 200_000 + "}"
SPARSE, META = torch.eye(4).to_sparse(), torch.empty(4, 4, device="meta")


@pytest.mark.parametrize(
    "name, make, said",
    [
        ("x", lambda path: None, "does not exist"),
        ("x", lambda path: path.symlink_to("nowhere"), "does not exist"),
        ("x", lambda path: path.symlink_to("x"), "cannot be read"),
        ("x", os.mkfifo, "neither a file nor a folder"),
        ("x", Path.mkdir, "holds none of"),
        ("x.pt", saved({"a": 1}), "contains no named tensors"),
        ("x.pt", saved({"fc.bias": torch.ones(3)}), "has no matrix to treat"),
        ("x.pt", saved({"model": torch.nn.Linear(3, 3)}), "cannot be read safely"),  # code
        ("x.pt", saved({**WEIGHTS, "c.weight": SPARSE}), "is sparse"),
        ("x.pt", saved({**WEIGHTS, "c.weight": META}), "on the meta"),
        ("x.pt", flipped_bit, "checksum"),
        ("x.pt", compressed, "is compressed"),
        ("x.pt", without_pickle, "cannot be read safely"),
        ("x.pt", named("a\x1b[2J.weight"), "cannot be printed"),
        ("x.safetensors", named("a\x1b[2J.weight"), "cannot be printed"),
        ("x.safetensors", named("a." * 3000 + "weight"), "3000 levels deep"),
        ("x.safetensors", truncated, "cannot be read as safetensors"),
        ("x.safetensors", lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"), "as safetensors"),
        ("x", index("not json"), "is not an index"),
        ("x", index('{"weight_map": {"a": null}}'), "is not an index"),
        ("x", index(NESTED), "is not an index"),
        ("x", index('{"weight_map": {"a": "pipe"}}'), "not files of the folder"),
    ],
)
def test_sources_that_cannot_be_used_are_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str, make, said: str
) -> None:
    make(tmp_path / name)
    before = files_in(tmp_path)
    for arguments in (["inspect"], ["apply", tmp_path / f"new{Path(name).suffix}"]):
        error = fails(capsys, arguments[0], tmp_path / name, *arguments[1:])
        assert said in error and "\x1b" not in error
    assert files_in(tmp_path) == before


def test_apply_copies_nothing_that_a_link_leads_to(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = folder_of(tmp_path)
    (tmp_path / "private").mkdir()
    (tmp_path / "private/key").write_text("secret")
    (folder / "notes.txt").write_text("kept")
    (folder / "up").symlink_to(tmp_path)
    (folder / "key").symlink_to(tmp_path / "private/key")
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "same").symlink_to("notes.txt")
    os.mkfifo(folder / "pipe")
    assert run("apply", folder, tmp_path / "new") == 0
    assert files_in(tmp_path / "new") == {"model.safetensors", "notes.txt", "same"}
    said = capsys.readouterr().out
    assert all(name in said for name in ("up", "key", "dangling", "loop", "pipe"))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "\x1b[2Jnone", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama", "architectures": ["pipeline"]},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10**9},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "auto_map": {"AutoConfig": "run.C"}},
        [],
    ],
)
def test_a_config_that_cannot_be_used_stops_unless_guesses_are_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture, config: object
) -> None:
    pytest.importorskip("transformers")
    folder = folder_of(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "run.py").write_text("raise SystemExit('code of the folder was run')")
    for source in (folder, folder / "model.safetensors"):
        error = fails(capsys, "apply", source, tmp_path / "new")
        assert "config.json cannot be used" in error and "--guess" in error and "\x1b" not in error
    assert run("apply", folder, tmp_path / "new", "--guess") == 0
    said = capsys.readouterr().out
    assert "names and shapes, because" in said and "\x1b" not in said


def test_the_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "models--x/blobs", tmp_path / "models--x/snapshots/main"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    save_file(WEIGHTS, blobs / "1")
    (blobs / "2").write_text("{}")
    (folder / "model.safetensors").symlink_to("../../blobs/1")
    (folder / "tokenizer.json").symlink_to("../../blobs/2")
    assert run("apply", folder, tmp_path / "new") == 0
    assert files_in(tmp_path / "new") == {"model.safetensors", "tokenizer.json"}
    assert not (tmp_path / "new/model.safetensors").is_symlink()


def test_old_weights_in_subfolders_stay_behind(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = folder_of(tmp_path)
    stays = (
        "checkpoint-5/model.safetensors",
        "onnx/model.onnx",
        ".git/objects",
        "b\x1b[2J.bin",
        "optimizer.pt",
    )
    for name in (*stays, "vocabulary/words.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"old")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    (folder / "checkpoint-5/trainer_state.json").write_text("{}")
    assert run("apply", folder, tmp_path / "new") == 0
    kept = {"model.safetensors", "checkpoint-5/trainer_state.json", "vocabulary/words.txt"}
    assert files_in(tmp_path / "new") == kept
    said = capsys.readouterr().out
    assert "checkpoint-5/model.safetensors" in said and "optimizer.pt" in said and "\x1b" not in said
    assert "lies inside" in fails(capsys, "apply", folder, folder / "new")


def test_an_index_is_not_a_checkpoint_and_must_fit_its_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    save_file(WEIGHTS, tmp_path / "1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*WEIGHTS, "c.weight"], "1.safetensors")}))
    assert f"name its folder, '{tmp_path}'" in fails(capsys, "inspect", index)
    assert "lacks tensors that its index names (c.weight)" in fails(capsys, "inspect", tmp_path)


@pytest.mark.parametrize("name", ["in.pt", "in.safetensors"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_an_interrupt_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    name: str,
    error: BaseException,
) -> None:
    torch.save(WEIGHTS, tmp_path / "in.pt")
    save_file(WEIGHTS, tmp_path / "in.safetensors")

    def torn(*arguments: object) -> None:
        """Writes a part of the file before it fails."""
        target = next(a for a in arguments if isinstance(a, Path) or hasattr(a, "write"))
        target.write_bytes(b"part") if isinstance(target, Path) else target.write(b"part")
        raise error

    monkeypatch.setattr(torch, "save", torn)
    monkeypatch.setattr("fire_core.checkpoints.files.save_file", torn)
    code = run("apply", tmp_path / name, tmp_path / f"out{Path(name).suffix}")
    said = capsys.readouterr().err
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 2) and said.count("\n") == 1
    assert files_in(tmp_path) == {"in.pt", "in.safetensors"}


def test_an_error_of_the_treatment_is_not_one_of_the_disk(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "in.pt")
    like = files.Checkpoint(tmp_path / "in.pt", [])
    with pytest.raises(RuntimeError, match="svd"), files.new_checkpoint(tmp_path / "out.pt", like):
        raise RuntimeError("svd did not converge")
    assert files_in(tmp_path) == {"in.pt"}


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
    save_file(WEIGHTS, source)
    assert run("apply", source, "--dry-run", *options.split()) == 0
    dry = capsys.readouterr().out
    assert files_in(tmp_path) == {"in.safetensors"} and "2 targets would change" in dry
    assert run("apply", source, out, *options.split()) == 0
    assert set(dry.splitlines()[:3]) <= set(capsys.readouterr().out.splitlines()), "the same figures"
    expected = polar(WEIGHTS["a.weight"], solver, **settings).factor
    assert torch.allclose(load_file(out)["a.weight"], scale * expected, atol=1e-6)
