"""A fifth domain in a folder of its own, with nothing of the suite edited: run, killed, resumed, swept, and in a table."""

import subprocess
import sys

from training_scripts import ROOT, Script, killed

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

from harness.launch import launch
from harness.runs import generator, seeded
from harness.session import Session
from settings import DOMAIN


@launch(DOMAIN)
def train(cfg):
    session = Session(DOMAIN, cfg)
    if session.finished:
        return
    draw = generator(cfg.seed, "data")
    inputs, labels = torch.randn(2 * cfg.noise.points, 4, generator=draw), torch.arange(2).repeat(cfg.noise.points)
    with seeded(cfg.seed, "init"):
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    sgd = torch.optim.SGD(net.parameters(), lr=cfg.learning_rate)
    treatment = session.attach({"net": net}, {"net": sgd})
    with session as at:
        while at["step"] < 2 * cfg.steps:
            session.intervene(int(at["step"] >= cfg.steps), dict)
            treatment.optimizer.zero_grad()
            cross_entropy(net(inputs), labels).backward()
            treatment.before_step()
            treatment.optimizer.step()
            treatment.after_step()
            at["step"] += 1
            right = float((net(inputs).argmax(1) == labels).float().mean())
            session.log(train_accuracy=right)
            if at["step"] == cfg.steps:
                session.leave_trunk()
            session.save_if_due()
        session.finish({"net": net}, {"train_accuracy": right}, f"accuracy {right:.2f}")


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
        "settings.py": SETTINGS, "train.py": TRAIN, "conf/toy.yaml": SCRIPT_CONFIG,
        "conf/experiment/two_phases.yaml": EXPERIMENT,
        "conf/experiment/misspelt.yaml": EXPERIMENT + "tuned: {frie: {strength: 0.5}}",
        "conf/experiment/bare.yaml": EXPERIMENT.replace("@package _global_", ""),
        "conf/noise/more_noise.yaml": "{name: more_noise, points: 40}",
    }  # fmt: skip
    for name, text in files.items():
        (toy / name).parent.mkdir(parents=True, exist_ok=True)
        (toy / name).write_text(text.lstrip())
    script = Script(str(toy / "train.py"), "harness.launch", "torch._dynamo")
    text = script.run(["--help", "all"])
    assert "steps of each of the two phases" in text and "noise: more_noise" in text
    assert "shrink_perturb " in text and "cbp " not in text
    assert "method=cbp does not run in toy: it is a toy" in script.run(["method=cbp"], expect=(2,))
    assert "did you mean 'fire'?" in script.run(["experiment=misspelt"], expect=(2,))
    assert "bare.yaml needs the first line #" in script.run(["experiment=bare"], expect=(2,))

    script.run([f"run.root={whole}"])
    for step in (10, 30):
        script.run([f"run.root={stopped}", "run.checkpoint_steps=5"], killed(f"step == {step}"), (9,))
    assert "resuming from" in script.run([f"run.root={stopped}"])
    assert record(stopped) == record(whole) and len(record(whole)) == 2  # the run and its shared first phase

    full = "import harness.launch, harness.runs\ndef full(*_): raise OSError(28, 'No space left')\n"
    early, command = full + "harness.launch.keep_freed_memory = full", [f"run.root={tmp_path / 'full'}"]
    said = script.run(command, full + "harness.runs.Run.due = full", (2,))
    assert said.splitlines()[-1].startswith("error: cannot write") and "Traceback" not in said
    (failed,) = (tmp_path / "full").rglob("FAILED")
    assert failed.read_text().startswith("cannot write") and "Traceback" in failed.read_text()
    assert not (failed.parent / "RUNNING").exists()
    failed.unlink()
    script.run(command, f"import os\nos.environ['RANK'] = '1'\n{early}", (2,))
    assert not failed.exists(), "rank 0 says what happened"
    (failed.parent / "RUNNING").write_text("1")  # of a process that was killed; another has its number now
    script.run(command, early, (2,))
    assert failed.read_text().startswith("cannot write")

    assert "sweep: 4 of 4 done" in script.run(["-m", "method=none,fire", "seed=1,2", f"run.root={root}"])
    assert len(list((root / "trunks").iterdir())) == 2
    dials = ["-m", "method=cap,spectral_clip", "method.high=2", f"run.root={tmp_path / 'dials'}"]
    assert "sweep: 2 of 2 done" in script.run(dials), "the default method has no `high`"
    command = [sys.executable, "-m", "analysis", "tables", "--experiment", "two_phases", "--root", str(root)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0 and "| FIRE " in shown.stdout and "Training accuracy" in shown.stdout, shown


def record(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("metrics.jsonl")}
