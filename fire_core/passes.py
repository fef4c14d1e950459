"""Forward passes of any net: how it is given a batch, and in which mode it runs."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for a batch: a tensor, a tuple or list, or a mapping of keywords."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def placed(net: nn.Module, batch: Any) -> Any:
    """Return a batch on the device of the first weight of `net`, if no tensor of it is where a weight is."""
    devices = [weight.device for weight in net.parameters()]
    if not devices or any(isinstance(leaf, Tensor) and leaf.device in devices for leaf in tree_leaves(batch)):
        return batch
    return tree_map_only(Tensor, lambda tensor: tensor.to(devices[0]), batch)


def call(net: nn.Module, inputs: Any) -> Any:
    """Return the output of `net` for one batch of inputs (see `arguments_of`) on any device."""
    arguments, keywords = placed(net, arguments_of(inputs))
    return net(*arguments, **keywords)


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled nets as they are written, so that hooks and dispatch modes see all of it. Graphs are kept."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield


@contextmanager
def in_mode(net: nn.Module, *, training: bool) -> Iterator[None]:
    """Call `net.train(training)`; at the end restore the mode of every module (a frozen batch norm stays frozen)."""
    before = [(module, module.training) for module in net.modules()]
    net.train(training)
    try:
        yield
    finally:
        for module, flag in before:
            module.training = flag


@contextmanager
def undisturbed(net: nn.Module, *, training: bool) -> Iterator[None]:
    """Act as `in_mode`; also restore the net's buffers, and the random state of the CPU and of the net's GPUs."""
    buffers = {key: value.clone() for key, value in net.named_buffers()}
    gpus = {weight.device for weight in net.parameters() if weight.is_cuda}
    try:
        with in_mode(net, training=training), torch.random.fork_rng(gpus):
            yield
    finally:
        with torch.no_grad():
            for key, value in net.named_buffers():
                if key in buffers and value.shape == buffers[key].shape:  # not a grown cache
                    value.copy_(buffers[key])
