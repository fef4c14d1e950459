"""Methods as the authors' FIRE code runs them, where that differs from the methods' own papers.

`create(name, variant="official")` finds the class here, which takes the settings of the published one. Nothing outside
imports this folder. The numbers that these classes reproduce are in `tests/official/methods/`, and every difference
has a line in DEVIATIONS.md.
"""

from __future__ import annotations

from dataclasses import fields

from fire_core.errors import UserError
from fire_core.methods import Method


def refuse_changed(method: Method, *names: str) -> None:
    """Raise UserError for a setting of the published variant that the official code does not have, unless untouched."""
    for field in fields(method):
        value = getattr(method, field.name)
        if field.name in names and value != field.default:
            raise UserError(
                f"{method.name}: {field.name}={value!r} means nothing to variant=official; leave it at {field.default!r}, "
                "or use variant=published"
            )
