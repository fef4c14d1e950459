"""Show what each script needs, what is installed, and the command that installs the rest.

    python -m harness.doctor

The exit code is 1 if a script does not start because something is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LEAST_DISK_GB = 10


@dataclass(frozen=True)
class Check:
    """One requirement of a domain.

    state: "ok", "missing" (the script does not start without it) or "optional" (only some features need it).
    remedy: command that installs what is missing.
    """

    domain: str
    what: str
    state: str
    note: str
    remedy: str = ""


PACKAGES = {  # domain -> [(module, distribution, extra that installs it, needed)]
    "core": [
        ("torch", "torch", "", True),
        ("numpy", "numpy", "", True),
        ("safetensors", "safetensors", "", True),
    ],
    "experiments": [("hydra", "hydra-core", "suite", True), ("tqdm", "tqdm", "suite", True)],
    "analysis": [
        ("pandas", "pandas", "suite", True),
        ("matplotlib", "matplotlib", "suite", True),
        ("scipy", "scipy", "suite", True),
        ("tabulate", "tabulate", "suite", True),
        ("jinja2", "jinja2", "suite", True),
        ("nbclient", "nbclient", "notebooks", False),
    ],
    "vision": [
        ("PIL", "pillow", "suite", True),
        ("torchvision", "torchvision", "vision", False),
        ("timm", "timm", "", False),
    ],
    "language": [
        ("tokenizers", "tokenizers", "language", True),
        ("datasets", "datasets", "language-data", False),
        ("tiktoken", "tiktoken", "language-data", False),
    ],
    "dqn": [
        ("gymnasium", "gymnasium", "dqn", True),
        ("ale_py", "ale-py", "dqn", True),
        ("psutil", "psutil", "dqn", True),
        ("imageio", "imageio", "dqn", False),
    ],
    "sac": [
        ("gymnasium", "gymnasium", "sac", True),
        ("mujoco", "mujoco", "sac", True),
        ("psutil", "psutil", "sac", True),
        ("robosuite_models", "robosuite-models", "humanoid", False),
        ("dm_control", "dm-control", "control", False),
    ],
    "sweeps": [
        ("ray", "ray", "ray", False),
        ("hydra_plugins.hydra_ray_launcher", "hydra-ray-launcher", "ray", False),
        ("hydra_plugins.hydra_submitit_launcher", "hydra-submitit-launcher", "slurm", False),
    ],
}
TARGETS = {  # extra -> command that installs it
    "suite": "make install",
    "humanoid": "make install-sac",
    **{extra: f"make install-{extra}" for extra in ("vision", "language", "dqn", "sac", "control", "ray")},
}
DATA = [
    ("vision", "Fashion-MNIST, shipped", "vision/assets", ""),
    ("vision", "downloaded CIFAR-10", "data/cifar10", "make data DATA=cifar10"),
    ("language", "two text corpora, shipped", "language/assets", "git checkout -- language/assets"),
    (
        "language",
        "tokens of WikiText-103",
        "data/language/wikitext103-gpt2",
        "python -m language.prepare --help",
    ),
]


def packages() -> list[Check]:
    """Return one check for each package of each domain."""
    found = []
    for domain, entries in PACKAGES.items():
        for module, distribution, extra, needed in entries:
            here = _installed(module)
            state = "ok" if here else "missing" if needed else "optional"
            note, remedy = (_version(distribution), "") if here else ("", _installs(distribution, extra))
            found.append(Check(domain, distribution, state, note, remedy))
    return found


def _installs(distribution: str, extra: str) -> str:
    """Return the command that installs a package."""
    if extra in TARGETS:
        return TARGETS[extra]
    return ".venv/bin/python -m pip install " + (f"-e '.[{extra}]'" if extra else distribution)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"


def data() -> list[Check]:
    """Return the checks of shipped and downloaded data."""
    found = []
    for domain, what, folder, remedy in DATA:
        here = (ROOT / folder).is_dir() and any((ROOT / folder).iterdir())
        needed = not folder.startswith("data")
        state = "ok" if here else "missing" if needed else "optional"
        note = folder if here else f"not in {folder}"
        found.append(Check(domain, what, state, note, "" if here else remedy or f"git checkout -- {folder}"))
    return found


def machine() -> list[Check]:
    """Return the checks of Python, processor, GPU, disk and rendering."""
    python_ok = sys.version_info >= (3, 11)
    free = shutil.disk_usage(ROOT).free / 1e9
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 if hasattr(os, "sysconf") else 0.0
    gpu = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else "none found; size=paper is meant for a GPU"
    )
    return [
        Check("core", "Python 3.11 or newer", "ok" if python_ok else "missing", platform.python_version()),
        Check("core", "processor", "ok", f"{os.cpu_count()} cores, {memory:.0f} GB memory"),
        Check("core", "GPU", "ok" if torch.cuda.is_available() else "optional", gpu),
        Check("core", "disk", "ok" if free > LEAST_DISK_GB else "optional", f"{free:.0f} GB free"),
        Check("sac", "rendering", *_rendering()),
    ]


def _rendering() -> tuple[str, str, str]:
    library = next((n for n in ("libEGL.so.1", "libOSMesa.so.8") if _loads(n)), None)
    if library:
        return "ok", f"{library} (set MUJOCO_GL={'egl' if 'EGL' in library else 'osmesa'})", ""
    return "optional", "no EGL or OSMesa; only pictures need it", "apt-get install libegl1 libosmesa6"


def _loads(library: str) -> bool:
    import ctypes

    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line: print all checks and return the exit code."""
    argparse.ArgumentParser(
        prog="python -m harness.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(given)
    checks = [*machine(), *packages(), *data()]
    print("MISSING: the script does not start without it. optional: only some of its features need it.")
    for domain in dict.fromkeys(["core", *PACKAGES]):
        mine = [check for check in checks if check.domain == domain]
        remedies = dict.fromkeys(check.remedy for check in mine if check.state == "missing")
        print(f"\n{domain}: {'cannot start; run ' + ' and '.join(remedies) if remedies else 'ready'}")
        for check in mine:
            mark = {"ok": "ok", "missing": "MISSING", "optional": "optional"}[check.state]
            remedy = f"   ->  {check.remedy}" if check.remedy and check.state != "ok" else ""
            print(f"  {mark:<10}{check.what:<36}{check.note or 'not installed'}{remedy}")
    return int(any(check.state == "missing" for check in checks))


if __name__ == "__main__":
    sys.exit(main())
