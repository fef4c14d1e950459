"""Commit, versions and hardware of a run, for meta.json."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fire_core.checkpoints.atomic import write_atomic
from harness.runs.folders import read_meta


def describe() -> dict[str, Any]:
    """Return commit, versions, hardware, command and start time as plain values for meta.json.

    dirty: whether a Python or YAML file differs from the commit or is not part of it.
    """
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=all", "--", "*.py", "*.yaml")),
        "versions": versions(),
        "hardware": hardware(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_meta(folder: Path, facts: dict[str, Any]) -> None:
    """Write meta.json at the start of a run: `facts`, `describe()`, and in `earlier` the commits of earlier starts."""
    before = read_meta(folder)
    try:
        start = {key: before[key] for key in ("commit", "dirty", "started")}
        earlier = [*before.get("earlier", []), start]
    except (KeyError, TypeError):
        earlier = []
    text = json.dumps(facts | describe() | ({"earlier": earlier} if earlier else {}), indent=1)
    write_atomic(folder / "meta.json", text)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that numbers depend on, such as simulators."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    for package in ("torchvision", "gymnasium", "ale-py", "mujoco"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    return found


def hardware() -> str:
    """Return number and name of the GPUs if there are any, otherwise the processor, its instruction set and number of cores.
    Runs give the same digits only on the same instruction set."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{_processor()} ({torch.backends.cpu.get_cpu_capability()}), {os.cpu_count()} cores"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
