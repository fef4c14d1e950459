"""A trial: short paired branches from one state of a network, one per method, that tell which method helps it.

    result = trial(model, optimizer, step, batches=loader, steps=500, score=accuracy, initial=start)
    print(result)
    result.best  # the name of a method, or None if nothing is decided

Each branch trains a copy. The model, the optimizer, the order of the data and all random generators of the caller stay as
they are.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fire_core.attach import Attached, attach
from fire_core.columns import columns
from fire_core.errors import UserError
from fire_core.methods import create
from fire_core.methods.method import Method
from fire_core.seeding import derive
from fire_core.wrapped_models import replicas_in

PARTS = 10  # parts of a branch after each of which it is scored
METHODS = ("none", "clear", "fire", "rescale", "shrink_perturb", "full_reset")
Nets = nn.Module | Mapping[str, nn.Module]
Optimizers = Optimizer | Mapping[str, Optimizer]


def trial(
    model: Nets,
    optimizer: Optimizers,
    step: Callable[[Any, Any, Any], Any],
    *,
    batches: Iterable[Any] | Callable[[int], Iterable[Any]],
    steps: int,
    repeats: int = 3,
    score: Callable[[Any], float] | None = None,
    methods: Sequence[str | Method] = METHODS,
    initial: Mapping[str, Any] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer_state: str = "clear_changed",
    seed: int = 0,
    progress: bool = True,
) -> TrialResult:
    """Train a copy of the model after each method for `steps` updates, `repeats` times, and compare them with "none".

    All branches of a repeat see the same batches in the same order and the same random numbers. Repeats differ in the order
    of the batches and in the methods' own draws. Cost: len(methods) * repeats * steps updates, ten scores a branch, and the
    memory of one more copy of model and optimizer.

    Args:
        model, optimizer: as they are when the new phase begins; for several networks, name -> network and name ->
            optimizer.
        step: step(model, optimizer, batch) makes one update of the copy that it is given, and returns its loss.
        batches: the data to come: a list of batches, a DataLoader, or a function of the number of the repeat that returns
            an iterable. Fewer than `steps` batches are read again. The batches of one repeat are held in memory.
        score: score(model) returns a number that is better if it is higher. Without it, branches are compared by their mean
            training loss over a tenth of the steps, which is better if it is lower.
        methods: names, or methods made with `fire_core.methods.create`. "none" is added.
        initial: the state dict of the starting weights (for several networks, name -> state dict), for methods that go back
            to them.
        loss: (output, target) -> scalar, for methods that take gradients of their own.
        optimizer_state: what happens to the optimizer's memory, see `attach`.

    Raises: UserError for DistributedDataParallel, an unknown method, missing starting weights, and an iterator that can be
        read only once.
    """
    chosen = {
        each.name: each for each in (create(m) if isinstance(m, str) else m for m in ("none", *methods))
    }
    nets = {"net": model} if isinstance(model, nn.Module) else dict(model)
    starts = (
        None if initial is None else ({"net": initial} if isinstance(model, nn.Module) else dict(initial))
    )
    _check(chosen, nets, starts, batches, steps, repeats)
    result = TrialResult({name: [] for name in chosen}, steps, higher_is_better=score is not None)
    with _undisturbed(batches):
        try:
            for repeat in range(repeats):
                chance = derive(seed, "trial", repeat)
                data = _fetch(batches, repeat, steps, chance)
                for name, method in chosen.items():
                    branch = _Branch(
                        deepcopy(method), nets, optimizer, starts, loss, optimizer_state, chance, data
                    )
                    result.curves[name].append(branch.run(step, score))
                    if progress:
                        done = sum(map(len, result.curves.values()))
                        line = f"\rtrial: {done} of {len(chosen) * repeats} branches"
                        print(line, end="", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            result.stopped = True
        finally:
            if progress:
                print(file=sys.stderr)
    return result


@dataclass
class Curve:
    """One branch: its scores right after the treatment (with `score`) and after each tenth of the steps, and its time."""

    scores: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class TrialResult:
    """What `trial` returns; `print` shows it as a table.

    curves: method -> one `Curve` a repeat. stopped: whether Ctrl-C ended the trial early.
    """

    curves: dict[str, list[Curve]]
    steps: int
    higher_is_better: bool
    stopped: bool = False

    def gains(self, method: str) -> np.ndarray:
        """Return how far each tenth of a method's branches lies ahead of "none", (complete repeats, scores of a branch)."""
        count = min(map(len, self.curves.values()))  # a trial that was stopped has an incomplete repeat
        ends, none = (
            np.array([curve.scores for curve in self.curves[name][:count]]) for name in (method, "none")
        )
        return (ends - none) * (1 if self.higher_is_better else -1)

    def margin(self, method: str | None = None) -> float:
        """Return half the width of the interval of a method's gain (None: of a typical method).

        The intervals of all methods hold together with a probability of .95: Student's t with Bonferroni's correction. The
        variance is that of the residuals of method and repeat over all methods, or the method's own if that is larger.
        """
        others = [name for name in self.curves if name != "none"]
        gains = np.array([self.gains(name)[:, -1] for name in others])  # (methods, repeats)
        count = gains.shape[1]
        if count < 2:
            return math.inf
        table = np.vstack([gains, np.zeros(count)])
        residuals = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
        degrees = len(others) * (count - 1)
        variance = 2 * (residuals**2).sum() / degrees
        if method is not None:
            variance = max(variance, self.gains(method)[:, -1].var(ddof=1))
        return student_t(1 - 0.025 / len(others), degrees) * math.sqrt(variance / count)

    @property
    def best(self) -> str | None:
        """The method with the largest gain among those whose interval lies above 0; "none" if all lie below it; else
        None: nothing is decided."""
        low, high = {}, {}
        for name in self.curves.keys() - {"none"}:
            mean, margin = self.gains(name)[:, -1].mean(), self.margin(name)
            low[name], high[name] = mean - margin, mean + margin
        ahead = [name for name in low if low[name] > 0]
        if ahead:
            return max(ahead, key=lambda name: self.gains(name)[:, -1].mean())
        return "none" if all(value < 0 for value in high.values()) else None

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per method; the columns are those of the printed table."""
        rows = []
        for name, curves in self.curves.items():
            gains, count = self.gains(name), len(self.gains(name))
            means = gains.mean(0)
            ahead = 0  # the number of tenths at the end in which the method was ahead
            while ahead < PARTS and means[-1 - ahead] > 0:
                ahead += 1
            ends = np.array([curve.scores for curve in curves[:count]]).mean(0)
            row: dict[str, Any] = {
                "method": name,
                "right after": float(ends[0]),
                "at the end": float(ends[-1]),
            }
            mean, margin = float(means[-1]), self.margin(name)
            row["minus none [95 %]"] = (
                "" if name == "none" else f"{mean:+.3g} [{mean - margin:.3g}, {mean + margin:.3g}]"
            )
            row["ahead from step"] = self.steps * (PARTS - ahead + 1) // PARTS if ahead else None
            rows.append(row | {"seconds": sum(curve.seconds for curve in curves) / len(curves)})
        return rows

    def __str__(self) -> str:
        count = min(map(len, self.curves.values()))
        if count < 2:
            return f"trial: stopped after {count} complete repeats; two are needed to compare methods"
        ends = np.array([curve.scores[-1] for curve in self.curves["none"]])
        what = "score, higher is better" if self.higher_is_better else "training loss, lower is better"
        verdict = "nothing is decided" if self.best is None else f"best: {self.best}"
        lines = [
            columns(self.rows()),
            f"{count} repeats of {self.steps} steps{', stopped early' * self.stopped}; {what}; a gain is positive.",
            f"none varies by {ends.std(ddof=1):.2g} between repeats; a gain of {self.margin():.2g} would have been seen.",
            f"{verdict}.",
        ]
        if "full_reset" in self.curves:
            lost = self.gains("full_reset")[:, -1].mean()
            lines.insert(3, f"A full reset ends {abs(lost):.2g} {'ahead of' if lost > 0 else 'behind'} none.")
        return "\n".join(lines)


def student_t(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution, to about 1e-6. probability: in (.5, 1)."""
    angle = np.linspace(0, math.pi / 2, 200_001)  # t = sqrt(degrees) tan(angle)
    density = np.cos(angle) ** (degrees - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    place = np.interp(2 * probability - 1, mass / mass[-1], angle)
    return math.sqrt(degrees) * math.tan(place)


def _check(
    methods: Mapping[str, Method],
    nets: Mapping[str, nn.Module],
    initial: Any,
    batches: Any,
    steps: int,
    repeats: int,
) -> None:
    if any(replicas_in(net) for net in nets.values()):
        raise UserError(
            "trial works in one process: give the network inside DistributedDataParallel (model.module)"
        )
    if steps < PARTS or repeats < 2:
        raise UserError(f"steps={steps}, repeats={repeats}: give at least {PARTS} steps and 2 repeats")
    if isinstance(batches, Iterator):
        raise UserError(
            "batches is an iterator, which can be read only once: give a list, a DataLoader or a function"
        )
    lacking = [name for name, method in methods.items() if "initial" in method.needs and initial is None]
    if lacking:
        raise UserError(
            f"{', '.join(lacking)}: the starting weights are missing: give initial=, a state dict from then"
        )


class _Branch:
    """A copy of model and optimizer, with one method."""

    def __init__(
        self,
        method: Method,
        nets: Mapping[str, nn.Module],
        optimizer: Optimizers,
        initial: Any,
        loss: Any,
        optimizer_state: str,
        seed: int,
        data: list[Any],
    ) -> None:
        self.nets, self.optimizer = deepcopy(
            (dict(nets), optimizer)
        )  # together: the copy steps the copied weights
        self.single, self.seed, self.data = isinstance(optimizer, Optimizer), seed, data
        self.treatment = attach(
            method,
            self.nets,
            self.optimizer,
            initial=initial or {},
            loss=loss,
            batches=lambda: iter(data),
            optimizer_state=optimizer_state,
            seed=seed,
        )

    def run(self, step: Any, score: Any) -> Curve:
        """Treat, train and score the copy."""
        model = self.nets["net"] if list(self.nets) == ["net"] else self.nets
        began, curve, losses = time.perf_counter(), Curve(), []
        steps = len(self.data)
        with _seeded(self.seed):
            self.treatment.boundary(1)
        if score is not None:
            curve.scores.append(self._score(score, model))
        hooks = _act_at_steps(self.treatment)
        with _seeded(self.seed):
            for number, batch in enumerate(self.data, 1):
                optimizers = self.treatment.optimizer if self.single else self.treatment.optimizers
                losses.append(step(model, optimizers, batch))
                if number * PARTS // steps > (number - 1) * PARTS // steps:  # a tenth is over
                    part = [float(value) for value in losses if value is not None]
                    if score is None and not part:
                        raise UserError("step returned no loss: let it return the loss, or give score=")
                    curve.scores.append(sum(part) / len(part) if score is None else self._score(score, model))
                    losses = []
        for hook in hooks:
            hook.remove()
        curve.seconds = time.perf_counter() - began
        return curve

    def _score(self, score: Any, model: Any) -> float:
        modes = {module: module.training for net in self.nets.values() for module in net.modules()}
        with _undisturbed(None), self.treatment.evaluating():
            value = float(score(model))
        for module, training in modes.items():
            module.training = training
        return value


def _act_at_steps(treatment: Attached) -> list[Any]:
    """Let a method act at every step of its optimizers, whose caller does not know it: its penalty is a gradient."""

    def before(optimizer: Optimizer, *_: Any) -> None:
        penalty = treatment.penalty()
        if isinstance(penalty, Tensor) and penalty.requires_grad:
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            for parameter, slope in zip(trained, torch.autograd.grad(penalty, trained, allow_unused=True)):
                if slope is not None:
                    parameter.grad = slope if parameter.grad is None else parameter.grad + slope
        treatment.before_step()

    def after(*_: Any) -> None:
        treatment.after_step()

    used = list(treatment.optimizers.values())
    return [o.register_step_pre_hook(before) for o in used] + [used[-1].register_step_post_hook(after)]


# ---------------------------------------------------------------------------------------------------- data and chance
def _fetch(batches: Any, repeat: int, steps: int, seed: int) -> list[Any]:
    """Return the batches of one repeat, which all its branches see."""

    def once() -> Iterable[Any]:
        if callable(batches):
            return batches(repeat)
        if isinstance(batches, Sequence):
            order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed))
            return (batches[int(i)] for i in order)
        for generator in _generators(batches):
            generator.manual_seed(seed)
        return batches

    found: list[Any] = []
    with _seeded(seed):
        while len(found) < steps:
            before = len(found)
            found += islice(once(), steps - before)
            if len(found) == before:
                raise UserError("batches yields nothing")
    return found


def _generators(batches: Any) -> list[torch.Generator]:
    """Return the generators that a DataLoader draws its order from, beside the global one."""
    if not isinstance(batches, DataLoader):
        return []
    owners = (batches, batches.sampler, batches.batch_sampler)
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


@contextmanager
def _undisturbed(batches: Any) -> Iterator[None]:
    """Restore the states of all random generators after the block."""
    own = [(generator, generator.get_state()) for generator in _generators(batches)]
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for generator, state in own:
                generator.set_state(state)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed all global generators in the block; before and after it they are the caller's."""
    with _undisturbed(None):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
