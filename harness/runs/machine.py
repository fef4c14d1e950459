"""Commit, versions and hardware of a run, for meta.json."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

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


def write_meta(folder: Path, facts: dict[str, Any]) -> None:
    """Write meta.json at the start of a run: `facts`, `describe()`, and in `earlier` the commits of earlier starts."""
    before = read_meta(folder)
    start = {key: before.get(key) for key in ("commit", "dirty", "started")}
    earlier = [*before.get("earlier", []), start] if before else []
    here = describe()
    here["versions"] = facts.get("versions", {}) | here["versions"]
    text = json.dumps(facts | here | ({"earlier": earlier} if earlier else {}), indent=1)
    write_atomic(folder / "meta.json", text)


def requirements(*extras: str) -> list[str]:
    """Return the names of the packages that extras of pyproject.toml install."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = (re.match(r"[\w.-]+", line) for extra in extras for line in listed[extra])
    return list(dict.fromkeys(name[0] for name in names if name))


def versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of Python, torch, numpy and those of `packages`, such as simulators, that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    return found | {package: version for package in packages if (version := installed(package))}


def installed(package: str) -> str:
    """Return the version of a package, "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


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
    try:
        # the lock of the index would make a `git commit` at the same time fail
        command = ["git", "--no-optional-locks", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
