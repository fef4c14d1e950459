"""inspect, apply and targets on files: the same numbers as in memory, nothing overwritten, nothing unsafe read."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fire_core import Report, UserError, fire
from fire_core.checkpoints.command_line import main
from fire_core.checkpoints.files import Shard, open_checkpoint
from fire_core.checkpoints.inspect import spectra
from fire_core.checkpoints.targets import targets_of
from fire_core.checkpoints.treat import treat_file


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
    return main([str(argument) for argument in arguments])


def treat(source: Path, output: Path, targets: str = "all", **options: object) -> Report:
    checkpoint = open_checkpoint(source)
    return treat_file(checkpoint, targets_of(checkpoint, targets)[0], output, **options)


def assert_same(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


def test_apply_on_safetensors_equals_fire_in_memory(tmp_path: Path, net: Net) -> None:
    save_file(net.state_dict(), tmp_path / "in.safetensors", {"format": "pt", "note": "kept"})
    before = (tmp_path / "in.safetensors").read_bytes()
    assert run("apply", tmp_path / "in.safetensors", "--targets=-head", tmp_path / "out.safetensors") == 0
    fire(net, targets="-head")
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
    result = torch.load(tmp_path / "out.pt", weights_only=True)
    old = torch.load(tmp_path / "in.pt", weights_only=True)
    assert torch.equal(old["model"]["fc.weight"], net.fc.weight), "the input file must stay as it was"
    fire(net, solver="exact")
    assert_same(result["model"], net.state_dict())
    assert result["epoch"] == 3 and len(result["optimizer"]["state"]) == len(old["optimizer"]["state"])


def test_apply_reads_the_entry_that_key_names(tmp_path: Path, net: Net) -> None:
    actor = {**net.state_dict(), "fused": torch.ones(6, 2)}
    torch.save({"agent": {"actor": actor}, "steps": 1}, tmp_path / "in.pt")
    checkpoint = open_checkpoint(tmp_path / "in.pt", "agent.actor")
    (unknown,) = (t for t in targets_of(checkpoint, model=f"{__name__}:Net")[0] if t.parameter == "fused")
    assert not unknown.included, "a tensor that the model does not have"
    assert run("apply", tmp_path / "in.pt", tmp_path / "out.pt") == 2
    assert run("apply", tmp_path / "in.pt", tmp_path / "out.pt", "--key", "agent.critic") == 2
    assert run("apply", tmp_path / "in.pt", tmp_path / "out.pt", "--key", "agent.actor") == 0
    torch.save({"model": net.state_dict(), "best_loss": torch.tensor(1.0)}, tmp_path / "nano.pt")
    assert_same(open_checkpoint(tmp_path / "nano.pt").shards[0].load()[0], net.state_dict())
    fire(net)
    written = torch.load(tmp_path / "out.pt", weights_only=True)["agent"]["actor"]
    assert torch.equal(written.pop("fused"), torch.ones(6, 2))
    assert_same(written, net.state_dict())


def test_a_sharded_folder_is_treated_shard_by_shard(
    tmp_path: Path, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two shards are alive at once: each is freed before the next one is read."""
    folder = tmp_path / "model"
    folder.mkdir()
    state = net.state_dict()
    weight_map = {name: f"{i // 2}.safetensors" for i, name in enumerate(state)}
    members = {file: {n: state[n] for n in state if weight_map[n] == file} for file in weight_map.values()}
    for file, tensors in members.items():
        save_file(tensors, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "tokenizer.json").write_text("{}")
    alive: list[list[weakref.ref]] = []
    most = 0
    load = Shard.load

    def counted(shard: Shard) -> tuple:
        nonlocal most
        gc.collect()
        most = max(most, sum(any(ref() is not None for ref in refs) for refs in alive))
        tensors, content = load(shard)
        alive.append([weakref.ref(tensor) for tensor in tensors.values()])
        return tensors, content

    monkeypatch.setattr(Shard, "load", counted)
    assert run("apply", folder, tmp_path / "new") == 0
    assert len(alive) == 2 * len(members) and most <= 1, "names first, then values"
    assert {path.name for path in (tmp_path / "new").iterdir()} == {path.name for path in folder.iterdir()}
    fire(net)
    for file, tensors in members.items():
        assert_same(load_file(tmp_path / "new" / file), tensors)


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
    head, row, last = capsys.readouterr().out.splitlines()
    assert head.split() == list(found)
    assert row.split() == f"fc.weight 4x4 2.5 2 1 0.5 4 {found['effective_rank']:.3g} 9.56".split()
    assert "1 matrices; targets from names and shapes" in last


def test_inspect_shows_broken_weights(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    weights = {
        "a.weight": torch.full((2, 2), torch.nan),
        "b.weight": torch.zeros(2, 2),
        "c.weight": torch.eye(2),
    }
    save_file(weights, tmp_path / "in.safetensors")
    assert run("inspect", tmp_path / "in.safetensors") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert [row[2] for row in rows] == ["nan", "0", "1.41"]
    assert set(rows[0][2:]) == {"nan"}


def test_a_file_alone_cannot_split_a_fused_layer_but_a_model_can(tmp_path: Path) -> None:
    model = Tied()
    state = model.state_dict()
    del state["lm_head.weight"]
    save_file(state, tmp_path / "in.safetensors")
    source = tmp_path / "in.safetensors"
    assert run("apply", source, tmp_path / "plain") == 2, "the fused layer and the embedding are out"
    assert run("apply", source, tmp_path / "out.safetensors", "--model", "test_cli:Tied") == 0
    fire(model)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["wte.weight"], model.wte.weight)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["c_attn.weight"], model.c_attn.weight)


