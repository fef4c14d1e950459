"""What must hold on a device before its speed matters: scripts run, stop and resume there, and FIRE is that of the CPU."""

import copy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fire_core import fire
from harness.domains import find
from harness.runs.machine import ROOT
from harness.stop import STOPPED
from vision.models import build

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
    for first, expected, said in (["-c", STOP], STOPPED, "SIGTERM: saving"), ([], 0, "resuming from"):
        command = [sys.executable, *first, find(domain).script, *settings.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != expected or said not in done.stdout:
            return f"exit code {done.returncode}, not {expected} with {said!r}: {(done.stdout + done.stderr)[-600:]}"
    return ""


def fire_difference(device: str, ambient: str) -> float:
    """Return the largest relative distance of a weight of ResNet-18 after `fire` on `device` at `ambient` from the CPU's."""
    net = build("resnet18", classes=10, channels=3, image_size=32, width=16)
    other = copy.deepcopy(net).to(device)
    torch.set_float32_matmul_precision(ambient)
    fire(net), fire(other)
    torch.set_float32_matmul_precision("highest")
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max(float(((b.cpu() - a).norm() / a.norm().clamp_min(1e-9)).detach()) for a, b in pairs)


def prove(device: str) -> list[str]:
    """Print whether each script runs, stops and resumes on the device and whether FIRE is the same. Return what fails."""
    wrong = []
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(2 if device == "cpu" else 4) as pool:
        errors = pool.map(lambda domain: stop_and_resume(domain, device, Path(root, domain)), PROOF)
        for domain, error in zip(PROOF, errors):
            wrong += [domain] if error else []
            print(f"{domain:9} {error or 'runs, stops and resumes'}", flush=True)
    for ambient in ("highest", "high"):
        far = fire_difference(device, ambient)
        wrong += [] if far < 1e-3 else ["fire"]
        print(f"fire      differs by {far:.1e} from the CPU, float32 products set to {ambient}", flush=True)
    return wrong
