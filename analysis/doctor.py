"""What each domain needs, what is there, what mends it.

    python -m analysis.doctor

Exit code 1 if something that a domain cannot do without is missing.
"""

from __future__ import annotations

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
    """`state`: "ok", "missing" (the domain does not start) or "optional" (a part of it is not available)."""

    domain: str
    what: str
    state: str
    note: str
    mend: str = ""


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
        ("PIL", "pillow", "suite", True),
        ("pyarrow", "pyarrow", "", False),
        ("jupytext", "jupytext", "notebooks", False),
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
DATA = [
    ("vision", "Fashion-MNIST, shipped", "vision/assets", ""),
    ("vision", "downloaded CIFAR-10", "data/cifar10", "size=paper downloads them, or run.data_root=FOLDER"),
    ("language", "two text corpora, shipped", "language/assets", "git checkout -- language/assets"),
    (
        "language",
        "tokens of WikiText-103",
        "data/language/wikitext103-gpt2",
        "python -m language.prepare --help",
    ),
]


def packages() -> list[Check]:
    """One check a package and domain."""
    found = []
    for domain, entries in PACKAGES.items():
        for module, distribution, extra, needed in entries:
            here = _installed(module)
            mend = (
                f".venv/bin/python -m pip install -e '.[{extra}]'" if extra else f"pip install {distribution}"
            )
            state = "ok" if here else "missing" if needed else "optional"
            found.append(
                Check(
                    domain, distribution, state, _version(distribution) if here else "", "" if here else mend
                )
            )
    return found


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
    """Shipped and downloaded data."""
    found = []
    for domain, what, folder, mend in DATA:
        here = (ROOT / folder).is_dir() and any((ROOT / folder).iterdir())
        needed = not folder.startswith("data")
        state = "ok" if here else "missing" if needed else "optional"
        found.append(Check(domain, what, state, folder, "" if here else mend or f"git checkout -- {folder}"))
    return found


def machine() -> list[Check]:
    """Python, processor, GPU, disk."""
    python_ok = sys.version_info >= (3, 11)
    free = shutil.disk_usage(ROOT).free / 1e9
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 if hasattr(os, "sysconf") else 0.0
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: size=small runs on the CPU"
    return [
        Check("core", "Python 3.11 or newer", "ok" if python_ok else "missing", platform.python_version()),
        Check("core", "processor", "ok", f"{os.cpu_count()} cores, {memory:.0f} GB memory"),
        Check("core", "GPU", "ok" if torch.cuda.is_available() else "optional", gpu, "size=paper wants one"),
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
    checks = [*machine(), *packages(), *data()]
    order = list(dict.fromkeys(["core", *PACKAGES]))
    for domain in order:
        mine = [check for check in checks if check.domain == domain]
        verdict = "cannot start" if any(check.state == "missing" for check in mine) else "ready"
        print(f"\n{domain}: {verdict}")
        for check in mine:
            mark = {"ok": "ok", "missing": "MISSING", "optional": "not here"}[check.state]
            mend = f"   ->  {check.mend}" if check.mend and check.state != "ok" else ""
            print(f"  {mark:<9}{check.what:<36}{check.note}{mend}")
    return int(any(check.state == "missing" for check in checks))


if __name__ == "__main__":
    sys.exit(main())
