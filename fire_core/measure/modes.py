"""A net in training or evaluation mode for a while, and passes through it that leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_mode(net: nn.Module, *, training: bool) -> Iterator[None]:
    """`net.train(training)` inside; afterwards every module has its own mode back (a frozen batch norm stays frozen)."""
    before = [(module, module.training) for module in net.modules()]
    net.train(training)
    try:
        yield
    finally:
        for module, flag in before:
            module.training = flag


@contextmanager
def undisturbed(net: nn.Module, *, training: bool) -> Iterator[None]:
    """`in_mode`, and afterwards the net's buffers and the CPU's random state are as before."""
    buffers = {key: value.clone() for key, value in net.named_buffers()}
    with in_mode(net, training=training), torch.random.fork_rng(devices=[]):
        yield
    with torch.no_grad():
        for key, value in net.named_buffers():
            value.copy_(buffers[key])
