"""The documentation holds: its code runs, its commands and links exist, its tables are what commands print."""

import dataclasses
import importlib
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import fire_core.methods
from analysis import paper
from fire_core import State, UserError, attach, fire, trial, triggers
from fire_core.checkpoints.command_line import main
from fire_core.methods import create
from fire_core.targets.table import PRESETS
from harness import campaign
from harness.config import content_of, options
from tests.architectures import show  # its import makes that of torchvision possible

ROOT = Path(__file__).resolve().parents[2]
CONCEPTS, HOW_TO = ROOT / "docs/concepts", ROOT / "docs/how-to"
PAGES = [ROOT / "README.md", ROOT / "fire_core/README.md", *ROOT.glob("docs/**/*.md")]
LINKED = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("[alrv]*/**/README.md")]
# pages that need or promise more than others: each has a test of its own
SPECIAL = {HOW_TO / f"{name}.md" for name in ("add_a_method", "parallel", "lightning", "transformers")}
SPECIAL |= {ROOT / "README.md", CONCEPTS / "optimizer.md", HOW_TO / "reinforcement_learning.md"}


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def surroundings() -> dict:
    """The names that the pages take for granted."""
    torch.manual_seed(0)
    model, target = (
        nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        for _ in range(2)
    )
    optimizer = torch.optim.Adam(model.parameters())
    data, trained = TensorDataset(torch.randn(8, 2, 4), torch.randint(3, (8,))), []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, dataset: Dataset) -> float:
        inputs, labels = default_collate([dataset[i] for i in range(len(dataset))])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        trained.append(len(dataset))
        return loss.item()

    def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
        train(model, optimizer, data)
        return [(step, 1.0) for step in range(10)]

    names = {"torch": torch, "model": model, "optimizer": optimizer, "train": train, "trained": trained}
    names |= {"q_network": model, "target_network": target, "critics": SimpleNamespace(), "total_steps": 4}
    names |= {"datasets": [data] * 3, "dataset": data, "loader": [data.tensors], "training": training}
    names |= dict.fromkeys(("fixed_batch", "batch"), data.tensors[0]) | {"batches": [data.tensors[0]]}
    return names | {
        "train_with_a_new_trainer": lambda model, dataset: train(model, optimizer, dataset),
        "initial": {name: value.clone() for name, value in model.state_dict().items()},
        "step": lambda model, optimizer, batch: train(model, optimizer, data),
        "interact_and_learn": lambda step: train(model, optimizer, data),
    }


def run(page: Path, only: str = "", **names: object) -> dict:
    """Execute the Python blocks of a page in order, in one namespace; `only`: those that contain this text."""
    known = {**surroundings(), **names}
    for block in blocks(page, "python"):
        if only in block:
            exec(compile(block, page.name, "exec"), known)
    return known


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p not in SPECIAL and blocks(p, "python")], ids=lambda page: page.stem
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = {"continual": [8, 16, 24], "phase_boundaries": [8, 8, 8]}.get(page.stem)
    assert run(page)["trained"] == trained or trained is None


