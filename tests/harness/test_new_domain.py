"""A fifth domain in a folder of its own, with nothing of the suite edited: run, killed, resumed, swept, and in a table."""

import subprocess
import sys
from pathlib import Path

from training_scripts import Script, killed

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = """
from dataclasses import dataclass
from pathlib import Path

from harness.settings import Domain, Keys, group, key


@dataclass
class Noise:
    name: str = key("name of the data")
    points: int = key("points of each class", least=2)


@dataclass
class Toy(Keys):
    noise: Noise = group(Noise)
    steps: int = key("steps of each of the two phases", least=1)


DOMAIN = Domain(
    "toy", "toy/train.py", Toy, shown=("noise.name",), refuses={"cbp": "it is a toy"},
    conf=Path(__file__).resolve().parent / "conf",
)
"""
TRAIN = """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch.nn.functional import cross_entropy

from fire_core import Phase, State, snapshot
from fire_core.methods import create
from harness.launch import launch, open_run
from harness.runs import generator, seeded
from settings import DOMAIN


@launch(DOMAIN)
def train(cfg):
    method = create(**cfg.method)
    run = open_run(DOMAIN, cfg, method)
    if run.finished:
        return
    draw = generator(cfg.seed, "data")
    inputs, labels = torch.randn(2 * cfg.noise.points, 4, generator=draw), torch.arange(2).repeat(cfg.noise.points)
    with seeded(cfg.seed, "init"):
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    sgd = torch.optim.SGD(net.parameters(), lr=cfg.learning_rate)
    state = State({"net": net}, initial=snapshot({"net": net}), optimizers={"net": sgd})
    with run:
        step = 0
        if (saved := run.resume()) is not None:
            net.load_state_dict(saved["net"])
            step = saved["step"]
        for step in range(step, 2 * cfg.steps):
            if step == cfg.steps:
                run.leave_trunk(step, {"net": net.state_dict(), "step": step})
                run.boundary(1, method.at_boundary(state, Phase(1)))
            sgd.zero_grad()
            cross_entropy(net(inputs), labels).backward()
            sgd.step()
            right = (net(inputs).argmax(1) == labels).float().mean()
            run.log(phase=int(step >= cfg.steps), step=step + 1, train_accuracy=right)
            if run.due(step + 1):
                run.save(step + 1, {"net": net.state_dict(), "step": step + 1})
        run.finish({"train_accuracy": float(right)})


if __name__ == "__main__":
    train()
"""
SCRIPT_CONFIG = """
defaults:
  [toy_keys, _self_, size: small, method: fire, trigger: boundary, experiment: two_phases,
   at: '${experiment}/${size}', noise: null, runtime]
domain: toy
declared_in: settings
seed: 1
noise: {points: 20}
batch_size: 40
learning_rate: 0.1
optimizer_state: clear
device: cpu
compile: false
threads: 1
"""
EXPERIMENT = """
# @package _global_
# Two phases of noise.
domain: toy
at: {small: {noise: {name: noise}, steps: 20}}
"""


def test_a_fifth_domain_runs_resumes_sweeps_and_is_in_a_table(tmp_path):
    toy, whole, stopped, root = (tmp_path / name for name in ("toy", "whole", "stopped", "runs"))
    files = {
        "settings.py": SETTINGS,
        "train.py": TRAIN,
        "conf/toy.yaml": SCRIPT_CONFIG,
        "conf/experiment/two_phases.yaml": EXPERIMENT,
        "conf/noise/more_noise.yaml": "{name: more_noise, points: 40}",
    }
    for name, text in files.items():
        (toy / name).parent.mkdir(parents=True, exist_ok=True)
        (toy / name).write_text(text.lstrip())
    script = Script(str(toy / "train.py"), "harness.launch", "torch._dynamo")

    code, text = script.run(["--help", "all"])
    assert code == 0 and "steps of each of the two phases" in text and "noise: more_noise" in text
    assert "shrink_perturb " in text and "cbp " not in text
    code, text = script.run(["method=cbp"])
    assert code == 2 and "method=cbp does not run in toy: it is a toy" in text

    code, text = script.run([f"run.root={whole}"])
    assert code == 0, text
    for step in (10, 30):
        code, text = script.run([f"run.root={stopped}", "run.checkpoint_steps=5"], killed(f"step == {step}"))
        assert code == 9, text
    code, text = script.run([f"run.root={stopped}"])
    assert code == 0 and "resuming from" in text, text
    assert record(stopped) == record(whole) and len(record(whole)) == 2  # the run and its shared first phase

    code, text = script.run(["-m", "method=none,fire", "seed=1,2", "noise.points=20,40", f"run.root={root}"])
    assert code == 0 and "sweep: 8 of 8 done" in text, text
    assert len(list((root / "trunks").iterdir())) == 4
    command = [sys.executable, "-m", "analysis", "tables", "--experiment", "two_phases", "--root", str(root)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0 and "| FIRE " in shown.stdout and "Training accuracy" in shown.stdout, shown


def record(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("metrics.jsonl")}
