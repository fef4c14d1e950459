"""Inputs of a net and of its layers: a batch may be a tensor, several arguments, or keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for a batch: a tensor, a tuple or list, or a mapping of keywords."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def call(net: nn.Module, inputs: Any) -> Any:
    """Return the output of `net` for one batch of inputs (see `arguments_of`)."""
    arguments, keywords = arguments_of(inputs)
    return net(*arguments, **keywords)


def first_input(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Tensor:
    """Return the tensor that a Linear or convolution was called with, by position or by name."""
    return arguments[0] if arguments else keywords["input"]