def test_the_site_has_every_page():
    listed = re.findall("^/(.+)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    assert {f"docs/{path.parent.name}/{path.stem}" for path in (ROOT / "docs").glob("*/*.md")} <= {*listed}
    assert all([*ROOT.glob(f"{page}.*")] for page in listed)


def test_the_report_in_the_readme_is_that_of_a_new_mlp():
    torch.manual_seed(0)
    report = fire(nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)))
    printed = {line.split()[0]: line.split() for line in str(report).splitlines()}
    (shown,) = [block for block in blocks(ROOT / "README.md", "") if block.startswith("target")]
    for line in shown.splitlines():
        words = iter(printed[line.split()[0]])  # the columns that are shown come in the order of the report
        assert all(any(same(word, other) for other in words) for word in line.split()), line


def same(word: str, other: str) -> bool:
    """Equal, or numbers that differ by rounding."""
    try:
        return float(word) == pytest.approx(float(other), rel=0.02, abs=1e-6)
    except ValueError:
        return word == other


def test_stale_moments_push_the_weight_as_far_as_the_page_says():
    losses = run(page := CONCEPTS / "optimizer.md")["losses"]
    assert losses["clear"] == 0.0 and f"to a loss of {losses['keep']:.1f};" in page.read_text()


def test_a_trigger_for_phases_fires_once_at_each_boundary_and_remembers_the_last_phase():
    trigger = run(HOW_TO / "phase_boundaries.md", only="class NewPhase")["NewPhase"]([3, 5])
    assert [i for i, step in enumerate([0, 1, 2, 3, 3, 4, 5, 5, 6]) if trigger(step)] == [3, 6]
    assert trigger.state_dict() == {"last": 2}


def test_the_midpoint_resets_the_dense_layers_and_the_target_network():
    names = surroundings()
    model, train = names["model"], names["interact_and_learn"]
    dense, as_at_the_start = model[2].weight.detach().clone(), []

    def learn(step):
        if step < 2:  # the midpoint comes before the step after these
            train(step)
        as_at_the_start.append(torch.equal(model[2].weight, dense))

    run(HOW_TO / "reinforcement_learning.md", **names | {"interact_and_learn": learn})
    assert as_at_the_start == [False, False, True, True]
    assert all(map(torch.equal, names["target_network"].parameters(), model.parameters()))


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "fully_shard"])
def test_parallel_recipes(kind, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert run(HOW_TO / "parallel.md", only=kind)["trained"] == [8, 8]
    finally:
        dist.destroy_process_group()


@pytest.mark.reference
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_framework_recipes(name, tmp_path):
    library = pytest.importorskip("lightning.pytorch" if name == "lightning" else name)
    pytest.importorskip("accelerate")
    more = {}
    if name == "transformers":
        more["arguments"] = library.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    names = run(HOW_TO / f"{name}.md", **more)
    trainer = names["trainer"]
    assert names["callback"] in getattr(trainer, "callback_handler", trainer).callbacks


def test_the_example_method_does_what_the_page_says_and_keeps_the_contract(monkeypatch, tmp_path):
    registry = fire_core.methods.method.registry
    monkeypatch.setitem(registry, ("shrink", "published"), None)  # which removes it in the end
    del registry["shrink", "published"]
    page = HOW_TO / "add_a_method.md"
    names = run(page, __name__="fire_core.methods.shrink")
    model = names["model"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = attach(create("shrink", factor=0.6), model, names["optimizer"]).boundary(1)
    assert {row.name: row.action for row in report.treated()}["net.4.weight"] == "shrunk"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] * (0.6 if name.endswith("weight") else 1.0)), name
    with pytest.raises(UserError, match=r"factor=2\.0"):
        create("shrink", factor=2.0)
    code = blocks(page, "python")[0]  # `fire_core.methods` imports it, so it cannot import that
    assert "fire_core.methods.method" in code and not re.search(r"from fire_core(\.methods)? import", code)
    contract = importlib.import_module("library.test_method_contract")
    monkeypatch.setitem(contract.CASES, "shrink", ("shrink", {}))
    plain = contract.Training().all_phases().everything()
    contract.test_changes_something_and_leaves_the_random_stream_alone("shrink", plain)
    contract.test_turned_off_it_changes_nothing("shrink", plain)
    contract.test_resumes_and_needs_every_key_of_its_state("shrink", tmp_path)
    contract.test_a_step_that_overflows_leaves_no_trace("shrink")


def test_checkpoint_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file({"fc.weight": torch.randn(8, 6), "lm_head.weight": torch.randn(3, 8)}, "model.safetensors")
    (script,) = blocks(HOW_TO / "checkpoints.md", "bash")
    for line in script.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "fire-core" and main(arguments) == 0, line
    assert (tmp_path / "fired.safetensors").exists()


def test_make_targets_and_scripts_that_are_named_exist():
    targets, scripts = {}, 0
    for page in LINKED:
        for line in "\n".join(blocks(page, "bash") + blocks(page, "")).splitlines():
            words, place = line.partition("#")[0].split(), f"{page}: {line}"
            if words[:1] == ["make"]:
                targets[words[1]] = place
            elif words[:1] == ["python"] and words[1].endswith(".py"):
                scripts += 1
                assert (ROOT / words[1]).exists(), place
                for kind, values in re.findall(r" (experiment|method)=([\w,]+)(?= |$)", " ".join(words)):
                    assert set(values.split(",")) <= {*options(kind), "shrink"}, place
    assert scripts > 20 and len(targets) > 3
    for target, place in targets.items():
        assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True).returncode == 0, place


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.reference
def test_the_table_of_architectures_is_what_the_command_prints(capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("timm")
    show()
    text, printed = (CONCEPTS / "architectures.md").read_text(), capsys.readouterr().out
    assert text.endswith(f"```text\n{printed}```\n"), "rerun the command at the top of the page"


def test_the_commands_of_the_campaign_page_are_understood():
    lines = "\n".join(blocks(HOW_TO / "run_a_campaign.md", "bash")).splitlines()
    commands = [shlex.split(line.partition("#")[0]) for line in lines if line.startswith("python")]
    for words in commands:
        assert words[:3] == ["python", "-m", "harness.campaign"]
        assert (ROOT / f"conf/campaign/{words[3]}.yaml").exists()
        campaign.load("smoke", [word for word in words[4:] if "=" in word])
    assert len(commands) > 4


@pytest.mark.parametrize("figure", ["fig2", "fig3", "fig4a", "fig4b"])
def test_the_readme_gives_the_minutes_of_the_papers_panels(figure):
    minutes = [content_of(name).get("minutes", {}) for name in paper.panels() if name.startswith(figure)]
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if f"| `{figure}" in line)
    for size, told in zip(("small", "medium"), row.split("|")[-3:-1], strict=True):
        values = [each[size] for each in minutes if size in each]
        assert [float(number) for number in told.split(" to ")] == sorted({min(values), max(values)})


def test_the_readme_gives_the_size_of_the_papers_campaign(tmp_path):
    planned = campaign.plan("paper", [f"run.root={tmp_path}"])
    computed = re.search(r"paper: (\d+) runs left, .* hours, ([\d.]+) if one at a time", planned)
    written = re.search(r"(\d+) runs, about ([\d,]+) hours", (ROOT / "README.md").read_text())
    assert computed and written
    assert written.groups() == (computed[1], f"{round(float(computed[2]), -2):,.0f}")


def test_the_code_of_the_readme_runs_and_a_trial_takes_its_method(monkeypatch) -> None:
    monkeypatch.setattr(fire_core, "trial", lambda *args, **given: trial(*args, **given | {"steps": 10}))
    known = run(ROOT / "README.md")
    given = {"methods": ["fire", known["Spare"]()], "initial": known["initial"], "batches": range(20)}
    result = fire_core.trial(known["model"], known["optimizer"], known["step"], **given)
    assert result.scores["spare"] != result.scores["none"]


def test_pages_name_all_that_there_is() -> None:
    targets, kinds = ((CONCEPTS / f"{page}.md").read_text() for page in ("targets", "triggers"))
    assert PRESETS and all(f'`"{preset}"`' in targets for preset in PRESETS)
    classes = triggers.Trigger.__subclasses__()
    ours = [kind.__name__ for kind in classes if kind.__module__ == triggers.__name__]
    assert ours and all(f"`{name}(" in kinds for name in ours)
    (shown,) = re.findall(r"fire_core\.State\((.*)\)", (ROOT / "docs/api/methods.md").read_text())
    assert shown.split(", ") == [field.name for field in dataclasses.fields(State)]
