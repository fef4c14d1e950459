"""The part that the callbacks of all frameworks share: apply FIRE and the policy for optimizer state at a firing."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fire_core.engine import FireSettings
from fire_core.errors import UserError, did_you_mean
from fire_core.optim_state import check_policy, reset_optimizer_state
from fire_core.projection import fire
from fire_core.report import Report
from fire_core.targets import find_targets
from fire_core.triggers import Trigger


class TriggeredFire:
    """A trigger with the settings of `fire` and the policy for optimizer state ("clear_changed", "clear", "keep").

    The constructor checks the settings and `check` the targets, so that a mistake stops the run before training and not
    at the first firing. Both raise UserError.
    """

    def __init__(self, trigger: Trigger, optimizer_state: str, settings: Mapping[str, Any]) -> None:
        FireSettings.of(**{name: value for name, value in settings.items() if name != "targets"})
        if settings.get("scale") == "initial":
            raise UserError(
                "scale='initial' needs the starting weights, which a callback does not have: call fire() yourself"
            )
        check_policy(optimizer_state)
        self.trigger, self.optimizer_state, self.settings = trigger, optimizer_state, dict(settings)
        self._start = copy.deepcopy(trigger.state_dict())
        self.reports: list[tuple[int, Report]] = []
        self._rounds = 0
        self._names: set[str] = set()

    def restart(self) -> None:
        """Put the trigger back to where it began, for training that starts at step 0 again."""
        self.trigger.load_state_dict(copy.deepcopy(self._start))

    def check(self, model: nn.Module) -> None:
        """Raise UserError for targets that the model does not have."""
        find_targets(model, self.settings.get("targets", "all"))

    def apply(self, model: nn.Module, optimizers: Iterable[Optimizer], step: int) -> Report:
        """Apply FIRE to the model, then the policy to the optimizers; keep the report and return it.

        With several processes, all of them treat the model together.
        """
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and torch.distributed.get_world_size() > 1:
            report = fire(model, group=torch.distributed.group.WORLD, **self.settings)
        else:
            report = fire(model, **self.settings)
        reset_optimizer_state(list(optimizers), self.optimizer_state, report)
        self.reports.append((step, report))
        return report

    def is_due(self, step: int, observed: Mapping[str, float], device: torch.device) -> bool:
        """Return whether the trigger fires; with several processes, the answer of rank 0, sent over `device`."""
        self._names |= observed.keys()
        due = self.trigger(step, observed)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            decision = torch.tensor(due, dtype=torch.uint8, device=device)
            torch.distributed.broadcast(decision, 0)
            due = bool(decision)
        return due

    def end_round(self) -> None:
        """Count a round of training and evaluation. Raises UserError if two have not given a metric that is awaited."""
        self._rounds += 1
        if self._rounds > 1 and (missing := self.trigger.waits_for()):
            raise UserError(
                f"the trigger waits for metric {missing[0]!r}, which two rounds of evaluation did not give"
                f"{did_you_mean(missing[0], self._names)}; they gave {', '.join(sorted(self._names)) or 'none'}"
            )


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are single numbers, as floats; booleans are left out."""
    found = {}
    for name, value in metrics.items():
        if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.numel() != 1):
            continue
        if isinstance(value, int | float | torch.Tensor):
            found[name] = float(value)
    return found
