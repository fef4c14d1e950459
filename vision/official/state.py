"""What the official variants of methods share: the images that they look at, and the settings that they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from torch import Tensor

from fire_core.errors import UserError
from fire_core.methods.method import Method
from fire_core.phases import State


@dataclass
class ImageState(State):
    """A `State` with images for the official variants of methods.

    Attributes:
        test_inputs: count -> inputs of the last `count` test samples.
        last_inputs: count -> the last batches of inputs of the phase before, in order, with at least `count` samples if
            the phase has as many.
    """

    test_inputs: Callable[[int], Tensor] | None = None
    last_inputs: Callable[[int], Iterable[Tensor]] | None = None


def refuse_changed(method: Method, *names: str) -> None:
    """Raise UserError if one of the settings `names`, which the official code does not have, is not at its default."""
    for field in fields(method):
        value = getattr(method, field.name)
        if field.name in names and value != field.default:
            raise UserError(
                f"{method.name}: {field.name}={value!r} has no effect with variant=official; leave it at {field.default!r}, "
                "or use variant=published"
            )
