"""Plasticity injection: add a new trainable head beside the frozen old one, without changing the predictions."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fire_core.errors import UserError
from fire_core.methods.method import TEXT, Method, register
from fire_core.report import Report, Row
from fire_core.state import State
from fire_core.wrapped_models import replicas_in, unwrap, unwrap_with


class InjectedHead(nn.Module):
    """A head that computes old(x) + new(x) - new_at_start(x), of each output if there are several; only `new` is trained.

    At the injection the last two terms are equal in evaluation mode, so the output is that of the old head.
    """

    def __init__(self, old: nn.Module, new: nn.Module) -> None:
        super().__init__()
        self.old = _frozen(old)
        self.new = new
        self.new_at_start = _frozen(deepcopy(new))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        old, new, start = (head(*inputs, **named) for head in (self.old, self.new, self.new_at_start))
        if isinstance(old, tuple):
            return tuple(a + (b - c) for a, b, c in zip(old, new, start, strict=True))
        return old + (new - start)


def inject(model: nn.Module, initial: Mapping[str, Tensor], head: str = "head") -> Report:
    """Replace the module `head` of `model` by an `InjectedHead`, and return a Report with one row per parameter of it.

    The model gains two more copies of the head, one of which is the only trained part of it: build a new optimizer.

    Args:
        initial: state dict of the whole model, from which the new part starts. head: path of the module, dots allowed.
    Raises: UserError if the model has no module `head` or is in DistributedDataParallel.
    """
    new = deepcopy(_trainable_part(_head(model, head)))
    model, initial = unwrap_with(model, initial)
    start = {key: value for key, value in initial.items() if key.startswith(f"{head}.")}
    new.load_state_dict({key.removeprefix(f"{head}."): value for key, value in start.items()})
    _replace(model, head, new)
    report = Report(method="plasticity_injection")
    for key, parameter in _head(model, head).named_parameters():
        full, part = f"{head}.{key}", key.split(".")[0]
        action, reason = ("injected", "") if part == "new" else ("frozen", f"{part} part of the head")
        report.rows.append(Row(full, full, tuple(parameter.shape), action, reason))
    report.parameters = list(new.parameters())
    report.changed = {row.name for row in report.rows if row.action == "injected"}
    return report


@register
@dataclass
class PlasticityInjection(Method):
    """Calls `inject` on every net and its followers at each boundary; the part before `head` stays shared and trainable.

    The new head starts from the initial weights of the run, as in FIRE's baseline; Nikishin et al. draw new ones. A second
    boundary freezes the new head and adds another one.
    """

    head: str = "head"

    name = "plasticity_injection"
    summary = "frozen old head plus a trainable new one that starts at zero contribution"
    source = "Nikishin et al. 2023 (Deep RL with Plasticity Injection), section 3"
    needs = frozenset({"initial"})
    proven_by = TEXT
    changes_structure = True

    def check(self, state: State) -> None:
        for name, net in state.nets.items():
            _head(net, self.head, f"net {name!r}")

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        report = inject(net, state.initial[name], self.head)
        new = _trainable_part(_head(net, self.head))
        for follower in (f for f, source in state.followers if source is net):
            _replace(follower, self.head, deepcopy(new))
        return report

    def rebuild(self, state: State, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Inject as often as in the nets that were saved, which bring the values."""
        for name, net in state.nets.items():
            depth = 0
            while any(f".{self.head}.{'old.' * (depth + 1)}" in f".{key}" for key in saved[name]):
                depth += 1
            for module in (net, *(f for f, source in state.followers if source is net)):
                while isinstance(head := _head(module, self.head), InjectedHead):  # back to fewer injections
                    unwrap(module).set_submodule(self.head, head.old.requires_grad_(True))
                for _ in range(depth):
                    _replace(module, self.head, deepcopy(_trainable_part(_head(module, self.head))))


def _replace(model: nn.Module, head: str, new: nn.Module) -> None:
    model = unwrap(model)
    old = _head(model, head)
    inside = {id(p) for p in old.parameters()}
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in inside}
    if not all(name.startswith(f"{head}.") for name in names):
        old = deepcopy(old)  # tied, for example to the embedding, which goes on training
    model.set_submodule(head, InjectedHead(old, new.requires_grad_(True)))


def _head(model: nn.Module, head: str, name: str = "the model") -> nn.Module:
    if replicas_in(model):
        raise UserError("DistributedDataParallel does not see injected modules: wrap the net afterwards")
    model = unwrap(model)
    try:
        return model.get_submodule(head)
    except AttributeError:
        known = ", ".join(child for child, _ in model.named_children())
        wrong = f"plasticity_injection: {name} has no module {head!r}"
        raise UserError(f"{wrong}; set method.head to one of {known}") from None


def _frozen(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.requires_grad_(False).grad = None  # an old gradient would count in the norm for clipping
    return module


def _trainable_part(head: nn.Module) -> nn.Module:
    while isinstance(head, InjectedHead):
        head = head.new
    return head
