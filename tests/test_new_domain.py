"""A fifth domain in a folder of its own, with nothing of the suite edited: run, killed, resumed, swept, and in a table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_scripts import killed as killed_at

ROOT = Path(__file__).resolve().parents[1]
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
    "toy", "toy/train.py", Toy, shown=("noise.name",), refuses={"cbp": "it is a toy"}, conf=Path(__file__).parent / "conf"
)
"""
TRAIN = """
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
defaults: [_self_, noise: null, method: fire, trigger: boundary, experiment: two_phases, plumbing]
domain: toy
declared_in: settings
size: small
seed: 1
noise: {name: '???', points: 20}
steps: ???
batch_size: 40
learning_rate: 0.1
trigger: {metric: null, mode: null, patience: null, min_change: null, level: null, share: null, steps: null, cooldown: null}
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


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    files = {
        "settings.py": SETTINGS,
        "train.py": TRAIN,
        "conf/toy.yaml": SCRIPT_CONFIG,
        "conf/experiment/two_phases.yaml": EXPERIMENT,
        "conf/noise/more_noise.yaml": "{name: more_noise, points: 40}",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.lstrip())
    return folder


def call(*command, cwd, **environment):
    path = os.environ | {"PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=path, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def record(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("metrics.jsonl")}


def test_a_fifth_domain_runs_resumes_sweeps_and_is_in_a_table(toy, tmp_path):
    code, text = call("train.py", "--help", cwd=toy)
    assert code == 0 and "steps of each of the two phases" in text and "noise: more_noise" in text
    assert "shrink_perturb " in text and "cbp " not in text
    code, text = call("train.py", "method=cbp", cwd=toy)
    assert code == 2 and "method=cbp does not run in toy: it is a toy" in text

    whole, killed, root = tmp_path / "whole", tmp_path / "killed", tmp_path / "runs"
    assert call("train.py", f"run.root={whole}", cwd=toy)[0] == 0
    for step in (10, 30):
        dying = f"{killed_at(f'step == {step}')}import runpy; runpy.run_path('train.py', run_name='__main__')"
        assert call("-c", dying, f"run.root={killed}", "run.checkpoint_steps=5", cwd=toy)[0] == 9
    code, text = call("train.py", f"run.root={killed}", cwd=toy)
    assert code == 0 and "resuming from" in text, text
    assert record(killed) == record(whole) and len(record(whole)) == 2  # the run and its shared first phase

    sweep = ["-m", "method=none,fire", "seed=1,2", "noise.points=20,40", f"run.root={root}"]
    code, text = call("train.py", *sweep, cwd=toy)
    assert code == 0 and "sweep: 8 done, 0 running, 0 failed, of 8" in text, text
    assert len(list((root / "trunks").iterdir())) == 4
    code, text = call("-m", "analysis", "tables", "--experiment", "two_phases", "--root", str(root), cwd=ROOT)
    assert code == 0 and "fire" in text and "training accuracy" in text, text
    places = {"FIRE_CONF": str(toy / "conf"), "PYTHONPATH": f"{ROOT}{os.pathsep}{toy}"}
    assert "toy: ready" in call("-m", "harness.doctor", cwd=ROOT, **places)[1]
