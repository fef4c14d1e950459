"""What the callbacks of all frameworks share: when training begins, and what is done at a firing."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fire_core import FireSettings, Report, UserError, find_targets, fire, reset_optimizer_state
from fire_core.copies import Likeness
from fire_core.optim_state import check_policy
from fire_core.triggers import Trigger
from fire_core.wrapped_models import unwrap


class TriggeredFire:
    """Applies `fire` before the step that follows a firing of `trigger`, and appends (global step, Report) to `reports`.

    Averages of the weights in other callbacks start anew then, if they count their updates as torch's `AveragedModel`
    does. Wrong settings raise UserError at once, wrong targets and other copies of the weights when training begins.

    Args:
        optimizer_state: "clear_changed", "clear" or "keep", as in `reset_optimizer_state`.
        keep_copies: leave copies of the weights in other callbacks as they are. name: tells several callbacks apart.
        settings: `targets` and the settings of `FireSettings`, by name; scale="initial" is not possible.
    """

    def __init__(
        self,
        trigger: Trigger,
        optimizer_state: str = "clear_changed",
        *,
        keep_copies: bool = False,
        name: str = "fire",
        **settings: Any,
    ) -> None:
        FireSettings.of(**{key: value for key, value in settings.items() if key != "targets"})
        check_policy(optimizer_state)
        if settings.get("scale") == "initial":
            raise UserError("scale='initial' needs starting weights, so it is not for callbacks: call fire()")
        self.trigger, self.optimizer_state, self.settings = trigger, optimizer_state, settings
        self.keep_copies, self.state_key = keep_copies, f"FireCallback {name!r}"
        self.reports: list[tuple[int, Report]] = []
        self._due = self._known = False  # whether it is to act, and knows the training that goes on
        self._start = copy.deepcopy(self.state_dict())

    def begin(self, step: int, model: nn.Module, others: Iterable[Any]) -> None:
        """Check the targets and the other callbacks; a trigger that has seen another training starts over at step 0."""
        find_targets(model, self.settings.get("targets", "all"))
        self._others = tuple(others)  # the search for averages takes lists and modules alone
        tuple(self._averages(model))
        if step and not self._known:
            wrong = f"{self.state_key} has no state at step {step}"
            raise UserError(f"{wrong}: resume a run with it; name several apart")
        self._known = True
        if step == 0:
            self.load_state_dict(copy.deepcopy(self._start))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trigger, and whether it has fired since the last step."""
        return {**self.trigger.state_dict(), "fire is due": self._due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._due, self._known = state_dict.get("fire is due", False), True
        self.trigger.load_state_dict({n: value for n, value in state_dict.items() if n != "fire is due"})

    def observe(self, step: int, metrics: dict[str, Any]) -> None:
        """Ask the trigger. Of several ranks, what 0 is told decides."""
        scalars = {n: v for n, v in metrics.items() if not isinstance(v, Tensor) or v.numel() == 1}
        observed = {n: float(v) for n, v in scalars.items() if isinstance(v, int | float | Tensor)}
        self._due = self.trigger(step, observed) or self._due

    def act(self, step: int, model: nn.Module, optimizers: Any) -> dict[str, float]:
        """Treat the model, before a step, if the trigger has fired; return the summary of the report then."""
        due, self._due, group = self._due, False, None
        if dist.is_available() and dist.is_initialized():
            decision = torch.tensor(due, dtype=torch.uint8, device=next(model.parameters()).device)
            dist.broadcast(decision, 0)
            due, group = bool(decision), dist.group.WORLD if dist.get_world_size() > 1 else None
        if not due:
            return {}
        averages = tuple(self._averages(model))
        report = fire(model, group=group, **self.settings)
        reset_optimizer_state(optimizers, self.optimizer_state, report)
        for average, updates in averages:
            average.load_state_dict(unwrap(model).state_dict())
            if updates is not None:
                updates.zero_()
        self.reports.append((step, report))
        return {f"fire/{name}": value for name, value in report.summary().items()}

    def _averages(self, model: nn.Module) -> Iterator[tuple[nn.Module, Tensor | None]]:
        """Yield the averages of the model in other callbacks, each with the number of its updates so far."""
        own = unwrap(model)
        for path, owner, value in Likeness(dict(own.named_parameters())).attributes(self._others):
            twin = value.module if hasattr(value, "n_averaged") else value
            counts = [each.n_averaged for each in (value, owner) if hasattr(each, "n_averaged")]
            if counts and isinstance(twin, nn.Module) and twin.state_dict().keys() == own.state_dict().keys():
                yield twin, counts[0]
            elif not self.keep_copies:
                wrong = f"{path} holds a copy of the weights"
                raise UserError(f"{wrong}: remove that callback, or give keep_copies=True and start it anew")
