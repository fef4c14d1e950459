"""A method with everything that it works on, for any training loop. Its calls, in order: boundary(phase); in every step
penalty(), before_step(), after_step(); after_pass(); around evaluations evaluating(). See docs/how-to/any_method.md."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError
from fire_core.methods import create
from fire_core.methods.method import NEEDS, Method
from fire_core.optim_state import check_policy, copies_follow, reset_optimizer_state, weights_of
from fire_core.report import Report
from fire_core.seeding import derive, kept_chance
from fire_core.state import State, snapshot
from fire_core.targets import check_module, shorten
from fire_core.wrapped_models import reshard, unwrap, unwrap_with

IDLE = Method()  # acts in place of a method before its first phase
Renewal = Callable[[], Mapping[str, Optimizer]]


def attach(
    method: str | Method,
    nets: nn.Module | Mapping[str, nn.Module],
    optimizers: Optimizer | Mapping[str, Optimizer] | None = None,
    *,
    initial: Mapping[str, Any] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    batches: Callable[[], Iterable[Any]] | None = None,
    followers: Sequence[tuple[nn.Module, nn.Module]] = (),
    optimizer_state: str = "clear_changed",
    renew: Renewal | None = None,
    seed: int = 0,
    compiled: bool = False,
) -> "Attached":
    """Return `method` with the networks, optimizers and data that it works on.

    Args:
        method: a name (`fire-core methods` lists them), or what `fire_core.methods.create(name, ...)` returned.
        nets: the network, or name -> network.
        optimizers: the optimizer, or name -> optimizer, with the names of `nets`. Optimizers of other names are not the
            method's, but `optimizer_state` reaches them. Step those of the result: some methods replace them.
        initial: a copy of the state dict of the starting weights, or net name -> copy; by default of the present ones.
        loss: (output, target) -> scalar, for methods that take gradients of their own.
        batches: returns a new iterator of (inputs, targets) of the phase that comes, for methods that look at data.
        followers: (target network, its source) pairs; a follower is copied from its source after a treatment.
        optimizer_state: "clear_changed", "clear" or "keep": what `reset_optimizer_state` does at a boundary.
        renew: returns new optimizers after a method has added modules; by default, ones like the old, with their memory.
        seed: of the method's own randomness, a function of the seed and the phase (UPGD's: of the weights).
        compiled: whether the nets are trained through torch.compile.

    Raises: UserError for settings that do not fit the networks, and for something that the method needs and does not get.
    """
    if not isinstance(nets, Mapping):
        known = isinstance(initial, Mapping | None)
        plain = not known or any(isinstance(value, Tensor) for value in (initial or {}).values())
        nets, initial = {"net": nets}, {"net": initial} if plain else initial
    check_nets(nets, initial or {})
    if not isinstance(optimizers, Mapping | None):
        optimizers = {next(iter(nets)): optimizers}
    for target, source in followers:
        if unwrap(target).state_dict().keys() != unwrap(source).state_dict().keys():
            raise UserError(f"follower {type(target).__name__} has other keys than its source: give the net")
    if lacking := nets.keys() - (initial or nets):
        raise UserError(f"initial lacks the weights of net {min(lacking)!r}: give net name -> state dict")
    start = {name: dict(values) for name, values in (initial or snapshot(nets)).items()}
    if batches is not None and not callable(batches):
        raise UserError(f"batches is a {type(batches).__name__}: give a function, as lambda: loader is")
    state = State(dict(nets), dict(optimizers or {}), [*followers], start, batches, loss, compiled=compiled)
    method = method if isinstance(method, Method) else create(method)
    attached = Attached(method, state, optimizer_state, renew, seed)
    attached.saves_initial = method.takes_initial and initial is None
    return attached


def check_nets(nets: Mapping[str, nn.Module], initial: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UserError for a net that is no module, and if `initial` has other shapes, or is the net's own tensors."""
    for name, net in nets.items():
        check_module(net)
        inner, start = unwrap_with(net, initial.get(name, {}))
        pairs = [(key, p, start[key]) for key, p in inner.named_parameters() if key in start]
        if wrong := [key for key, p, first in pairs if p.shape != first.shape]:
            raise UserError(f"initial has other shapes than net {name!r} in {shorten(wrong)}")


