"""Methods that change a network or its training between phases: one file per method, found by importing this package.

A method is a dataclass. Its fields are its settings (`conf/method/<name>.yaml` holds the same ones), and its class
variables tell the training scripts what it needs. The loop calls the method; the method never calls the loop. Each
boundary method is also a plain function beside its class. `fire-core methods` lists all methods.

Some methods have variants. `published`, the default, follows the method's own paper. Any other, such as `official`, is
a class of the same name and settings in `fire_core/methods/<variant>/<name>.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError, did_you_mean
from fire_core.phases import Phase, State
from fire_core.report import Report

PUBLISHED = "published"


def added(default: Any) -> Any:
    """Return the dataclass field of a setting that was added later.

    Runs that leave the setting at its default keep the identity that they had before the setting existed.
    """
    return field(default=default, metadata={"added": True})


@dataclass
class Method:
    """Base class of all methods. It does nothing.

    Args:
        first_phase: the first phase in which the method acts. It is 1 for methods that act only at boundaries; for the
            others the experiment decides. Runs of methods with first_phase >= 1 can share the training of phase 0.
    """

    first_phase: int = 1

    name: ClassVar[str] = ""
    variant: ClassVar[str] = PUBLISHED
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    changes_optimizer: ClassVar[bool] = False
    changes_structure: ClassVar[bool] = False
    watches_training: ClassVar[bool] = (
        False  # reads activations of the training passes, which compiled nets hide
    )

    def check(self, state: State) -> None:
        """Raise `UserError` if the settings do not fit these nets. Called before training starts and at boundaries."""

    def at_boundary(self, state: State, phase: Phase) -> Report:
        """Treat every net from phase `first_phase` on, and return one report. Called at each boundary.

        The names in the report are `net.target` and `net.parameter`. Before `first_phase`, the report is empty.
        """
        if phase.index < self.first_phase:
            return Report(method=self.name)
        self.check(state)
        return Report.merge(
            {name: self.treat(name, net, state) for name, net in state.nets.items()}, self.name
        )

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        """Treat the network `net`, which is `state.nets[name]`, at a boundary, and return the report."""
        return Report()

    def penalty(self, state: State) -> Tensor | float:
        """Return a scalar that the loop adds to the loss at every optimizer step."""
        return 0.0

    def after_step(self, state: State) -> None:
        """Called after every optimizer step."""

    def after_epoch(self, state: State) -> None:
        """Called after every epoch and before its test, whose results therefore include the changes."""

    def after_test(self, state: State) -> None:
        """Called after every epoch and its test, whose results therefore do not include the changes."""

    def optimizer(self, net: nn.Module, default: Optimizer, phase: Phase) -> Optimizer:
        """Return the optimizer of `net` in this phase. Only methods with `changes_optimizer` replace the default."""
        return default

    def rebuild(self, state: State) -> None:
        """Repeat structural changes (`changes_structure`) when a run resumes, before its weights are loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors and plain values that a resumed run needs."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


_registry: dict[tuple[str, str], type[Method]] = {}
_broken: dict[str, Exception] = {}  # modules of this package that cannot be imported


def register(cls: type[Method]) -> type[Method]:
    """Make a method class known by its `name` and `variant`, and return it; used as a class decorator.

    Raises TypeError if `name`, `summary` or `source` is empty, or if another class has this name and variant.
    """
    missing = [key for key in ("name", "summary", "source") if not getattr(cls, key)]
    if missing:
        raise TypeError(f"method {cls.__qualname__}: class attribute {', '.join(missing)} is empty")
    known = _registry.get((cls.name, cls.variant))
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"method {cls.name!r} is defined in both {known.__module__} and {cls.__module__}")
    _registry[cls.name, cls.variant] = cls
    return cls


