"""A sweep of four smoke runs in a process of its own, and what it leaves behind."""

import os
import subprocess
import sys

from training_scripts import ROOT


def start(root, *more):
    command = [sys.executable, "vision/train.py", "-m", "experiment=random_label", "size=smoke"]
    command += ["method=none,fire", "seed=1,2", "run.jobs=2", "threads=1", f"run.root={root}", *more]
    environment = os.environ | {"RAY_worker_niceness": "0"}  # Ray's 15 starves on a busy machine
    options = {"cwd": ROOT, "env": environment, "text": True, "start_new_session": True}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def finish(sweep):
    output, _ = sweep.communicate(timeout=500)
    assert sweep.returncode == 0, output[-3000:]
    return output


def metrics(root):
    home = root / "random_label" / "smoke"
    return {str(path.relative_to(home)): path.read_bytes() for path in home.glob("*/seed_*/metrics.jsonl")}