def test_tied_weights_of_a_torch_file_are_projected_once(tmp_path: Path) -> None:
    model = Tied()
    torch.save(model.state_dict(), tmp_path / "in.pt")
    report = treat(tmp_path / "in.pt", tmp_path / "out.pt", "lm_head")
    assert len(report.treated()) == 1
    result = torch.load(tmp_path / "out.pt", weights_only=True)
    assert result["lm_head.weight"].data_ptr() == result["wte.weight"].data_ptr()
    copied = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(copied, tmp_path / "copies.pt")
    checkpoint = open_checkpoint(tmp_path / "copies.pt")
    treat_file(checkpoint, targets_of(checkpoint, "lm_head", f"{__name__}:Tied")[0], tmp_path / "both.pt")
    both = torch.load(tmp_path / "both.pt", weights_only=True)
    fire(model, targets="lm_head")
    for found in (result["wte.weight"], both["wte.weight"], both["lm_head.weight"]):
        assert torch.equal(found, model.wte.weight)
    torch.save(copied | {"wte.weight": torch.ones(12, 6)}, tmp_path / "copies.pt")
    with pytest.raises(UserError, match="tied in the model, but differ"):
        treat_file(
            checkpoint, targets_of(checkpoint, "lm_head", f"{__name__}:Tied")[0], tmp_path / "other.pt"
        )


LAYERS = [f"model.layers.{i}.{name}.weight" for i in range(2) for name in ("mlp.up_proj", "self_attn.q_proj")]


@pytest.mark.parametrize(
    "names, heads",
    [
        (["lm_head.weight", "model.embed_tokens.weight", *LAYERS], ["lm_head.weight"]),
        (["classifier.0.weight", "classifier.10.weight", "classifier.6.weight"], ["classifier.10.weight"]),
        (["fc.weight", "head.fc.weight", "head_dist.weight"], ["head.fc.weight", "head_dist.weight"]),
        (["body.0.weight", "module.fc.weight"], ["module.fc.weight"]),
        (["fc.weight", "policy.weight"], []),
        (["model.embed_tokens.weight", *LAYERS], []),
    ],
)
def test_heads_of_a_file_are_told_by_name_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture, names: list[str], heads: list[str]
) -> None:
    source = tmp_path / "in.safetensors"
    save_file({name: torch.randn(4, 3) for name in names}, source)
    if heads:
        table, _ = targets_of(open_checkpoint(source), "head")
        assert [target.name for target in table.included] == heads
        assert run("apply", source, tmp_path / "out.safetensors", "--targets", "no_head") in (0, 2)
    else:
        for rule in ("no_head", "head", "-head", "mlp,no_head"):
            assert run("apply", source, tmp_path / "out.safetensors", f"--targets={rule}") == 2
            assert "is certainly the output layer" in capsys.readouterr().err
    old, new = load_file(source), tmp_path / "out.safetensors"
    changed = {
        n for n, value in (load_file(new) if new.exists() else old).items() if not torch.equal(value, old[n])
    }
    assert not changed & set(heads) and (changed or not new.exists())


def test_targets_command_prints_models_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture, net: Net
) -> None:
    save_file(net.state_dict(), tmp_path / "in.safetensors")
    assert run("targets", tmp_path / "in.safetensors", "--targets", "conv") == 0
    assert "9 matrices with 216 weights are in; 4 biases" in capsys.readouterr().out
    assert run("targets", "test_cli:Tied") == 0
    assert "in  c_attn.weight   q, k, v         3  6x6" in capsys.readouterr().out
    assert run("targets", "nosuch.module:thing") == 2


def test_outputs_are_checked_before_any_work(tmp_path: Path, net: Net, capsys: pytest.CaptureFixture) -> None:
    source, broken = (tmp_path / name for name in ("old.safetensors", "broken.pt"))
    save_file(net.state_dict(), source)
    torch.save({**net.state_dict(), "fc.weight": torch.full((16, 8), torch.nan)}, broken)
    contents = {path: path.read_bytes() for path in (source, broken)}
    for options, said in (
        (["apply", source, source], "not overwritten"),
        (["apply", broken, broken], "not overwritten"),
        (["apply", broken, tmp_path / "new.pt"], "fc.weight"),
        (["apply", source, tmp_path / "new.pt"], "should end in '.safetensors'"),
        (["apply", source, source / "new.safetensors"], "no folder for"),
        (["targets", "torch.nn:Linear"], "needs no arguments"),
        (["inspect", source, "--model", ".a:x"], "cannot be built"),
        (["inspect", tmp_path / ("a" * 5000)], "name too long"),
        (["inspect", source, "--key", "model"], "'model' is for torch files"),
    ):
        assert main([str(option) for option in options]) == 2
        assert said in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == contents
