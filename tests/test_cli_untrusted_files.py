"""Checkpoints that are damaged, crafted or odd: one clear line or the right numbers, never a traceback or a leak."""

import json
import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fire_core.checkpoints.apply import apply
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


def rewritten(source: Path, target: Path, compression: int, cut: str = "") -> None:
    """The archive with another compression, and the record `cut` short by half."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for record in old.namelist():
            content = old.read(record)
            new.writestr(record, content[: len(content) // 2] if cut and record.endswith(cut) else content)


def test_a_deflated_torch_file_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "plain.pt")
    rewritten(tmp_path / "plain.pt", tmp_path / "in.pt", zipfile.ZIP_DEFLATED)
    assert run("apply", tmp_path / "in.pt", tmp_path / "out.pt", "--scale=none", "--solver=exact") == 0
    result = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(result["a.weight"], polar(WEIGHTS["a.weight"]).factor)


def test_a_record_that_was_cut_short_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    torch.save(WEIGHTS, tmp_path / "plain.pt")
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        rewritten(tmp_path / "plain.pt", tmp_path / "in.pt", compression, cut="data/0")
        error = fails(capsys, "apply", tmp_path / "in.pt", tmp_path / "out.pt")
        assert "record data/0 holds 48 bytes where its tensor needs 96" in error
    assert files_in(tmp_path) == {"plain.pt", "in.pt"}


def test_apply_copies_nothing_that_a_link_leads_to(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = folder_of(tmp_path)
    (tmp_path / "private").mkdir()
    (tmp_path / "private/key").write_text("secret")
    (folder / "notes.txt").write_text("kept")
    (folder / "up").symlink_to(tmp_path)
    (folder / "key").symlink_to(tmp_path / "private/key")
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    (folder / "same").symlink_to("notes.txt")
    os.mkfifo(folder / "pipe")
    assert run("apply", folder, tmp_path / "new") == 0
    assert files_in(tmp_path / "new") == {"model.safetensors", "notes.txt", "same"}
    said = capsys.readouterr().out
    assert all(name in said for name in ("up", "key", "dangling", "pipe"))


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
    for name in ("checkpoint-5/model.safetensors", "onnx/model.onnx", ".git/objects", "vocabulary/words.txt"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b"old")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    (folder / "checkpoint-5/trainer_state.json").write_text("{}")
    assert run("apply", folder, tmp_path / "new") == 0
    kept = {"model.safetensors", "checkpoint-5/trainer_state.json", "vocabulary/words.txt"}
    assert files_in(tmp_path / "new") == kept
    said = capsys.readouterr().out
    assert "may contain old weights" in said and "checkpoint-5/model.safetensors" in said


def test_the_output_may_not_lie_inside_the_input(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = folder_of(tmp_path)
    assert "lies inside" in fails(capsys, "apply", folder, folder / "new")


NESTED = '{"weight_map": ' + "[" * 200_000 + "]" * 200_000 + "}"


@pytest.mark.parametrize(
    "text", ['{"weight_map": {"a": null}}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}', NESTED]
)
def test_an_index_with_odd_values_is_named(tmp_path: Path, text: str, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "is not an index of shards" in fails(capsys, "inspect", tmp_path)


def test_pipes_and_dangling_links_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in fails(capsys, "inspect", tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "does not exist" in fails(capsys, "inspect", tmp_path / "link")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "pipe"}}')
    assert "not files of the folder" in fails(capsys, "inspect", tmp_path)


def test_names_that_steer_the_terminal_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    crafted = {"a\x1b[2J.weight": torch.eye(3)}
    save_file(crafted, tmp_path / "in.safetensors")
    torch.save(crafted, tmp_path / "in.pt")
    for name in ("in.safetensors", "in.pt"):
        for command in ("inspect", "targets"):
            error = fails(capsys, command, tmp_path / name)
            assert "\x1b" not in error and "cannot be printed" in error
    folder = folder_of(tmp_path)
    (folder / "b\x1b[2J.bin").write_bytes(b"")
    assert run("apply", folder, tmp_path / "new") == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tensor", "said"),
    [(torch.eye(4).to_sparse(), "is sparse"), (torch.empty(4, 4, device="meta"), "on the meta")],
)
def test_tensors_without_dense_values_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, tensor: torch.Tensor, said: str
) -> None:
    torch.save({**WEIGHTS, "c.weight": tensor}, tmp_path / "in.pt")
    assert said in fails(capsys, "inspect", tmp_path / "in.pt")
    assert said in fails(capsys, "apply", tmp_path / "in.pt", tmp_path / "out.pt")


def test_a_header_that_promises_too_much_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "in.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "cannot be read as safetensors" in fails(capsys, "inspect", tmp_path / "in.safetensors")


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


def test_tolerance_can_be_given(tmp_path: Path) -> None:
    matrix = torch.randn(40, 40, generator=torch.Generator().manual_seed(1))
    save_file({"a.weight": matrix}, tmp_path / "in.safetensors")
    for tolerance in ("1e-4", "1e-9"):
        out, report = tmp_path / f"{tolerance}.safetensors", tmp_path / f"{tolerance}.json"
        options = ["--solver=exact", "--scale=none", f"--tolerance={tolerance}", f"--report={report}"]
        assert run("apply", tmp_path / "in.safetensors", out, *options) == 0
        expected = polar(matrix, tolerance=float(tolerance))
        assert torch.equal(load_file(out)["a.weight"], expected.factor)
        assert json.loads(report.read_text())["rows"][0]["iterations"] == int(expected.iterations)


def test_methods_are_listed(capsys: pytest.CaptureFixture) -> None:
    assert run("methods", "shrink*", "redo") == 0
    said = capsys.readouterr().out
    assert (
        "shrink_perturb  weighted mean" in said and "redo" in said and "variants: published, official" in said
    )
    assert "full_reset" not in said


def test_the_options_of_apply_are_the_settings_of_fire(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "in.safetensors")
    apply(tmp_path / "in.safetensors", tmp_path / "plain.safetensors")
    assert run("apply", tmp_path / "in.safetensors", tmp_path / "default.safetensors") == 0
    assert (tmp_path / "plain.safetensors").read_bytes() == (tmp_path / "default.safetensors").read_bytes()
    options = ["--solver=quintic", "--iterations=5", "--scale=none"]
    assert run("apply", tmp_path / "in.safetensors", tmp_path / "five.safetensors", *options) == 0
    expected = polar(WEIGHTS["a.weight"], "quintic", iterations=5).factor
    assert torch.equal(load_file(tmp_path / "five.safetensors")["a.weight"], expected)