def available() -> dict[str, type[Method]]:
    """Return the published class of every method, sorted by name, after importing the modules of this package.

    Modules that cannot be imported are left out; see `broken`.
    """
    for module in pkgutil.iter_modules(__path__):
        if not module.ispkg and not module.name.startswith("_"):
            try:
                importlib.import_module(f"{__name__}.{module.name}")
            except Exception as error:
                _broken[module.name] = error
            else:
                _broken.pop(module.name, None)
    return {name: cls for (name, variant), cls in sorted(_registry.items()) if variant == PUBLISHED}


def broken() -> dict[str, str]:
    """Return the error message of each module of this package that cannot be imported, by module name."""
    available()
    return {name: f"{type(error).__name__}: {error}" for name, error in _broken.items()}


def list_methods(filter: str | Iterable[str] = "*", with_description: bool = False) -> list[Any]:
    """Return the sorted names of the methods that match a wildcard pattern, or any of several.

    With `with_description`, return (name, one-line description) pairs instead.
    """
    patterns = [filter] if isinstance(filter, str) else list(filter)
    found = [
        (name, cls.summary)
        for name, cls in available().items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    return found if with_description else [name for name, _ in found]


def variants(name: str) -> list[str]:
    """Return the variants of method `name`, "published" first. Raises UserError for an unknown name."""
    _check_exists(name)
    folders = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
    return [PUBLISHED, *(folder for folder in folders if _has(folder, name))]


def create(name: str, *, variant: str = PUBLISHED, **settings: Any) -> Method:
    """Return method `name` with the given settings.

    Args:
        variant: "published" follows the method's own paper; "official" follows the code of the FIRE paper and exists
            for the methods where the two differ (see `variants`).
        settings: fields of the method's class.
    Raises: UserError for an unknown name, variant or setting, and for a value of another type than the default's.
    """
    if variant not in variants(name):
        raise UserError(
            f"method {name!r} has no variant {variant!r}: choose one of {', '.join(variants(name))}"
        )
    if variant != PUBLISHED:
        importlib.import_module(f"{__name__}.{variant}.{name}")
    cls = _registry[name, variant]
    known = {f.name: f.default for f in fields(cls)}
    for key, value in settings.items():
        if key not in known:
            raise UserError(f"method {name!r} has no setting {key!r}{did_you_mean(key, known)}")
        if not _fits(value, known[key]):
            kind = type(known[key]).__name__
            raise UserError(
                f"method {name!r}: {key}={value!r} must be of type {kind}, like its default {known[key]!r}"
            )
    return cls(**settings)


def without_added(method: Method, settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` without those fields of `method` that are `added` and at their default."""
    unset = {f.name for f in fields(method) if f.metadata.get("added") and settings.get(f.name) == f.default}
    return {name: value for name, value in settings.items() if name not in unset}


def _check_exists(name: str) -> None:
    """Raise UserError if there is no method `name`, or if its module cannot be imported."""
    methods = available()
    if name in _broken:
        raise UserError(
            f"method {name!r} cannot be imported ({broken()[name]}): fix fire_core/methods/{name}.py or move it away"
        ) from _broken[name]
    if name not in methods:
        missing = "".join(f"; {file}.py cannot be imported ({why})" for file, why in broken().items())
        raise UserError(f"method {name!r} does not exist{did_you_mean(name, methods)}{missing}")


def _has(folder: str, name: str) -> bool:
    """Return whether the folder of a variant has a file for method `name`."""
    package = importlib.import_module(f"{__name__}.{folder}")
    return any(module.name == name for module in pkgutil.iter_modules(package.__path__))


def stacked_weights(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return the three-dimensional parameters of modules that set `stacked_matrices = True`, by name.

    Each of them is a stack of independent matrices, (count, out, in).
    """
    return {
        f"{path}.{key}".lstrip("."): parameter
        for path, module in net.named_modules()
        if getattr(module, "stacked_matrices", False)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }


def _fits(value: Any, default: Any) -> bool:
    """Return whether a value has the type of its default; defaults that are no bool, int or float fit any value."""
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, int):
        return isinstance(value, int)
    return True
