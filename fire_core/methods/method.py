"""The base class of all methods, and the registry of their classes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

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


registry: dict[tuple[str, str], type[Method]] = {}  # (name, variant) -> class


def register(cls: type[Method]) -> type[Method]:
    """Make a method class known by its `name` and `variant`, and return it; used as a class decorator.

    Raises TypeError if `name`, `summary` or `source` is empty, or if another class has this name and variant.
    """
    missing = [key for key in ("name", "summary", "source") if not getattr(cls, key)]
    if missing:
        raise TypeError(f"method {cls.__qualname__}: class attribute {', '.join(missing)} is empty")
    known = registry.get((cls.name, cls.variant))
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"method {cls.name!r} is defined in both {known.__module__} and {cls.__module__}")
    registry[cls.name, cls.variant] = cls
    return cls


def without_added(method: Method, settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` without those fields of `method` that are `added` and at their default."""
    unset = {f.name for f in fields(method) if f.metadata.get("added") and settings.get(f.name) == f.default}
    return {name: value for name, value in settings.items() if name not in unset}


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
