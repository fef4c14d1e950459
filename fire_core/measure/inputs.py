"""What a net and its layers are called with: a batch may be a tensor, several arguments, or keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for one batch: a tensor, a tuple or list of arguments, or a mapping of keywords."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def call(net: nn.Module, inputs: Any) -> Any:
    """`net` on one batch of inputs."""
    arguments, keywords = arguments_of(inputs)
    return net(*arguments, **keywords)


def first_input(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Tensor:
    """The tensor that a Linear or convolution was called with, by position or by name."""
    return arguments[0] if arguments else keywords["input"]
