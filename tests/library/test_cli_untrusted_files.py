"""Checkpoints that are damaged, crafted or odd: one clear line or the right numbers, never a traceback or a leak."""

import json
import os
import resource
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fire_core.checkpoints.command_line import main

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
        ("x", lambda path: None, "is neither a file of weights nor a folder"),
        ("x", lambda path: path.symlink_to("nowhere"), "is neither a file of weights nor a folder"),
        ("x", lambda path: path.symlink_to("x"), "is neither a file of weights nor a folder"),
        ("x", os.mkfifo, "is neither a file of weights nor a folder"),
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
    error = fails(capsys, "apply", tmp_path / name, tmp_path / f"new{Path(name).suffix}")
    assert said in error and "\x1b" not in error
    assert files_in(tmp_path) == before


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
def test_a_config_that_cannot_be_used_stops_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture, config: object
) -> None:
    pytest.importorskip("transformers")
    folder = folder_of(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "run.py").write_text("raise SystemExit('code of the folder was run')")
    for source in (folder, folder / "model.safetensors"):
        error = fails(capsys, "apply", source, tmp_path / "new.safetensors")
        assert "config.json cannot be used" in error and "\x1b" not in error


def test_an_index_is_not_a_checkpoint_and_must_fit_its_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    save_file(WEIGHTS, tmp_path / "1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*WEIGHTS, "c.weight"], "1.safetensors")}))
    assert "of an index, name the folder" in fails(capsys, "inspect", index)
    assert "lacks tensors that its index names (c.weight)" in fails(capsys, "inspect", tmp_path)


@pytest.mark.parametrize("name", ["in.pt", "in.safetensors"])
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_full_disk_or_an_interrupt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, name: str, interrupt: bool
) -> None:
    """A limit on the size of files fails in the same place as a full disk, in what torch and safetensors call."""
    weights = {"a.weight": torch.randn(500, 500)}
    torch.save(weights, tmp_path / "in.pt")
    save_file(weights, tmp_path / "in.safetensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if interrupt:
        monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        code = run("apply", tmp_path / name, tmp_path / f"out{Path(name).suffix}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == (130 if interrupt else 2) and capsys.readouterr().err.count("\n") == 1
    assert files_in(tmp_path) == {"in.pt", "in.safetensors"}


@pytest.mark.parametrize("name", ["old.safetensors", "old.pt"])
def test_outputs_are_checked_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, name: str
) -> None:
    source, other = tmp_path / name, tmp_path / f"other{Path(name).suffix}"
    for path in (source, other):
        (save_file if path.suffix == ".safetensors" else torch.save)(WEIGHTS, path)
    (tmp_path / f"link{source.suffix}").symlink_to("nowhere")
    contents = {path: path.read_bytes() for path in (source, other)}
    monkeypatch.setattr(
        "fire_core.checkpoints.treat.project", lambda *arguments, **settings: pytest.fail("work")
    )
    for output, said in (
        (source, "not overwritten"),
        (other, "not overwritten"),
        (tmp_path / f"link{source.suffix}", "not overwritten"),
        (tmp_path / "new.bin", f"should end in '{source.suffix}'"),
        (source / f"new{source.suffix}", "no folder for"),
    ):
        assert said in fails(capsys, "apply", source, output)
    assert {path: path.read_bytes() for path in contents} == contents


def test_weights_that_are_not_finite_are_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    save_file({**WEIGHTS, "c.weight": torch.full((3, 3), torch.nan)}, tmp_path / "in.safetensors")
    assert "c.weight" in fails(capsys, "apply", tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert files_in(tmp_path) == {"in.safetensors"}


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["targets", "torch.nn:Linear"], "needs no arguments"),
        (["inspect", "x.safetensors", "--model", ".a:x"], "cannot be built"),
        (["inspect", "a" * 5000], "name too long"),
        (["inspect", "x.safetensors", "--key", "model"], "'model' is for torch files"),
    ],
)
def test_wrong_arguments_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: list, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(WEIGHTS, "x.safetensors")
    assert said in fails(capsys, *arguments)
