"""The device that trains, copies to it, and what a config needs of the machine."""

import ctypes
import os
import shutil
import sys

import torch
from omegaconf import DictConfig
from torch import Tensor

from fire_core.errors import UserError, first_line
from fire_core.methods import create

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}  # precisions with autocast


def pick_device(name: str) -> torch.device:
    """Return the device of this name; auto is a CUDA GPU if there is one. Raises UserError for one that cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"device={name!r} does not exist: give auto, cpu, cuda or cuda:<n>")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={name!r} cannot be used ({first_line(error)}); try device=cpu") from error
    return torch.device(name)


def set_precision(cfg: DictConfig) -> None:
    """Let products of float32 matrices use TF32 where the config says so."""
    tf32 = cfg.get("tf32") or cfg.get("precision") == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.benchmark = True  # a run repeats its shapes: time the algorithms of each


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context of a precision, which does nothing for those that are not in LOW."""
    return torch.autocast(device.type, LOW.get(precision), enabled=precision in LOW)


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on `device`. Copies from the CPU to a GPU go through pinned memory, so that they are asynchronous."""
    if torch.device(device).type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def check_machine(cfg: DictConfig, here: bool = True) -> None:
    """Raise UserError for compile=true where it cannot work and, if it trains `here`, a device that cannot be used."""
    if cfg.compile and "activations" in create(**cfg.method).needs:
        raise UserError(f"compile=true hides activations, which {cfg.method.name} watches: use compile=false")
    on_cpu = here and pick_device(cfg.device).type == "cpu"
    if cfg.compile and on_cpu and not shutil.which(os.environ.get("CXX", "g++")):
        raise UserError("compile=true needs a C++ compiler on a CPU: install one, set CXX or compile=false")


def keep_freed_memory() -> None:
    """Let freed blocks below 32 MiB stay with this process, where the C library can.

    By default, glibc gives the end of its heap back at once, and a training step asks for the same pages again and again:
    about a tenth of the time of a small GPT on a CPU. Larger blocks, such as a replay buffer, are still given back.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "mallopt"):  # musl has none
        mmap_threshold, trim_threshold = -3, -1  # of malloc.h
        library.mallopt(mmap_threshold, 2**25)  # half of glibc's largest heap
        library.mallopt(trim_threshold, 2**31 - 1)  # a C int
