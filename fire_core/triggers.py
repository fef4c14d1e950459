"""Triggers: objects that decide from the step and the metrics whether it is time to act.

A trigger never touches the model, and it remembers plain values only. Save its `state_dict()` with your checkpoint; a
resumed run then fires at the same steps as one that never stopped.
"""

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from fire_core.errors import UserError, check_settings, did_you_mean

Observed = Mapping[str, float]
MOST_MISSED = 100


class Trigger:
    """Base class of all triggers. A subclass has a `metric` and overrides `decide`, or it overrides the call itself.

    Call a trigger with a step that never decreases (updates, environment steps, ...) and the metrics known by then.
    """

    MEMORY: tuple[str, ...] = ()  # attributes that a resumed run needs
    metric = ""  # name of the metric that the trigger observes, if it does
    missed = 0  # calls with metrics, but never the one that this trigger waits for

    def __call__(self, step: int, observed: Observed | None = None) -> bool:
        """Return whether it is time to act. Every call counts as an observation, whatever the answer.

        Raises UserError for NaN, and for a metric that is missing from the first MOST_MISSED calls with metrics.
        """
        if not observed:
            return False
        if self.metric not in observed:
            self.missed += self.missed >= 0
            if self.missed >= MOST_MISSED:
                near = did_you_mean(self.metric, map(str, observed))
                wrong = f"{type(self).__name__} waits for metric {self.metric!r}"
                raise UserError(f"{wrong}, which none of {self.missed} calls with metrics carried{near}")
            return False
        self.missed = -1  # seen once: it exists
        value = float(observed[self.metric])
        if math.isnan(value):
            raise UserError(f"metric {self.metric!r} is NaN, and no trigger can decide on it: stop the run")
        return self.decide(value)

    def decide(self, value: float) -> bool:
        """Return whether it is time to act, given a new value of `metric`."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what the trigger remembers, as plain values."""
        return {n: v.state_dict() if isinstance(v := getattr(self, n), Trigger) else v for n in self.MEMORY}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises UserError if the state belongs to another kind of trigger."""
        if set(state) != set(self.MEMORY):
            wrong = f"state with {sorted(state)} does not fit {type(self).__name__}"
            raise UserError(f"{wrong}, which remembers {sorted(self.MEMORY)}")
        for name in self.MEMORY:
            if isinstance(own := getattr(self, name), Trigger) and state[name] is not None:
                own.load_state_dict(state[name])
            else:
                setattr(self, name, state[name])


class EveryNSteps(Trigger):
    """Fires at steps first, first + n, ..., by default n, 2n, ...; a step that jumps over several of them fires once."""

    MEMORY = ("done",)

    def __init__(self, n: int, first: int | None = None) -> None:
        self.n = _positive("n", n)
        self.first = self.n if first is None else _positive("first", first)
        self.done = 0

    def __call__(self, step: int, observed: Observed | None = None) -> bool:
        reached = max(0, step - self.first + self.n) // self.n
        due = reached > self.done
        self.done = max(self.done, reached)
        return due


class Plateau(Trigger):
    """Fires when `metric` has not improved on its best value by more than `min_change` in `patience` observations.

    The next observation after a firing is the first of a new search. mode: "min" where smaller is better, else "max".
    """

    MEMORY = ("best", "waited")

    def __init__(self, metric: str, patience: int, *, mode: str = "min", min_change: float = 0.0) -> None:
        self.metric, self.mode, self.min_change = metric, mode, min_change
        check_settings(self, mode="min max")
        self.patience = _positive("patience", patience)
        self.best: float | None = None
        self.waited = 0

    def decide(self, value: float) -> bool:
        gain = math.inf if self.best is None else (self.best - value) * (1 if self.mode == "min" else -1)
        self.best, self.waited = (value, 0) if gain > self.min_change else (self.best, self.waited + 1)
        if fires := self.waited >= self.patience:
            self.best, self.waited = None, 0
        return fires


class Above(Trigger):
    """Fires when `metric` is above `limit`, and again only after it has been at or below it."""

    MEMORY = ("armed",)

    def __init__(self, metric: str, limit: float) -> None:
        self.metric, self.limit = metric, limit
        self.armed = True

    def decide(self, value: float) -> bool:
        fires = self.armed and value > self.limit
        self.armed = value <= self.limit
        return fires


class Fall(Trigger):
    """Fires when `metric` falls below `share` (0 to 1) of its highest value, below zero by as much; then forgets it."""

    MEMORY = ("highest",)

    def __init__(self, metric: str, share: float) -> None:
        self.metric, self.share = metric, share
        check_settings(self, share="(0, 1)")
        self.highest: float | None = None

    def decide(self, value: float) -> bool:
        best = self.highest
        fires = best is not None and value < best * (self.share if best > 0 else 2.0 - self.share)
        self.highest = None if fires else value if best is None else max(best, value)
        return fires


class Cooldown(Trigger):
    """Fires when `trigger` does, but not within `steps` steps of its own last firing; firings in between are lost."""

    MEMORY = ("last", "trigger")

    def __init__(self, trigger: Trigger, steps: int) -> None:
        self.trigger, self.steps = trigger, _positive("steps", steps)
        self.last: int | None = None

    def __call__(self, step: int, observed: Observed | None = None) -> bool:
        if not self.trigger(step, observed) or (self.last is not None and step - self.last < self.steps):
            return False
        self.last = step
        return True


def _positive(name: str, value: int) -> int:
    if not isinstance(value, Integral) or value < 1:
        raise UserError(f"{name}={value!r}: give a whole number, at least 1")
    return int(value)
