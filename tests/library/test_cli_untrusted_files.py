"""Checkpoints that are damaged, crafted or odd: one clear line or the right numbers, never a traceback or a leak."""

import os
import resource
import struct
from functools import partial
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


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def saved(content: object):
    return partial(write, content)


def write(content: object, path: Path) -> None:
    """A file of either kind."""
    (save_file if path.suffix == ".safetensors" else torch.save)(content, path)


def flipped_bit(path: Path) -> None:
    torch.save(WEIGHTS, path)
    content = bytearray(path.read_bytes())
    content[content.index(WEIGHTS["b.weight"].numpy().tobytes()) + 5] ^= 16
    path.write_bytes(content)
    torch.load(path, weights_only=True)  # torch sees nothing


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
        ("x", os.mkfifo, "is neither a file of weights nor a folder"),
        ("x.pt", saved({"model": torch.nn.Linear(3, 3)}), "cannot be read safely"),  # code
        ("x.pt", saved({**WEIGHTS, "c.weight": SPARSE}), "is sparse"),
        ("x.pt", saved({**WEIGHTS, "c.weight": META}), "on the meta"),
        ("x.pt", flipped_bit, "checksum"),
        ("x.pt", saved({"a\x1b[2J.weight": torch.eye(3)}), "cannot be printed"),
        ("x.safetensors", saved({"a." * 3000 + "weight": torch.eye(3)}), "3000 levels deep"),
        ("x.safetensors", truncated, "cannot be read as safetensors"),
        ("x.safetensors", lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"), "as safetensors"),
        ("x", index(NESTED), "is not an index"),
        ("x", index('{"weight_map": {"a": "pipe"}}'), "not files of the folder"),
    ],
)
def test_sources_that_cannot_be_used_are_named_and_nothing_is_written(tmp_path, capsys, name, make, said):
    make(tmp_path / name)
    before = files_in(tmp_path)
    error = fails(capsys, "apply", tmp_path / name, tmp_path / f"new{Path(name).suffix}")
    assert said in error and "\x1b" not in error
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("name", ["in.pt", "in.safetensors"])
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_full_disk_or_an_interrupt_leaves_nothing(tmp_path, monkeypatch, capsys, name, interrupt):
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
def test_outputs_are_checked_before_any_work(tmp_path, monkeypatch, capsys, name):
    source, other = tmp_path / name, tmp_path / f"other{Path(name).suffix}"
    for path in (source, other):
        write(WEIGHTS, path)
    (tmp_path / f"link{source.suffix}").symlink_to("nowhere")
    contents = {path: path.read_bytes() for path in (source, other)}
    monkeypatch.setattr("fire_core.checkpoints.treat.project", lambda *_, **__: pytest.fail("work"))
    for output, said in (
        (source, "not overwritten"),
        (other, "not overwritten"),
        (tmp_path / f"link{source.suffix}", "not overwritten"),
        (tmp_path / "new.bin", f"should end in '{source.suffix}'"),
        (source / f"new{source.suffix}", "File exists"),
    ):
        assert said in fails(capsys, "apply", source, output)
    assert {path: path.read_bytes() for path in contents} == contents
