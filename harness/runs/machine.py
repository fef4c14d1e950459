"""Commit, versions and hardware of a run, for meta.json."""

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from fire_core.files import write_atomic
from harness.runs.folders import read_meta

ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, Any]:
    """Return commit, versions, hardware, command and start time as plain values for meta.json.

    commit: of the repository, or where git does not answer, as in a copy without .git, that of the environment variable
    FIRE_COMMIT. dirty: whether a Python or YAML file differs from the commit or is not part of it; None if unknown.
    """
    changed = _git("status", "--porcelain", "--untracked-files=all", "--", "*.py", "*.yaml")
    return {
        "commit": _git("rev-parse", "HEAD") or os.environ.get("FIRE_COMMIT"),
        "dirty": None if changed is None else bool(changed),
        "versions": versions(),
        "hardware": hardware(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_facts(folder: Path, config: dict[str, Any], facts: dict[str, Any]) -> None:
    """Write config.yaml and meta.json (`facts`, `describe()`, commits of earlier starts) at the start of a run or trunk."""
    write_atomic(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))
    content = describe() | facts
    if before := read_meta(folder):
        start = {key: before.get(key) for key in ("commit", "dirty", "started")}
        content["earlier"] = [*before.get("earlier", []), start]
    write_atomic(folder / "meta.json", json.dumps(content, indent=1))


def versions(*extras: str) -> dict[str, str]:
    """Return the versions of Python, torch, numpy and of what extras of pyproject.toml install, such as simulators."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"] if extras else {}
    listed = [line for extra in extras for line in project["optional-dependencies"][extra]]
    for package in (re.match(r"[\w.-]+", line)[0] for line in listed):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def hardware() -> str:
    """Return number and name of the GPUs, else the processor, its instruction set (digits depend on it) and cores."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        if model := re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            processor = model[1].strip()
    return f"{processor} ({torch.backends.cpu.get_cpu_capability()}), {os.cpu_count()} cores"


def _git(*arguments: str) -> str | None:
    try:
        # the lock of the index would make a `git commit` at the same time fail
        command = ["git", "--no-optional-locks", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
