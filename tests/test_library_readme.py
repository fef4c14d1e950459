"""The recipes of fire_core/README.md run, and its table of architectures is what the command prints."""

import contextlib
import importlib
import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from fire_core.checkpoints.command_line import main
from fire_core.targets.rules import PRESETS

FOLDER = Path(__file__).parents[1] / "fire_core"
README = (FOLDER / "README.md").read_text()


def section(title: str) -> str:
    """The Python blocks under a heading, up to the next one."""
    text = re.split(r"^#+ ", README, flags=re.MULTILINE)
    (body,) = [part for part in text if part.startswith(f"{title}\n")]
    return "\n".join(re.findall(r"```python\n(.*?)```", body, re.DOTALL))


def surroundings() -> dict:
    """The names that the recipes take for granted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    copy = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(8, 2, 4), torch.randint(3, (8,)))
    trained: list[int] = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, dataset: torch.utils.data.Dataset) -> None:
        inputs, labels = zip(*(dataset[i] for i in range(len(dataset))))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.stack(inputs)), torch.stack(labels)).backward()
        optimizer.step()
        trained.append(len(dataset))

    def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
        train(model, optimizer, data)
        return [(step, 1.0) for step in range(10)]

    return {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "datasets": [data, data, data],
        "dataset": data,
        "fixed_batch": data.tensors[0],
        "initial": {name: value.clone() for name, value in model.state_dict().items()},
        "train": train,
        "training": training,
        "trained": trained,
        "q_network": model,
        "target_network": copy,
        "total_steps": 4,
        "interact_and_learn": lambda step: train(model, optimizer, data),
        "critics": SimpleNamespace(),
    }


def run(title: str) -> dict:
    names = surroundings()
    exec(compile(section(title), title, "exec"), names)
    return names


SIMPLE = [
    "fire-core",
    "Which matrices",
    "When something says so",
    "The projection itself",
    "Rivals and controls",
]
OTHERS = [
    *(
        "Dormant units, measured and recycled",
        "What stale moments do",
        "Continual fine-tuning, old data kept",
    ),
    *("Midpoint reset in reinforcement learning", "DDP", "FSDP2", "Lightning", "transformers"),
]


def test_every_code_block_is_run() -> None:
    parts = re.split(r"^#+ ", README, flags=re.MULTILINE)
    assert {part.split("\n")[0] for part in parts if "```python" in part} == {*SIMPLE, *OTHERS}


@pytest.mark.parametrize("title", SIMPLE)
def test_recipe_runs(title: str, capsys: pytest.CaptureFixture) -> None:
    run(title)


def test_units_recipe_measures_every_hidden_layer() -> None:
    names = run("Dormant units, measured and recycled")
    assert names["layers"] and all(
        len(names["scores"][layer.name]) == layer.units for layer in names["layers"]
    )


def test_stale_moments_recipe_gives_the_loss_it_names() -> None:
    losses = run("What stale moments do")["losses"]
    assert losses["clear"] == 0.0
    assert f"to a loss of {losses['keep']:.1f};" in README


def test_continual_recipe() -> None:
    names = run("Continual fine-tuning, old data kept")
    assert names["trained"] == [8, 16, 24]


def test_midpoint_recipe_resets_the_dense_layers_and_the_target_network() -> None:
    names = surroundings()
    code = section("Midpoint reset in reinforcement learning").replace(
        "interact_and_learn(step)", "seen(step)"
    )
    first = names["model"][2].weight.detach().clone()
    conv = names["model"][0].weight.detach().clone()
    steps: list[int] = []

    def seen(step: int) -> None:
        steps.append(step)
        if step == 1:
            names["interact_and_learn"](step)
            assert not torch.equal(names["model"][2].weight, first)

    exec(code, {**names, "seen": seen})
    assert steps == [0, 1, 2, 3]
    assert torch.equal(names["model"][2].weight, first) and not torch.equal(names["model"][0].weight, conv)
    for name, value in names["target_network"].state_dict().items():
        assert torch.equal(value, names["model"].state_dict()[name])


@pytest.mark.parametrize("title", ["DDP", "FSDP2"])
def test_parallel_recipes(title: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert run(title)["trained"] == [8, 8]
    finally:
        dist.destroy_process_group()


@pytest.mark.reference
@pytest.mark.parametrize("title", ["Lightning", "transformers"])
def test_framework_recipes(title: str, tmp_path: Path) -> None:
    import tests.architectures  # noqa: F401  (lets a broken torchvision import)

    names = surroundings()
    names[title.lower()] = pytest.importorskip(title.lower())
    pytest.importorskip("accelerate")
    if title == "Lightning":
        importlib.import_module("lightning.pytorch")
    else:
        names["arguments"] = names["transformers"].TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[]
        )
    exec(compile(section(title), title, "exec"), names)
    trainer = names["trainer"]
    callbacks = trainer.callbacks if title == "Lightning" else trainer.callback_handler.callbacks
    assert names["callback"] in callbacks


def test_the_rules_named_are_the_rules_that_exist() -> None:
    for preset in PRESETS:
        assert f'`"{preset}"`' in README or f'"{preset}"' in README, preset


@pytest.mark.reference
def test_the_table_of_architectures_is_what_the_command_prints() -> None:
    from tests.architectures import ALL

    pytest.importorskip("transformers")
    pytest.importorskip("timm")

    text = (FOLDER / "ARCHITECTURES.md").read_text()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["targets", "--markdown", *(f"tests.architectures:{name}" for name in ALL)]) == 0
    table = text.partition("<!-- table -->\n")[2]
    assert table == printed.getvalue(), "print it again with the command in ARCHITECTURES.md"
