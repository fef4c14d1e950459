"""Several processes as one: `torchrun --nproc-per-node=8 language/train.py ...`, or nothing special for one process.

Process 0 owns the run folder. The others get a `Silent` run with the same calls, receive what process 0 read from a
checkpoint, and follow its decisions to save and to stop.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fire_core.errors import UserError
from harness.launch import pick_device
from harness.runs.record import STOPPED

GO_ON, SAVE, STOP = 0, 1, 2


class World:
    """This process among all: `rank` of `size`, its `device`, and the few collective calls that the loop needs."""

    def __init__(self, device: str) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = pick_device(device)
        if self.size > 1:
            if self.device.type == "cuda":
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(self.device)
            if not dist.is_initialized():
                dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    @property
    def leads(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def share_of(self, micro_batches: int) -> range:
        """The micro-batches of an iteration that this process computes."""
        if micro_batches % self.size:
            raise UserError(
                f"accumulation={micro_batches} micro-batches cannot be shared evenly by {self.size} processes: "
                "use a number of processes that divides it, or change accumulation"
            )
        return range(self.rank, micro_batches, self.size)

    def wrap(self, net: nn.Module) -> nn.Module:
        """DistributedDataParallel around `net` where there are several processes."""
        if self.size == 1:
            return net
        ids = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(net, device_ids=ids)

    def without_sync(self, net: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Gradients are summed over processes at the `last` micro-batch only."""
        return nullcontext() if last or self.size == 1 else net.no_sync()  # type: ignore[operator]

    def mean(self, value: Tensor) -> Tensor:
        """Mean over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(value)
            value /= self.size
        return value

    def from_leader(self, value: Any) -> Any:
        """Process 0's value (plain values and tensors), on every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def same_weights(self, net: nn.Module) -> None:
        """Give every process the weights of process 0."""
        if self.size > 1:
            for tensor in (*net.parameters(), *net.buffers()):
                dist.broadcast(tensor.data, src=0)

    def close(self) -> None:
        """End the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


class Silent:
    """Stands for the run on processes other than 0: same calls, no files. Signals are left to process 0."""

    def __enter__(self) -> Silent:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **values: None


def save_decision(world: World, run: Any, step: int) -> bool:
    """Whether to save now. A process other than 0 ends here, with the same exit code, when process 0 is to stop."""
    if world.size == 1:
        return run.due(step)
    decision = GO_ON
    if world.leads and run.due(step):
        decision = STOP if run.stop_signal is not None else SAVE
    flag = torch.tensor(decision, device=world.device)
    dist.broadcast(flag, src=0)
    if int(flag) == STOP and not world.leads:
        sys.exit(STOPPED)
    return int(flag) != GO_ON


@contextmanager
def world_of(device: str) -> Iterator[World]:
    """The world of this process, closed at the end."""
    world = World(device)
    try:
        yield world
    finally:
        world.close()
