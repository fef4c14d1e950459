"""The base class of all methods, the registry of their classes, and the tools that they share."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError
from fire_core.report import Report
from fire_core.state import State
from fire_core.targets import Target, find_targets, shorten
from fire_core.wrapped_models import is_sharded, unwrap, unwrap_with

PUBLISHED = "published"
# what shows that a method here is the one of its source
FIXTURE = "fixture"  # numbers recorded from the authors' code, or that of FIRE's authors (tests/official)
TEXT = "paper's text"
PORT = "port"  # numbers recorded from somebody else's code
OWN = "own reading"  # of summaries, where neither text nor code was available; also what has no source but this suite


def added(default: Any) -> Any:
    """Return the field of a setting that was added later: runs that leave it at its default keep their old identity."""
    return field(default=default, metadata={"added": True})


NEEDS = {  # What a method may need of a loop, beside nets and optimizers.
    "gradients": "the gradients of every step, before they are clipped: call before_step()",
    "batches": "batches of the coming phase: give attach(batches=...)",
    "loss": "the loss of a net on such a batch: give attach(loss=...)",
    "optimizers": "the learning rate: give attach() the optimizer",
    "initial": "the starting weights: give attach(initial=...) if training has begun",
    "activations": "the activations of training passes, which compiled nets hide",
}


@dataclass
class Method:
    """Base class of all methods. It does nothing; a subclass overrides the calls that it needs.

    Args:
        first_phase: the first phase in which the method acts; `fire_core.attach` makes no call before it. It is 1 for
            methods that act only at boundaries. Runs of methods with first_phase >= 1 can share the training of phase 0.
    """

    first_phase: int = 1

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # in tables and figures; by default the name, with spaces
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    proven_by: ClassVar[str] = OWN  # FIXTURE, TEXT, PORT or OWN
    variant: ClassVar[str] = PUBLISHED
    fixed: ClassVar[tuple[str, ...]] = ()  # settings without effect in this variant
    needs: ClassVar[frozenset[str]] = frozenset()  # of NEEDS
    changes_optimizer: ClassVar[bool] = False  # overrides `build`
    changes_structure: ClassVar[bool] = False  # adds modules, and overrides `rebuild`
    takes_whole_weights: ClassVar[bool] = False  # cannot work with the shards of FSDP2
    optimizer_state: ClassVar[str | None] = None  # at a boundary, whatever attach() was given
    # attributes that a resumed run needs: plain values, or {name of a net: {name of a parameter or buffer: tensor}}
    remembers: ClassVar[tuple[str, ...]] = ()
    off: ClassVar[dict[str, Any] | None] = None  # settings with which all calls are made and nothing changes

    @property
    def takes_initial(self) -> bool:
        """Whether the method, with these settings, takes the starting weights."""
        words = (*self.needs, getattr(self, "scale", ""), getattr(self, "fresh", ""))
        return "initial" in words or bool(getattr(self, "reset", None))

    def settings(self, *but: str) -> dict[str, Any]:
        """Return the settings by name, but for `first_phase` and those named."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("first_phase", *but)}

    def check(self, state: State) -> None:
        """Raise `UserError` if the settings do not fit these nets. Called before training starts and at boundaries.

        By default: if the method has `targets` that a net does not have, or takes whole weights and finds shards.
        """
        for name, net in state.nets.items():
            if self.takes_whole_weights and is_sharded(net.parameters()):
                raise UserError(f"method {self.name!r} takes whole weights; net {name!r} is sharded")
            if hasattr(self, "targets"):
                find_targets(net, self.targets)

    def weights(self, net: nn.Module) -> "Views":
        """Return `find_weights` for the method's `targets`, searched once, without weights that are frozen by now."""
        known = self.__dict__.setdefault("_weights", WeakKeyDictionary())
        if net not in known:
            known[net] = find_weights(net, self.targets)  # type: ignore[attr-defined]
        return {key: view for key, view in known[net].items() if net.get_parameter(key).requires_grad}

    def boundary(self, state: State) -> Report:
        """Treat every net at a boundary, and return one report with the names `net.target` and `net.parameter`."""
        self.__dict__.pop("_weights", None)  # layers may have been frozen or replaced since
        self.check(state)
        reports = {name: self.treat(name, net, state) for name, net in state.nets.items()}
        return Report.merge(reports, self.name)

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        """Treat `net`, which is `state.nets[name]`, at the boundary before phase `state.phase`; return the report."""
        return Report()

    def penalty(self, state: State) -> Tensor | float:
        """Return a scalar that the loop adds to the loss. Called once before each `after_step`."""
        return 0.0

    def before_step(self, state: State) -> None:
        """Called when the gradients of a step are complete: unscaled, and not yet clipped.

        Where a GradScaler is going to skip the step they are not finite: keep nothing of them before `after_step`. In SAC,
        whose networks step one after another, it is called for each with only that one in `state.nets`.
        """

    def after_step(self, state: State) -> None:
        """Called after each optimizer step that was not skipped, with the clipped gradients (SAC: after all of a batch)."""

    def after_skip(self, state: State) -> None:
        """Called in place of `after_step` where a GradScaler has skipped the step."""

    def after_pass(self, state: State) -> None:
        """Called after each pass over the phase's data; in DQN every `log_every` steps, in SAC every `eval_every`."""

    def before_evaluation(self, state: State) -> None:
        """Called before each evaluation (accuracy, validation loss or return), whether or not it is recorded.

        Weights that the method puts in here are evaluated, and saved as `final.pt` at the end of a run.
        """

    def after_evaluation(self, state: State) -> None:
        """Called after each evaluation. The weights that train must be in place again afterwards."""

    def close(self) -> None:
        """Remove what the method has put into the nets, such as hooks; by default nothing."""

    def build(self, net: nn.Module, default: Optimizer) -> Optimizer:
        """Return a new optimizer of `net`, with learning rates relative to that of `default`."""
        raise NotImplementedError

    def rebuild(self, state: State, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Repeat structural changes (`changes_structure`) when a run resumes, before the weights `saved` are loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors and plain values that a resumed run needs: by default, `remembers`."""
        return {name: getattr(self, name) for name in self.remembers}

    def load_state_dict(self, saved: dict[str, Any], state: State) -> None:
        """Restore what `state_dict` returned. The tensors are on the CPU; the nets in `state` have their weights."""
        for name in self.remembers:
            value = deepcopy(saved[name])
            for net, part in value.items() if isinstance(value, Mapping) else ():
                if isinstance(part, Mapping):
                    own = unwrap(state.nets[net]).state_dict()
                    value[net] = {k: v.to(own[k].device) for k, v in part.items()}
            setattr(self, name, value)


def rates_of(optimizer: Optimizer, factor: float = 1.0) -> dict[str, Any]:
    """Return the learning rate of an optimizer, and that from which a schedule starts anew, times a factor."""
    group = optimizer.param_groups[0]
    return {key: group[key] * factor for key in ("lr", "initial_lr") if key in group}


def start_of(
    model: nn.Module, initial: Mapping[str, Tensor] | None, wanted: Iterable[str] | None = None
) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """Return the module inside the wrappers of `model`, and the starting weights by the names of its parameters.

    wanted: the parameters that must have a starting value, by default all. Raises UserError if some have none.
    """
    inner, start = unwrap_with(model, initial or {})
    own = dict(inner.named_parameters())
    wanted = own if wanted is None else wanted
    if missing := [name for name in wanted if name not in start or start[name].shape != own[name].shape]:
        raise UserError(f"initial lacks {shorten(missing)}, or in that shape: give a copy of state_dict()")
    return inner, start


registry: dict[tuple[str, str], type[Method]] = {}  # (name, variant) -> class


def register(cls: type[Method]) -> type[Method]:
    """Make a method class known by its `name` and `variant`, and return it; used as a class decorator.

    Raises TypeError if another class has this name and variant.
    """
    known = registry.setdefault((cls.name, cls.variant), cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"method {cls.name!r} is defined in both {known.__module__} and {cls.__module__}")
    registry[cls.name, cls.variant] = cls
    return cls


def without_added(method: Method, settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` without those fields of `method` that are `added` and at their default."""
    unset = {f.name for f in fields(method) if f.metadata.get("added") and settings.get(f.name) == f.default}
    return {name: value for name, value in settings.items() if name not in unset}


@dataclass(frozen=True)
class MatrixView:
    """How methods that act during training read a weight: as one matrix (out, everything else), or as a stack of them."""

    stacked: bool = False  # the first dimension counts matrices
    transposed: bool = False  # inputs come before outputs
    bias: str = ""  # name of the bias beside the weight, whether or not the layer has one

    def matrices(self, weight: Tensor) -> Tensor:
        """Return the matrices (..., out, in) of a weight, or of a tensor of its shape: a view where that is possible."""
        return self._outputs_first(weight).flatten(2 if self.stacked else 1)

    def weight(self, matrices: Tensor, like: Tensor) -> Tensor:
        """Return `matrices`, as `matrices` makes them of `like`, in the shape of `like`."""
        return self._outputs_first(matrices.reshape(self._outputs_first(like).shape))

    def _outputs_first(self, weight: Tensor) -> Tensor:
        first = 1 if self.stacked else 0
        return weight.transpose(first, first + 1) if self.transposed else weight


Views = Mapping[str, MatrixView]  # by the name of the parameter


def find_weights(net: nn.Module, targets: str | list[str]) -> Views:
    """Return the parameters that hold the matrices of `targets`, by name, and how to read each of them.

    Raises UserError if `targets` names a part of a weight, such as q of a fused q/k/v: these methods take whole weights.
    """
    table = sorted(find_targets(net, targets), key=lambda target: target.parameter)
    views = {target.parameter: _view(target) for target in table if target.included}
    for target in table:
        if target.parameter in views and not target.included:
            wrong = f"targets={targets!r} leaves out {target.name} but not all of that weight"
            raise UserError(f"{wrong}, and this method takes weights whole: choose other targets")
        if target.transposed and "[group" in target.name:
            raise UserError(f"{target.name}: this method cannot read transposed convolutions with groups")
    return views


def _view(target: Target) -> MatrixView:
    name = target.name.partition("[")[0]
    bias = f"{name.removesuffix('weight')}bias" if name.endswith("weight") else ""
    return MatrixView(bool(target.index) and isinstance(target.index[0], int), target.transposed, bias)
