"""Sweeps through Ray and submitit, two sweeps at once, and a sweep that is killed: the same numbers as one by one."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from sweeps import ROOT, finish, metrics, start

INIT = "+hydra.launcher.ray.init"
RAY = ["hydra/launcher=ray", f"{INIT}.num_cpus=2", f"{INIT}.include_dashboard=false"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    finish(start(root := tmp_path_factory.mktemp("serial")))
    found = metrics(root)
    assert len(found) == 4
    return found


@pytest.mark.parametrize("launcher", ["submitit_local", "ray"], ids=["submitit", "ray"])
def test_a_campaign_through_a_launcher_gives_the_same_numbers(launcher, expected, tmp_path):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.split('_')[0]}_launcher")
    path, root = tmp_path / "two.yaml", tmp_path / "runs"
    part = "{experiment: random_label, method: [none, fire], seed: [[1, 2]]}"
    path.write_text(f"{{size: smoke, options: {{threads: 1}}, parts: [[{part}]]}}")
    options = RAY if launcher == "ray" else [f"hydra/launcher={launcher}"]
    command = [sys.executable, "-m", "harness.campaign", str(path), f"run.root={root}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert metrics(root) == expected


def test_two_identical_sweeps_at_once_both_end_well(expected, tmp_path):
    outputs = [finish(sweep) for sweep in [start(tmp_path), start(tmp_path)]]
    assert metrics(tmp_path) == expected
    assert len([p for p in (tmp_path / "trunks").iterdir() if (p / "DONE").exists()]) == 2  # one a seed
    assert all(output.splitlines()[-1] == "sweep: 4 of 4 done" for output in outputs)


@pytest.mark.parametrize("options", [[], RAY], ids=["serial", "ray"])
def test_a_killed_sweep_resumes(options, expected, tmp_path):
    if options:
        pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    sweep, began = start(tmp_path, *options, "run.checkpoint_steps=5"), time.time()
    while time.time() - began < 300 and not list(tmp_path.glob("random_label/smoke/*/seed_*/DONE")):
        time.sleep(0.02)
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.communicate()
    assert len(list(tmp_path.glob("random_label/smoke/*/seed_*/DONE"))) < 4
    assert "runs are finished already" in finish(start(tmp_path, *options))
    assert metrics(tmp_path) == expected
    assert not list(tmp_path.rglob("*.torn")) and not list(tmp_path.rglob("RUNNING"))


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=2"
LANGUAGE = "language/train.py batch_size=4 accumulation=2 phase_1.eval_every=10"
DRIVER = """
import os, socket, subprocess, sys
from harness.stop import name_driver
name_driver()
subprocess.run([sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    "command, workers",
    [
        ([*TORCHRUN.split(), *LANGUAGE.split()], 2),
        (["-c", DRIVER, "vision/train.py", "experiment=random_label"], 1),  # named as Ray's driver
    ],
    ids=["torchrun", "driver"],
)
def test_workers_end_soon_after_the_process_that_started_them_is_killed(command, workers, tmp_path):
    folders = [f"run.root={tmp_path}", f"run.data_root={tmp_path / 'data'}"]
    command = [sys.executable, *command, "size=small", "threads=1", *folders]
    environment, log = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, tmp_path / "log"
    with log.open("w") as out:
        parent = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
    while not [path for path in tmp_path.rglob("metrics.jsonl") if path.stat().st_size]:
        assert parent.poll() is None, log.read_text()
        time.sleep(0.1)
    started = psutil.Process(parent.pid).children()
    assert len(started) == workers
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
    assert list(tmp_path.rglob("checkpoint/step_*.pt")) and not list(tmp_path.rglob("RUNNING"))
