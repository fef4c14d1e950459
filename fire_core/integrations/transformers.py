"""FIRE as a callback of transformers' Trainer.

    trainer = Trainer(model, args, ..., callbacks=[FireCallback(EveryNSteps(10_000), targets="no_embedding")])

The trigger sees every optimizer step without metrics, and every evaluation with its metrics ("eval_loss"). With several
processes rank 0 decides for all. What the trigger remembers is part of the trainer's own state (trainer_state.json).
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fire_core.errors import UserError
from fire_core.integrations.triggered import TriggeredFire, scalars
from fire_core.report import Report
from fire_core.triggers import Trigger


class FireCallback(TrainerCallback):
    """`fire(model)` whenever the trigger fires. settings: as for `fire_core.fire`.

    optimizer_state: "clear_changed" (default), "clear" or "keep". name: tells two of these callbacks apart. `reports`
    keeps (global step, Report) of each firing; summaries also go to the trainer's log history under "fire/". Raises
    UserError at the start of training for targets that do not exist, and on resume from a checkpoint that this callback
    was not part of.
    """

    def __init__(
        self, trigger: Trigger, *, optimizer_state: str = "clear_changed", name: str = "fire", **settings: Any
    ) -> None:
        self.triggered = TriggeredFire(trigger, optimizer_state, settings)
        self._key = f"FireCallback {name!r}"
        self._training = False

    @property
    def reports(self) -> list[tuple[int, Report]]:
        """(global step, report) of each firing."""
        return self.triggered.reports

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training = True
        self.triggered.check(kwargs["model"])
        saved = _stored(state).pop(self._key, None)
        if state.global_step > 0:
            if saved is None:
                raise UserError(
                    f"the checkpoint holds no state of {self._key}: resume from a run with this callback, and give "
                    "each of several callbacks its own name"
                )
            self.triggered.trigger.load_state_dict(saved)
        elif saved is not None:
            raise UserError(f"two callbacks are called {self._key}: give each its own name")
        else:
            self._remember(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._look(args, state, {}, kwargs["model"], kwargs["optimizer"])

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._training:  # trainer.evaluate() looks at a model, it does not change it
            self._look(args, state, scalars(kwargs["metrics"]), kwargs["model"], kwargs["optimizer"])

    def _look(
        self,
        args: TrainingArguments,
        state: TrainerState,
        observed: dict[str, float],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        if self.triggered.is_due(state.global_step, observed, args.device):
            report = self.triggered.apply(model, [optimizer], state.global_step)
            summary = {f"fire/{name}": value for name, value in report.summary().items()}
            state.log_history.append({**summary, "step": state.global_step})
        self._remember(state)

    def _remember(self, state: TrainerState) -> None:
        """Store the triggers in the state that the trainer saves: its own restoring confuses two callbacks of one class."""
        _stored(state)[self._key] = self.triggered.trigger.state_dict()


def _stored(state: TrainerState) -> dict[str, Any]:
    return cast(dict[str, Any], state.stateful_callbacks)  # declared as the list that its constructor takes
