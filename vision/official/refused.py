"""The settings that the official variants of methods refuse, because the official code does not have them."""

from __future__ import annotations

from dataclasses import fields

from fire_core.errors import UserError
from fire_core.methods.method import Method


def refuse_changed(method: Method, *names: str) -> None:
    """Raise UserError if one of the settings `names`, which the official code does not have, is not at its default."""
    for field in fields(method):
        value = getattr(method, field.name)
        if field.name in names and value != field.default:
            raise UserError(
                f"{method.name}: {field.name}={value!r} has no effect with variant=official; leave it at {field.default!r}, "
                "or use variant=published"
            )