class Attached:
    """What `attach` returns: the calls of a training loop, which act from phase `first_phase` on, and their state."""

    saves_initial = False  # True: checkpoints hold the starting weights

    def __init__(self, method: Method, state: State, policy: str, renew: Renewal | None, seed: int) -> None:
        check_policy(policy)
        has: dict[str, Any] = {"batches": state.batches, "loss": state.loss}
        has["optimizers"] = state.nets.keys() & state.optimizers
        for need in sorted(method.needs & has.keys()):
            if not has[need]:
                raise UserError(f"method {method.name!r} needs {NEEDS[need]}")
        modules = [module for net in state.nets.values() for module in net.modules()]
        compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in modules)
        if "activations" in method.needs and (compiled or state.compiled):
            raise UserError(f"method {method.name!r} needs {NEEDS['activations']}: train with compiled=False")
        if method.changes_optimizer and (lacking := state.nets.keys() - state.optimizers):
            raise UserError(f"{method.name!r} replaces the optimizer of {min(lacking)!r}: give that one, too")
        acts = "keep" if (method.optimizer_state or policy) == "keep" else "clear_changed"
        reset_optimizer_state(state.optimizers, acts, [])  # is refused now rather than at a boundary
        _check_parameters(method, state, renew)
        self.method, self.state, self.seed = method, state, seed
        self.optimizer_state, self.renew = policy, renew
        self._own = dict(state.optimizers)  # the caller's optimizers, which a method may replace
        self._built: dict[str, Optimizer] = {}  # by the method
        self._has_gradients = self._has_penalty = self._evaluating = False
        self._enter(state.phase)
        method.check(state)
        self._choose_optimizers()

    @property
    def acting(self) -> Method:
        """The method, or before its first phase one that does nothing."""
        return self.method if self.state.phase >= self.method.first_phase else IDLE

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers to train with in this phase, by name."""
        return self.state.optimizers

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the only, or first, network."""
        if (name := next(iter(self.state.nets))) not in self.state.optimizers:
            raise UserError(f"attach() was given no optimizer of net {name!r}")
        return self.state.optimizers[name]

    def boundary(self, phase: int, also: Callable[[], Iterable[nn.Parameter]] | None = None) -> Report:
        """Begin phase `phase`: treat the networks, copy followers, clear optimizer memory; return the report.

        Phase 0 begins without a treatment. `also` is called after the treatment, for what the caller changes at a
        boundary; the memory of the parameters that it returns is cleared with that of the treated ones.
        """
        state = self._training()
        self._enter(phase)
        for net in state.nets.values():
            reshard(net)
        if phase == 0:
            self._choose_optimizers()
            return Report(method=self.method.name)
        if (renews := self.acting.changes_structure) and not self.renew:
            renewed(state.nets, self._own)  # raises what it raises before the nets are changed
        with kept_chance():  # a loader that shuffles draws from it
            report = self.acting.boundary(state)
        report.method = self.method.name
        if report.changed:
            for target, source in state.followers:
                unwrap(target).load_state_dict(unwrap(source).state_dict())
        changed = [*([] if renews else report.parameters), *(also() if also else ())]
        reset_optimizer_state(state.optimizers, self.acting.optimizer_state or self.optimizer_state, changed)
        if renews:
            self._renew()
        self._choose_optimizers()
        return report

    def penalty(self) -> Tensor | float:
        """Return a scalar to add to the loss. Call it once a step, before `backward`."""
        self._has_penalty, weights = True, (p for net in self.state.nets.values() for p in net.parameters())
        kind = next(weights, torch.empty(0)).device.type
        if not torch.is_autocast_enabled(kind):
            return self.acting.penalty(self.state)
        with torch.autocast(kind, enabled=False):  # it would lose precision
            return self.acting.penalty(self.state)

    def before_step(self, *nets: str) -> None:
        """Call it when the gradients of a step are complete: unscaled, and not yet clipped.

        nets: names of those that step next, where the networks step one after another; by default all.
        """
        state, self._has_gradients = self._training(), True
        chosen = {name: state.nets[name] for name in nets}
        self.acting.before_step(replace(state, nets=chosen) if nets else state)

    def after_step(self, skipped: bool | Callable[[], bool] = False) -> None:
        """Call it after the optimizer's step.

        skipped: whether a GradScaler left the step out, or a function that tells it, called only if the method acts here.
        """
        acting, state = self.acting, self._training()
        if "gradients" in acting.needs and not self._has_gradients:
            raise UserError(f"method {self.method.name!r} needs {NEEDS['gradients']}")
        if type(acting).penalty is not Method.penalty and not self._has_penalty:
            raise UserError(f"method {self.method.name!r} adds to the loss of every step: call penalty()")
        if type(acting).after_step is not Method.after_step:
            left_out = skipped() if callable(skipped) else skipped
            with copies_follow(state.optimizers.values(), masters=True):
                (acting.after_skip if left_out else acting.after_step)(state)

    def after_pass(self) -> None:
        """Call it after each pass over the data of the phase."""
        with copies_follow(self._training().optimizers.values(), masters=True):
            self.acting.after_pass(self.state)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put in the weights that the method evaluates, and after the block those that train. Blocks may be nested."""
        if outermost := not self._evaluating:
            self.acting.before_evaluation(self.state)
            self._evaluating = True
        try:
            yield
        finally:
            if outermost:
                self._evaluating = False
                self.acting.after_evaluation(self.state)

    def state_dict(self) -> dict[str, Any]:
        """Return the phase, the networks, the optimizers and the method's state, for a checkpoint."""
        state = self._training()
        own = state.initial if self.saves_initial else {}  # empty: attach() was given them
        return ({"initial": own} if self.method.takes_initial else {}) | {
            "phase": state.phase,
            "generator": cast(torch.Generator, state.generator).get_state(),
            "nets": {name: net.state_dict() for name, net in state.nets.items()},
            "optimizers": {name: each.state_dict() for name, each in state.optimizers.items()},
            "method": {"name": self.method.name, "state": self.method.state_dict()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. The state of another method is left out: runs may share a first phase."""
        state = self._training()
        for kind, own in {"nets": [*state.nets], "optimizers": [*state.optimizers]}.items():
            if {*own} - {*(found := [*saved.get(kind, {})])} or (kind == "nets" and len(found) > len(own)):
                raise UserError(f"this state is of {kind} {found}, not of {own}: load what state_dict() gave")
        self._enter(saved["phase"])
        if self.saves_initial and "initial" in saved:
            if not saved["initial"]:
                raise UserError("the saved run was given initial=: give attach() the same starting weights")
            for name, values in saved["initial"].items():
                state.initial[name] = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in values.items()}
        cast(torch.Generator, state.generator).set_state(saved["generator"].cpu())
        self._built = self._built if self.acting.changes_optimizer else {}  # else of a later phase
        if self.method.changes_structure:
            self.method.rebuild(state, saved["nets"])
            self._renew()
        self._choose_optimizers()
        for name, net in state.nets.items():
            net.load_state_dict(saved["nets"][name])
        for name, optimizer in state.optimizers.items():
            optimizer.load_state_dict(saved["optimizers"][name])
        if saved["method"]["name"] == self.method.name:
            self.method.load_state_dict(saved["method"]["state"], state)

    def _training(self) -> State:
        """Return the state. Raises UserError in a block of `evaluating`, whose weights may not be those that train."""
        if self._evaluating:
            raise UserError("treat, train, save and load outside evaluating(): its weights may be averages")
        return self.state

    def _renew(self) -> None:
        self._own = dict(self.renew() if self.renew else renewed(self.state.nets, self._own))

    def _enter(self, phase: int) -> None:
        self.state.phase = phase
        self.state.generator = torch.Generator().manual_seed(derive(self.seed, "method", phase))

    def _choose_optimizers(self) -> None:
        """Put into `optimizers` the caller's, or those that the method makes: once, and again for new parameters."""
        self.state.optimizers.update(self._own)
        for name, net in self.state.nets.items() if self.acting.changes_optimizer else ():
            held = weights_of([self._built[name]] if name in self._built else [])
            if any(p.requires_grad and id(p) not in held for p in net.parameters()):
                _check_rates(self.method, self._own[name])
                self._built[name] = self.acting.build(net, self._own[name])
                _hand_on_hooks(self._own[name], self._built[name])
            self.state.optimizers[name] = self._built[name]


def _check_rates(method: Method, optimizer: Optimizer) -> None:
    """Raise UserError for groups with several rates, or that maximise, where a method makes one optimizer for them."""
    groups, own = optimizer.param_groups, f"method {method.name!r} makes an optimizer of its own"
    rates = sorted({(float(g["lr"]), float(g.get("initial_lr", g["lr"]))) for g in groups})
    if len(rates) > 1:
        raise UserError(f"{own} with one rate, yours have {[rate for rate, _ in rates]}: give all the same")
    if any(group.get("maximize") for group in groups):
        raise UserError(f"{own}, which minimises: negate the loss in place of maximize=True")


def _hand_on_hooks(old: Optimizer, new: Optimizer) -> None:
    """Let `new` call the hooks of steps that `old` has, also after one of them is added or removed."""
    vars(new).update({n: v for n, v in vars(old).items() if "optimizer_step_p" in n and not vars(new).get(n)})


def _check_parameters(method: Method, state: State, renew: Renewal | None) -> None:
    """Raise UserError for parameters that two nets share, or that a method would begin or cease to train."""
    owners: dict[Tensor, str] = {}
    known = {id(p) for name in state.nets.keys() & state.optimizers for p in state.nets[name].parameters()}
    for name, net in state.nets.items():
        for key, parameter in net.named_parameters():
            if (owner := owners.setdefault(parameter, name)) != name:
                raise UserError(
                    f"nets {owner!r} and {name!r} share {key!r}, which would be treated twice: let one of them hold it"
                )
        lost = method.changes_structure and not renew and name not in state.optimizers
        if lost and not weights_of(state.optimizers.values()).keys().isdisjoint(map(id, net.parameters())):
            of = f"method {method.name!r} adds weights to net {name!r}"
            raise UserError(f"{of}: give its optimizer that name, or attach(renew=...)")
        if method.changes_optimizer:
            _check_rates(method, state.optimizers[name])
            if strange := [key for key, p in net.named_parameters() if p.is_complex() and p.requires_grad]:
                raise UserError(f"method {method.name!r} is for real weights, unlike {shorten(strange)}")
        if name in state.optimizers and (method.changes_structure or method.changes_optimizer):
            held = weights_of([state.optimizers[name]])
            if (method.changes_optimizer or not renew) and (other := len(held.keys() - known)):
                raise UserError(
                    f"method {method.name!r} replaces the optimizer of {name!r}, of which {other} parameters are in no net "
                    "with an optimizer: give them one of their own, or nets and optimizers by name"
                )
            if left := [key for key, p in net.named_parameters() if p.requires_grad and id(p) not in held]:
                raise UserError(
                    f"method {method.name!r} would train {shorten(left)} of {name!r}, which its optimizer lacks: freeze it"
                )


def renewed(nets: Mapping[str, nn.Module], old: Mapping[str, Optimizer]) -> dict[str, Optimizer]:
    """Return optimizers like `old` for the parameters that now train, with the memory of those that trained before."""
    made = dict(old)
    for name in [name for name in nets if name in old]:
        net, before = nets[name], cast(Any, old[name])
        if (count := len(before.param_groups)) > 1:
            raise UserError(f"the optimizer of {name!r} has {count} parameter groups: give attach(renew=...)")
        trained = dict.fromkeys(p for p in net.parameters() if p.requires_grad)
        known = inspect.signature(type(before)).parameters.keys() - {"params"}
        present = {k: v for k, v in before.param_groups[0].items() if k not in ("params", "param_names")}
        try:
            made[name] = type(before)(list(trained), **{k: v for k, v in present.items() if k in known})
        except (TypeError, AttributeError, ValueError) as error:  # of a wrapper, as accelerate's is
            kind = type(before).__name__
            raise UserError(
                f"no {kind} can be made of new parameters ({error}): give attach(renew=...)"
            ) from error
        made[name].param_groups[0].update(present)
        made[name].state.update({p: memory for p, memory in before.state.items() if p in trained})
        _hand_on_hooks(before, made[name])
    return made
