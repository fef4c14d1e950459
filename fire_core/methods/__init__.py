"""Methods that change a network or its training between phases, one file per method.

A method is a dataclass: its fields are its settings, its class variables say what it needs and what to call it. The loop
calls the method; the method never calls the loop. Each boundary method is also a plain function beside its class.
Other packages may register variants of a method: classes of the same name and settings.
"""

import importlib
import pkgutil
from dataclasses import fields
from typing import Any

from fire_core.errors import UserError, check_settings, did_you_mean
from fire_core.methods.method import NEEDS as NEEDS
from fire_core.methods.method import PUBLISHED, Method, registry
from fire_core.methods.method import added as added
from fire_core.methods.method import register as register
from fire_core.methods.method import without_added as without_added

for _file in pkgutil.iter_modules(__path__):  # a method is registered when its file is imported
    importlib.import_module(f"{__name__}.{_file.name}")


def available() -> dict[str, type[Method]]:
    """Return the published class of every method, sorted by name."""
    return {name: cls for (name, variant), cls in sorted(registry.items()) if variant == PUBLISHED}


def title(name: str) -> str:
    """Return what tables and figures call a method, which need not be known here."""
    return vars(registry.get((name, PUBLISHED)) or Method).get("title", "") or name.replace("_", " ")


def moments(cls: type[Method]) -> str:
    """Return when a method acts, from the calls that it overrides: "boundary", "loss", "every step" and so on."""
    calls = {"treat": "boundary", "build": "optimizer", "penalty": "loss"}
    calls |= dict.fromkeys(("before_step", "after_step"), "every step")
    calls |= {"after_pass": "end of a pass", "before_evaluation": "evaluation"}
    found = ["boundary"] if cls.optimizer_state else []
    found += [moment for call, moment in calls.items() if getattr(cls, call) is not getattr(Method, call)]
    return ", ".join(dict.fromkeys(found)) or "never"


def table() -> str:
    """Return all methods as a Markdown table: what each changes, when, its source, and what proves that it is that."""
    rows = [("method", "in figures", "what it does", "when", "source", "proven by"), ("---",) * 6]
    known = available().items()
    rows += [(f"`{n}`", title(n), c.summary, moments(c), c.source, c.proven_by) for n, c in known]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def variants(name: str) -> list[str]:
    """Return the variants of method `name` that are registered, "published" first. Raises UserError for an unknown name."""
    if name not in [*available()]:  # what is no name may not be hashable
        raise UserError(f"method {name!r} does not exist{did_you_mean(str(name), available())}")
    return sorted((variant for known, variant in registry if known == name), key=PUBLISHED.__ne__)


def create(name: str, *, variant: str = PUBLISHED, **settings: Any) -> Method:
    """Return method `name` with the given settings.

    Args:
        variant: "published" follows the method's own paper; others are those that a package registered (see `variants`).
        settings: fields of the method's class.
    Raises: UserError for an unknown name, variant or setting, and for a value of another type than the default's.
    """
    if variant not in (known := variants(name)):
        raise UserError(f"method {name!r} has no variant {variant!r}: choose one of {', '.join(known)}")
    cls = registry[name, variant]
    defaults = {f.name: f.default for f in fields(cls)}
    for key, value in settings.items():
        if key not in defaults:
            raise UserError(f"method {name!r} has no setting {key!r}{did_you_mean(key, defaults)}")
        default, setting = defaults[key], f"method {name!r}: {key}={value!r}"
        if key in cls.fixed and value != default:
            raise UserError(f"{setting} has no effect with variant={variant}; leave it at {default!r}")
        kind: Any = float | int if isinstance(default, float) else type(default)
        fits = isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool)
        if isinstance(default, int | float) and not fits:  # bool is a kind of int
            raise UserError(f"{setting} must be of type {type(default).__name__}, as its default {default!r}")
    made = cls(**settings)
    check_settings(made, first_phase="[0, inf)")
    return made
