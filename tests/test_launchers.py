"""Sweeps through Ray and submitit, two sweeps at once, and a sweep that is killed: the same numbers as one by one."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SWEEP = ["-m", "experiment=random_label", "size=smoke", "seed=1,2", "threads=1", "run.progress=false"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(root, *more, methods="none,fire"):
    command = [sys.executable, "vision/train.py", *SWEEP, f"method={methods}", f"run.root={root}", *more]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process):
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output[-3000:]
    return output


def metrics(root):
    home = Path(root) / "random_label" / "smoke"
    return {
        f"{p.parent.parent.name}/{p.parent.name}": p.read_bytes() for p in home.glob("*/seed_*/metrics.jsonl")
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    root = tmp_path_factory.mktemp("serial")
    finish(start(root))
    found = metrics(root)
    assert len(found) == 4
    return found


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("hydra_plugins.hydra_ray_launcher", ["hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"]),
        ("hydra_plugins.hydra_submitit_launcher", ["hydra/launcher=submitit_local"]),
    ],
    ids=["ray", "submitit"],
)
def test_parallel_launchers_give_the_same_numbers(module, options, expected, tmp_path):
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"{module} is not installed")
    finish(start(tmp_path, *options))
    assert metrics(tmp_path) == expected


def test_two_sweeps_at_once_share_one_trunk(expected, tmp_path):
    sweeps = [start(tmp_path, methods=name) for name in ("none", "fire")]
    for sweep in sweeps:
        finish(sweep)
    assert metrics(tmp_path) == expected
    assert len([p for p in (tmp_path / "trunks").iterdir() if (p / "DONE").exists()]) == 2  # one a seed


def test_a_killed_sweep_goes_on(expected, tmp_path):
    sweep = start(tmp_path)
    began = time.time()
    while time.time() - began < 300 and not list(tmp_path.glob("random_label/smoke/*/seed_*/DONE")):
        time.sleep(0.1)
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.communicate()
    output = finish(start(tmp_path))
    assert metrics(tmp_path) == expected
    assert "finished already" in output
