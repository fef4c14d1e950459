"""A trial: short paired branches from one state of a network, one per method, that tell which method helps it."""

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from fire_core.attach import Attached, attach, check_nets
from fire_core.columns import columns
from fire_core.errors import UserError
from fire_core.methods import create
from fire_core.methods.method import Method
from fire_core.optim_state import weights_of
from fire_core.seeding import derive, kept_chance, seeded
from fire_core.targets import shorten
from fire_core.wrapped_models import is_sharded, replicas_in

PARTS = 10  # of a branch, which is scored after each
COLUMNS = ("method", "right after", "at the end", "minus none [95 %]", "ahead from step", "seconds")
METHODS = ("none", "clear", "fire", "rescale", "shrink_perturb", "full_reset")


def trial(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer],
    step: Callable[[Any, Any, Any], Any],
    *,
    batches: Iterable[Any] | Callable[[int], Iterable[Any]],
    steps: int,
    repeats: int = 3,
    score: Callable[[Any], float] | None = None,
    methods: Sequence[str | Method] | Mapping[str, str | Method] = METHODS,
    initial: Mapping[str, Any] | None = None,
    followers: Mapping[str, str] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer_state: str = "clear_changed",
    seed: int = 0,
    progress: bool = True,
) -> "TrialResult":
    """Train a copy of the model after each method for `steps` updates, `repeats` times, and compare them with "none".

    The caller's model, optimizer, order of the data and random generators (Python's, NumPy's, those of the CPU and of CUDA)
    stay as they are. All branches of a repeat see the same batches and the same random numbers. Repeats differ in the order
    of the batches, where it is random, and in the methods' own draws. Cost: `repeats * steps` updates and eleven scores
    for each method and for "none", and the memory of one more copy of model and optimizer. Ctrl-C ends the trial early.

    Args:
        model, optimizer: as they are when the new phase begins; for several networks, name -> network, name -> optimizer.
        step: step(model, optimizer, batch) makes one update of what it is given, and returns the loss. It must not change
            anything else, such as a learning-rate schedule or a GradScaler that it holds. Methods that act on gradients
            see them as the optimizer does, after clipping; the gradient of a penalty is added there.
        batches: the data to come: a list of batches, a DataLoader, or a function of the number of the repeat that returns
            an iterable. They are read again if they end before `steps`, and those of a repeat are held in memory. Methods
            that look at the data need pairs (inputs, targets).
        score: score(model) -> number, better if higher. Without it, the mean training loss over a tenth of the steps counts.
        methods: names, or methods made with `fire_core.methods.create`; label -> method where two share a name.
        initial: a copy of the state dict of the starting weights (name -> copy), for methods that go back to them.
        followers: name of a target network in `model` -> name of its source. It is copied from there after a treatment.
        loss: (output, target) -> scalar, for methods that take gradients of their own.
        optimizer_state: what happens to the optimizer's memory, see `attach`.

    Raises: UserError for DDP, FSDP, hooks of parameters or optimizers, no starting weights, an unknown method, an iterator.
    """
    methods = [methods] if isinstance(methods, str | Method) else methods
    single, several = not isinstance(model, Mapping), isinstance(optimizer, Mapping)
    nets: dict[str, Any] = {"net": model} if single else dict(model)  # type: ignore[arg-type]
    starts = {"net": initial} if single and initial else dict(initial or {})
    named = methods if isinstance(methods, Mapping) else {str(getattr(m, "name", m)): m for m in methods}
    if len(named) < len(methods):
        raise UserError(f"methods: two have the same name in {', '.join(named)}: give label -> method")
    chosen = {n: m if isinstance(m, Method) else create(m) for n, m in {"none": "none", **named}.items()}
    _check(chosen, nets, optimizer, starts, loss, batches, steps, repeats)
    following, runs = followers or {}, set[str]()  # scores and data of "none"
    if unknown := {*following, *following.values()} - nets.keys():
        raise UserError(f"followers names {min(unknown)!r}: the networks are {', '.join(nets)}")
    result = TrialResult({m: [] for m in chosen}, dict.fromkeys(chosen, 0.0), steps, score is not None)
    options: dict[str, Any] = {"initial": starts, "loss": loss, "optimizer_state": optimizer_state}
    trained = lambda p: (p._version, id(p.grad), getattr(p.grad, "_version", 0))  # noqa: E731
    given = weights_of(optimizer.values() if isinstance(optimizer, Mapping) else [optimizer])
    given |= {id(p): p for net in nets.values() for p in net.parameters()}
    # gradients are kept, so that no later one can have the id of one of them
    own = {p: (trained(p), p.grad) for p in given.values() if not p.is_inference()}

    def branch(method: Method) -> list[float]:  # its copies are gone when it returns
        copies, optimizers = _copy(nets, optimizer)
        pairs = [(copies[target], copies[of]) for target, of in following.items()]
        treated = {key: net for key, net in copies.items() if key not in following}
        treatment = attach(deepcopy(method), treated, optimizers, followers=pairs, **options)
        return _train(treatment, copies["net"] if single else copies, several, step, score, data)

    with kept_chance(_generators(batches)):
        try:
            for repeat in range(repeats):
                chance = derive(seed, "trial", repeat)
                data = _fetch(batches, repeat, steps, chance)
                options |= {"batches": lambda data=data: (batch for batch, _ in data), "seed": chance}
                for name, method in chosen.items():
                    began = time.perf_counter()
                    scores = branch(method)
                    if any(trained(p) != before for p, (before, _) in own.items()):
                        raise UserError(
                            "step has trained the model of trial() itself, or what else its optimizer holds, not the copies"
                        )
                    result.scores[name].append(scores)
                    runs |= {re.sub(r" at 0x\w+", "", str((scores, data)))} if name == "none" else set()
                    result.repeated = len(runs) == 1
                    result.seconds[name] += time.perf_counter() - began
                    if progress:
                        done, total = sum(map(len, result.scores.values())), len(chosen) * repeats
                        left = sum(result.seconds.values()) * (total - done) / done
                        line = f"\rtrial: {done} of {total} branches, {left:.0f} s left "
                        print(line, end="\n" * (done == total), file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            result.stopped = True
    return result


@dataclass
class TrialResult:
    """What `trial` returns; `print` shows it as a table.

    scores: method -> for each repeat, the score right after the treatment (NaN without `score`) and after each tenth of the
    steps. seconds: of all branches of a method. stopped: whether Ctrl-C ended the trial; incomplete repeats are left out.
    repeated: whether all repeats of "none" were one and the same run, as the order of their batches did not differ.
    """

    scores: dict[str, list[list[float]]]
    seconds: dict[str, float]
    steps: int
    higher_is_better: bool
    stopped: bool = False
    repeated: bool = False

    @property
    def repeats(self) -> int:
        """The number of complete repeats."""
        return min(map(len, self.scores.values()))

    @property
    def idle(self) -> list[str]:
        """The methods that changed nothing, so that all their runs are those of "none"."""
        ends = {name: [s for each in runs for s in each[-PARTS:]] for name, runs in self.scores.items()}
        return [m for m in ends if m != "none" and all(a == b for a, b in zip(ends[m], ends["none"]))]

    def gains(self, method: str) -> np.ndarray:
        """Return the lead of `method` over "none", (repeats, scores): -inf where it diverged, inf where "none" alone did."""
        ends, none = (np.array(self.scores[name][: self.repeats]) for name in (method, "none"))
        gains = (ends - none) * (1 if self.higher_is_better else -1)
        gains = np.where(np.isfinite(none[:, -1:]), gains, np.inf)
        return np.where(np.isfinite(ends[:, -1:]), gains, -np.inf)

    def margin(self, method: str | None = None) -> float:
        """Return half the width of the interval of a method's gain (None: of a typical method).

        The intervals of all methods hold together with a probability of .95: Student's t with Bonferroni's correction. The
        variance is that of the residuals of method and repeat over all methods, or the method's own if that is larger.
        """
        idle = self.idle
        acting = [name for name in self.scores if name not in idle]
        ends = np.array([self.gains(name)[:, -1] for name in acting])  # (methods, repeats)
        if self.repeats < 2 or self.repeated or len(ends := ends[np.isfinite(ends).all(1)]) < 2:
            return math.inf
        residuals = ends - ends.mean(0) - ends.mean(1, keepdims=True) + ends.mean()
        degrees = (len(ends) - 1) * (self.repeats - 1)
        variance = 2 * (residuals**2).sum() / degrees
        if method is not None and np.isfinite(own := self.gains(method)[:, -1]).all():
            variance = max(variance, own.var(ddof=1))
        return student_t(1 - 0.025 / (len(acting) - 1), degrees) * math.sqrt(variance / self.repeats)

    @property
    def best(self) -> str | None:
        """The method with the largest gain of those with an interval above 0; "none" if all lie below; else None."""
        left_out = {"none", *self.idle}
        compared = [name for name in self.scores if name not in left_out]
        mean = {name: self.gains(name)[:, -1].mean() for name in compared}
        lost = [name for name in mean if mean[name] == math.inf and self.gains(name)[:, -1].min() > 0]
        margins = {name: self.margin(name) for name in compared}
        if ahead := lost or [name for name in mean if mean[name] > margins[name]]:
            ends = {name: np.array(self.scores[name])[: self.repeats, -1].mean() for name in ahead}
            sign = 1 if self.higher_is_better else -1  # of ends, which count where several are ahead by inf
            return max(ahead, key=lambda name: (mean[name], sign * ends[name]))
        behind = [mean[name] < -margins[name] or mean[name] == -math.inf for name in mean]
        return "none" if behind and all(behind) else None

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per method; the columns are those of the printed table."""
        rows = []
        for name, scores in self.scores.items():
            gains, ends = self.gains(name).mean(0), np.array(scores[: self.repeats]).mean(0)
            end, margin = gains[-1], self.margin(name) if np.isfinite(gains[-1]) else 0.0
            ahead = next((i for i in range(PARTS) if gains[-1 - i] <= 0), PARTS)  # of the last tenths
            gain = f"{end:+.3g} [{end - margin:.3g}, {end + margin:.3g}]" if name != "none" else ""
            gain = "changed nothing" if name in self.idle else gain
            step = self.steps * (PARTS - ahead + 1) // PARTS if ahead else None
            rows += [dict(zip(COLUMNS, [name, *map(float, ends[[0, -1]]), gain, step, self.seconds[name]]))]
        return rows

    def __str__(self) -> str:
        if self.repeats < 2:
            return f"trial: stopped after {self.repeats} complete repeats; two are needed to compare methods"
        what = "score, higher is better" if self.higher_is_better else "training loss, lower is better"
        spread = np.std([scores[-1] for scores in self.scores["none"][: self.repeats]], ddof=1)
        made = f"{self.repeats} repeats of {self.steps} steps{', stopped early' * self.stopped}; {what}; a gain is positive."
        varies = "In at least one repeat, training without a treatment diverged."
        if np.isfinite(spread):
            varies = f"none varies by {spread:.2g} between repeats; a gain of {self.margin():.2g} would have been seen."
            if self.repeated:
                varies = "All repeats of none are the same run: let the order of batches differ, as with shuffle=True."
        lines = [columns(self.rows()), made, varies]
        if "full_reset" in self.scores:
            lost = self.gains("full_reset")[:, -1].mean()
            lines.append(f"A full reset ends {abs(lost):.2g} {'ahead of' if lost > 0 else 'behind'} none.")
        return "\n".join([*lines, f"best: {self.best}." if self.best else "Nothing is decided."])


@cache
def student_t(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, to about 1e-6. probability: in (.5, 1)."""
    angle = np.linspace(0, math.pi / 2, 20_001)  # t = sqrt(degrees) tan(angle)
    density = np.cos(angle) ** (degrees - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(degrees) * math.tan(np.interp(2 * probability - 1, mass / mass[-1], angle))


def _check(
    methods: Any, nets: Any, optimizer: Any, initial: Any, loss: Any, batches: Any, steps: int, repeats: int
) -> None:
    check_nets(nets, initial)
    if any(replicas_in(net) or is_sharded(net.parameters()) for net in nets.values()):
        raise UserError("trial works in one process: give the network inside DistributedDataParallel or FSDP")
    if not isinstance(optimizer, Optimizer | Mapping):
        raise UserError(f"optimizer is a {type(optimizer).__name__}: give one, or name -> optimizer")
    parameters = {name: p for net in nets.values() for name, p in net.named_parameters()}
    hooked = [n for n, p in parameters.items() if p._backward_hooks or p._post_accumulate_grad_hooks]
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer.values()
    hooks = [getattr(o, f"_optimizer_step_{at}_hooks", None) for o in optimizers for at in ("pre", "post")]
    if hooked or any(hooks):
        of = shorten(hooked) or "the optimizer"
        wrong = f"a copy would lose the hooks of {of}: remove them (wandb.unwatch)"
        raise UserError(f"{wrong}, and if they change gradients or weights, do that in step")
    if not isinstance(steps, int | np.integer) or steps < PARTS or repeats < 2:
        raise UserError(f"steps={steps}, repeats={repeats}: give at least {PARTS} whole steps and 2 repeats")
    if isinstance(batches, Iterator):
        raise UserError("batches is an iterator, read only once: give a list, a DataLoader or a function")
    for label, method in methods.items():
        if "loss" in method.needs and loss is None:
            raise UserError(f"method {label!r} needs the loss of a net on a batch: give loss=")
        named = optimizer if isinstance(optimizer, Mapping) else {}
        others = [group for name in named.keys() - nets.keys() for group in named[name].param_groups]
        held = {id(p) for group in others for p in group["params"]}
        if _acts(method) and not held.isdisjoint(map(id, parameters.values())):
            raise UserError(f"method {label!r} needs optimizers named as the networks: {', '.join(nets)}")
        if not initial and method.takes_initial:
            raise UserError(f"method {label!r} needs starting weights: give initial=, or leave it out")


def _copy(nets: Mapping[str, nn.Module], optimizer: Any) -> tuple[dict[str, nn.Module], Any]:
    """Return copies of which the optimizers step the networks, with the attributes that a plain copy of theirs omits."""
    memo: dict[int, Any] = {}
    copies = deepcopy((dict(nets), optimizer), memo)
    for own in [optimizer] if isinstance(optimizer, Optimizer) else optimizer.values():
        made = memo[id(own)]
        for key, value in vars(own).items():
            if key not in vars(made) and not callable(value):  # a schedule puts its own `step` there
                setattr(made, key, deepcopy(value, memo))
    return copies


def _train(treatment: Attached, model: Any, several: bool, step: Any, score: Any, data: Any) -> list[float]:
    """Treat, train and score a copy. data: (batch, whether a pass over the data ends with it) of each step."""
    seed, losses = treatment.seed, list[Any]()

    def measured() -> float:
        if score is None and None in losses:
            raise UserError("step returned no loss: let it return the loss, or give score=")
        if score is None:
            return sum(map(float, losses)) / len(losses) if losses else math.nan
        modes = [(each, each.training) for net in treatment.state.nets.values() for each in net.modules()]
        with seeded(seed), treatment.evaluating():
            value = float(score(model))
        for each, training in modes:
            each.training = training
        return value

    with seeded(seed):
        treatment.boundary(1)
    scores = [measured()]
    hooks = _act_at_steps(treatment, several)
    with seeded(seed):
        for number, (batch, last) in enumerate(data, 1):  # whose tensors may be views of all data
            new = {id(t): t.detach().clone() for t in tree_leaves(batch) if isinstance(t, Tensor)}
            loss = step(model, treatment.optimizers if several else treatment.optimizer, deepcopy(batch, new))
            treatment.after_step()
            if last:
                treatment.after_pass()
            losses.append(loss.detach() if isinstance(loss, Tensor) else loss)  # without its graph
            if number * PARTS // len(data) > (number - 1) * PARTS // len(data):  # a tenth is over
                scores.append(measured())
                losses.clear()
    for hook in hooks:  # a circle of references would keep the copy in memory
        hook.remove()
    treatment.method.close()
    return scores


def _act_at_steps(treatment: Attached, several: bool) -> list[Any]:
    """Let a method act at the steps of its optimizers, whose caller does not know it: its penalty is a gradient."""

    treatment._has_gradients = treatment._has_penalty = True  # `act` makes the calls, if a step has an update

    def act(net: str, optimizer: Optimizer, given: Any, named: Any) -> None:
        if _acts(treatment.method) and any(map(callable, (*given[1:], *named.values()))):
            raise UserError(f"method {treatment.method.name!r} acts before step(): leave out its closure")
        penalty = treatment.penalty()
        if isinstance(penalty, Tensor) and penalty.requires_grad:
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            for parameter, slope in zip(trained, torch.autograd.grad(penalty, trained, allow_unused=True)):
                if slope is not None:
                    parameter.grad = slope if parameter.grad is None else parameter.grad + slope
        treatment.before_step(*[net] if several else [])

    names = treatment.optimizers.keys() & treatment.state.nets
    wraps = [(name, treatment.optimizers[name]) for name in names]  # accelerate's have the optimizer within
    return [getattr(o, "optimizer", o).register_step_pre_hook(partial(act, name)) for name, o in wraps]


def _acts(method: Method) -> bool:
    """Return whether a method acts when the gradients of a step are complete."""
    kind = type(method)
    return kind.penalty is not Method.penalty or kind.before_step is not Method.before_step


def _fetch(batches: Any, repeat: int, steps: int, seed: int) -> list[tuple[Any, bool]]:
    """Return the batches of one repeat, which all its branches see, and whether a pass over the data ends with each."""
    found: list[tuple[Any, bool]] = []
    with seeded(seed):
        for generator in _generators(batches):
            generator.manual_seed(seed)
        while len(found) < steps:
            source = batches(repeat) if callable(batches) else batches
            if source is batches and isinstance(batches, Sequence):
                source = (batches[i] for i in torch.randperm(len(batches)).tolist())
            wanted = steps - len(found)
            read = list(islice(source, wanted + 1))  # one more, to see whether the data end
            if not read:
                raise UserError("batches yields nothing")
            found += [(batch, number == len(read)) for number, batch in enumerate(read[:wanted], 1)]
    return found


def _generators(batches: Any) -> list[torch.Generator]:
    """Return the generators that a DataLoader draws its order from, beside the global one."""
    if not isinstance(batches, DataLoader):
        return []
    owners = (batches, batches.sampler, getattr(batches.batch_sampler, "sampler", None))
    return [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
