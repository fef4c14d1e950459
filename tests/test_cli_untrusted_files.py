"""Checkpoints that are damaged, crafted or odd: one clear line or the right numbers, never a traceback or a leak."""

import json
import os
import resource
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def test_a_compressed_torch_file_is_refused_before_it_is_unpacked(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """400 MB of zeros in a file of 389 kB: torch would read all of them before it refuses."""
    archive = zipfile.ZipFile(tmp_path / "in.pt", "w", zipfile.ZIP_DEFLATED)
    with archive, archive.open("in/data.pkl", "w") as record:
        for _ in range(400):
            record.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "is compressed" in fails(capsys, "inspect", tmp_path / "in.pt")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kB"


@pytest.mark.parametrize("command", ["inspect", "targets", "apply"])
def test_a_flipped_bit_in_a_torch_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, command: str
) -> None:
    torch.save(WEIGHTS, tmp_path / "in.pt")
    content = bytearray((tmp_path / "in.pt").read_bytes())
    content[content.index(WEIGHTS["b.weight"].numpy().tobytes()) + 5] ^= 16
    (tmp_path / "in.pt").write_bytes(content)
    torch.load(tmp_path / "in.pt", weights_only=True)  # torch sees nothing
    arguments = [command, tmp_path / "in.pt"] + [tmp_path / "out.pt"] * (command == "apply")
    assert "record 'in/data/1' does not have its checksum" in fails(capsys, *arguments)
    assert files_in(tmp_path) == {"in.pt"}


def test_an_archive_without_its_pickle_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with zipfile.ZipFile(tmp_path / "in.pt", "w") as archive:
        archive.writestr("in/data/0", bytes(96))
    assert "cannot be read safely" in fails(capsys, "inspect", tmp_path / "in.pt")


def test_names_that_are_nested_too_deep_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_file({"a." * 3000 + "weight": torch.eye(3)}, tmp_path / "in.safetensors")
    assert "3000 levels deep" in fails(capsys, "inspect", tmp_path / "in.safetensors")


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


def test_an_index_is_not_a_checkpoint_and_must_fit_its_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    save_file(WEIGHTS, tmp_path / "1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*WEIGHTS, "c.weight"], "1.safetensors")}))
    assert f"name its folder, '{tmp_path}'" in fails(capsys, "inspect", index)
    assert "lacks tensors that its index names (c.weight)" in fails(capsys, "inspect", tmp_path)


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
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot be read" in fails(capsys, "inspect", tmp_path / "loop")
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
    [
        (torch.eye(4).to_sparse(), "is sparse"),
        (torch.nested.nested_tensor([torch.ones(2, 3)]), "or nested"),
        (torch.empty(4, 4, device="meta"), "on the meta"),
    ],
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
    assert "shrink_perturb  weighted mean" in said and "redo" in said
    assert "full_reset" not in said


def test_a_dry_run_reports_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_file(WEIGHTS, tmp_path / "in.safetensors")
    assert run("apply", tmp_path / "in.safetensors", "--dry-run") == 0
    dry = capsys.readouterr().out
    assert run("apply", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--dry-run") == 0
    assert files_in(tmp_path) == {"in.safetensors"} and "2 targets would change" in dry
    assert run("apply", tmp_path / "in.safetensors", tmp_path / "out.safetensors") == 0
    written = capsys.readouterr().out.splitlines()
    assert [line for line in dry.splitlines()[:3] if line in written] == dry.splitlines()[:3], (
        "the same figures"
    )


def test_the_options_of_apply_are_the_settings_of_fire(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "in.safetensors")
    assert run("apply", tmp_path / "in.safetensors", tmp_path / "default.safetensors") == 0
    published = polar(WEIGHTS["a.weight"], "newton_schulz", iterations=10).factor * 1.5**0.5
    assert torch.allclose(load_file(tmp_path / "default.safetensors")["a.weight"], published, atol=1e-6)
    options = ["--solver=quintic", "--iterations=5", "--scale=none"]
    assert run("apply", tmp_path / "in.safetensors", tmp_path / "five.safetensors", *options) == 0
    expected = polar(WEIGHTS["a.weight"], "quintic", iterations=5).factor
    assert torch.equal(load_file(tmp_path / "five.safetensors")["a.weight"], expected)
