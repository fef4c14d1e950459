"""What is done between phases: one method a file, discovered by import.

A method is a dataclass whose fields are its settings (`conf/method/<name>.yaml` holds the same ones) and which says as
class data what the domains need to know. The loop calls it at four places; it never calls the loop.
`python -m fire_core.methods` lists what there is.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError, did_you_mean
from fire_core.phases import Phase, State
from fire_core.report import Report


@dataclass
class Method:
    """Base of all methods: does nothing anywhere.

    domains: training scripts that it runs in; the others refuse it. `METHODS=all` of a domain holds it.
    first_phase: first phase in which the method does anything. Pure boundary methods have 1; a method that acts during
    training has 0 or whatever its experiment says. Methods with first_phase >= 1 share the trunk of phase 0.
    """

    first_phase: int = 1

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    changes_optimizer: ClassVar[bool] = False
    changes_structure: ClassVar[bool] = False
    watches_training: ClassVar[bool] = (
        False  # reads activations of the training passes, which compiled nets hide
    )
    domains: ClassVar[tuple[str, ...]] = ("vision", "language", "dqn", "sac")

    def check(self, state: State) -> None:
        """Before training starts: raise UserError for settings that do not fit these nets (a rule that matches nothing)."""

    def at_boundary(self, state: State, phase: Phase) -> Report:
        """Once before phase k > 0."""
        return Report(method=self.name)

    def penalty(self, state: State) -> Tensor | float:
        """Added to the loss at every step."""
        return 0.0

    def after_step(self, state: State) -> None:
        """After every optimizer step."""

    def after_epoch(self, state: State) -> None:
        """After every epoch."""

    def optimizer(self, net: nn.Module, default: Optimizer, phase: Phase) -> Optimizer:
        """The optimizer to train this phase with; only methods with `changes_optimizer` replace the default."""
        return default

    def rebuild(self, state: State) -> None:
        """On resume after a boundary, before weights are loaded: redo the structural change (`changes_structure`)."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values that a resumed run needs."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""


_registry: dict[str, type[Method]] = {}


def register(cls: type[Method]) -> type[Method]:
    """Class decorator: make a method known by its `name`. A second class of the same name is an error."""
    missing = [key for key in ("name", "summary", "source") if not getattr(cls, key)]
    if missing:
        raise TypeError(f"method {cls.__qualname__}: class attribute {', '.join(missing)} is empty")
    known = _registry.get(cls.name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"method {cls.name!r} is defined in both {known.__module__} and {cls.__module__}")
    _registry[cls.name] = cls
    return cls


def available() -> dict[str, type[Method]]:
    """All methods by name: imports every file of this package once."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            try:
                importlib.import_module(f"{__name__}.{module.name}")
            except Exception as error:
                raise UserError(
                    f"fire_core/methods/{module.name}.py cannot be imported ({type(error).__name__}: {error}): mend or "
                    "move it"
                ) from error
    return dict(sorted(_registry.items()))


def create(name: str, **settings: Any) -> Method:
    """Method `name` with its settings; unknown names and settings are errors that name the nearest one."""
    methods = available()
    if name not in methods:
        raise UserError(f"method {name!r} does not exist{did_you_mean(name, methods)}")
    known = {f.name: f.default for f in fields(methods[name])}
    for key, value in settings.items():
        if key not in known:
            raise UserError(f"method {name!r} has no setting {key!r}{did_you_mean(key, known)}")
        if not _fits(value, known[key]):
            raise UserError(f"method {name!r}: {key}={value!r} should be like its default, {known[key]!r}")
    return methods[name](**settings)


def stacked_weights(net: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters (stack, ., .) of modules that say they hold independent matrices (`stacked_matrices`), by name."""
    return {
        f"{path}.{key}".lstrip("."): parameter
        for path, module in net.named_modules()
        if getattr(module, "stacked_matrices", False)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }


def _fits(value: Any, default: Any) -> bool:
    """Whether a setting has the kind of its default; settings without a plain default check themselves."""
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, int):
        return isinstance(value, int)
    return True
