"""What must hold on a device before its speed matters: scripts run, stop and resume there, and FIRE is that of the CPU."""

import copy
import subprocess
import sys
from pathlib import Path

import torch

from fire_core import fire
from harness.domains import find
from harness.runs.signals import STOPPED
from vision.models import build

ROOT = Path(__file__).resolve().parents[1]
PROOF = {  # smoke runs with a boundary
    "vision": "experiment=label_noise",
    "language": "experiment=fig3_best boundary.fork=last",
    "dqn": "experiment=fig4a_catch total_steps=320 midpoint=160",
    "sac": "experiment=fig4b_hopper",
}
STOP = """
import os, runpy, signal, sys
from harness.session import Session
def save_if_due(self, old=Session.save_if_due):
    if self.at["phase"] == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    old(self)
Session.save_if_due = save_if_due
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def stop_and_resume(domain: str, device: str, folder: Path) -> str:
    """Stop a smoke run of FIRE by a signal after its boundary, and resume it. Return "", or what went wrong."""
    settings = f"{PROOF[domain]} size=smoke method=fire run.progress=false device={device} run.root={folder}"
    command = [str(ROOT / find(domain).script), *settings.split()]
    for first, expected in (["-c", STOP], STOPPED), ([], 0):
        done = subprocess.run([sys.executable, *first, *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode != expected:
            return f"exit code {done.returncode} instead of {expected}: {(done.stdout + done.stderr)[-600:]}"
    return ""


def fire_difference(device: str, ambient: str) -> float:
    """Return the largest relative distance of a weight of ResNet-18 after `fire` on `device` from that on the CPU, while
    `torch.set_float32_matmul_precision` says `ambient`."""
    net = build("resnet18", classes=10, channels=3, image_size=32, width=16)
    other = copy.deepcopy(net).to(device)
    torch.set_float32_matmul_precision(ambient)
    fire(net), fire(other)
    torch.set_float32_matmul_precision("highest")
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max(float(((b.cpu() - a).norm() / a.norm().clamp_min(1e-9)).detach()) for a, b in pairs)
