"""The device that trains, and what a config needs of the machine."""

from __future__ import annotations

import os
import shutil
import sys

import torch
from omegaconf import DictConfig

from fire_core.errors import UserError, first_line
from fire_core.methods import Method
from harness.runs.tracker import check_tracker

DEVICES = ("cpu", "cuda", "mps")


def pick_device(name: str) -> torch.device:
    """Return the device of this name; auto is the CUDA GPU if there is one, otherwise the CPU.

    Raises UserError for a device that does not exist or cannot be used.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in DEVICES:
        raise UserError(f"device={name!r} does not exist: give auto, cpu, cuda, cuda:<n> or mps")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device={name!r} cannot be used here ({first_line(error)}); try device=cpu"
        ) from error
    return torch.device(name)


def missing_compiler() -> str:
    """Return the name of the C++ compiler that torch.compile calls on a CPU if it is not installed, else ""."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    name = os.environ.get("CXX", usual)
    return "" if shutil.which(name) else name


def check_machine(cfg: DictConfig, method: Method) -> None:
    """Raise UserError for a device or tracker that cannot be used, and for compile=true where it cannot work."""
    device = pick_device(cfg.device)
    check_tracker(cfg.run.tracker)
    if cfg.compile and "activations" in method.needs:
        raise UserError(
            f"compile=true with method={method.name}: it watches activations, which compiled nets hide; use compile=false"
        )
    if cfg.compile and device.type == "cpu" and (compiler := missing_compiler()):
        raise UserError(
            f"compile=true needs a C++ compiler, and there is no {compiler!r} here: install it, set CXX to the one that "
            "is there, or use compile=false"
        )
