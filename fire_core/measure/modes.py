"""A net in training or evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
