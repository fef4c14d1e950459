"""Training with several processes: `torchrun --nproc-per-node=8 language/train.py ...`. One process needs no torchrun.

Process 0 owns the run folder. The others receive what it read, and stop when it does. Each has the whole net.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fire_core.errors import UserError
from fire_core.methods import Method
from harness.device import pick_device

T = TypeVar("T")


class World:
    """The group of processes as one of them sees it, with the collective calls that the loop needs.

    rank: index of this process. size: number of processes. is_leader: whether this process writes files and prints.
    position: of its random stream. device: of this process.
    """

    def __init__(self, device: str) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.is_leader, self.position = self.rank == 0, (self.rank,)
        self.device = pick_device(device)
        if self.size > 1:
            if self.device.type == "cuda":
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(self.device)
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            self._patient = dist.new_group(backend="gloo", timeout=timedelta(days=30))  # for long waits

    def check(self, method: Method) -> None:
        """Raise UserError for a method by which the copies of the network in several processes would diverge."""
        if "activations" in method.needs and self.size > 1:
            why = "it scores units on the batches of one process, so the copies of the network would diverge"
            raise UserError(f"method={method.name} with {self.size} processes: {why}; use one process")

    def share_of(self, micro_batches: int) -> range:
        """Return the micro-batches of an iteration that this process computes, or raise UserError for unequal shares."""
        if micro_batches % self.size:
            wrong = f"accumulation={micro_batches} cannot be shared evenly by {self.size} processes"
            raise UserError(f"{wrong}: use a number of processes that divides it, or change accumulation")
        return range(self.rank, micro_batches, self.size)

    def deal(self, batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """Yield (batch, whether it counts). Where batches run out, a process gets another's, which does not count."""
        batches = iter(batches)
        while turn := list(itertools.islice(batches, self.size)):
            yield turn[min(self.rank, len(turn) - 1)], self.rank < len(turn)

    def wrap(self, net: nn.Module) -> nn.Module:
        """Return `net`, in DistributedDataParallel if there are several processes."""
        if self.size == 1:
            return net
        ids = [self.device.index] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(net, device_ids=ids)

    def without_sync(self, net: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Return a context for one micro-batch. Only at the `last` one are gradients averaged over processes."""
        return nullcontext() if last or self.size == 1 else net.no_sync()  # type: ignore[operator]

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of `value` over the processes."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.size
        return value

    def from_leader(self, value: Any) -> Any:
        """Return the value of process 0 (plain values and tensors) on every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._patient)
        return box[0]

    def same_weights(self, net: nn.Module) -> None:
        """Copy the weights of process 0 to every process."""
        if self.size > 1:
            for tensor in (*net.parameters(), *net.buffers()):
                dist.broadcast(tensor.data, src=0)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *error: object) -> None:
        if self.size > 1:
            dist.destroy_process_group()
