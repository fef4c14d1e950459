"""Context managers for a net in training or evaluation mode that restore its state afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


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
    """Act as `in_mode`; also restore the CPU's random state and the net's buffers."""
    buffers = {key: value.clone() for key, value in net.named_buffers()}
    try:
        with in_mode(net, training=training), torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for key, value in net.named_buffers():
                value.copy_(buffers[key])
