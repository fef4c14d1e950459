"""Checks before a campaign: GPU driver, disk, memory, and a first step of every cell."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from fire_core.errors import UserError
from harness.campaign.manifest import Job
from harness.campaign.rates import first_step, one_of_each, start, stop, wait_for_step
from harness.campaign.schedule import Forecast


def check_machine(forecast: Forecast, root: Path) -> list[str]:
    """Return what is wrong with the machine, one message per problem."""
    wrong = []
    if shutil.which("nvidia-smi") and not torch.cuda.is_available():
        wrong.append(
            f"nvidia-smi is here, but torch {torch.__version__} finds no GPU: install a torch for this driver"
        )
    free = free_disk(root)
    if forecast.disk > free:
        wrong.append(
            f"the disk of {root} has {free / 1e9:.0f} GB free, the runs need {forecast.disk / 1e9:.0f} GB"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if forecast.memory > memory:
        wrong.append(
            f"memory is {memory / 1e9:.0f} GB, runs side by side take up to {forecast.memory / 1e9:.0f} GB: "
            "give fewer jobs in the manifest"
        )
    return wrong


def check_cells(jobs: Sequence[Job]) -> list[str]:
    """Train one job of each cell up to its first step in a temporary folder and print its data.

    Returns one message for each cell that failed.
    """
    wrong = []
    for job in one_of_each(jobs):
        with tempfile.TemporaryDirectory() as folder:
            process, home = start(job, Path(folder) / "run", [f"run.checkpoint_steps={first_step(job)}"])
            try:
                wait_for_step(process, home, first_step(job))
                found = [line for line in (home / "log").read_text().splitlines() if "; " in line]
                print(f"one step of {job.experiment}: {(found or ['done'])[0]}", flush=True)
            except UserError as error:
                wrong.append(f"{job.experiment}: {error}")
            finally:
                stop(process)
    return wrong


def free_disk(path: Path) -> int:
    """Return the free bytes on the disk of a folder that may not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
