"""FIRE as a callback of transformers' Trainer.

    trainer = Trainer(model, args, ..., callbacks=[FireCallback(EveryNSteps(10_000), targets="no_embedding")])

The trigger is called after every optimizer step without metrics, and after every evaluation with its metrics
("eval_loss"). With several processes, rank 0 decides for all. The trainer's own state (trainer_state.json) holds the
state of the trigger.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fire_core.errors import UserError
from fire_core.integrations.triggered import TriggeredFire, scalars
from fire_core.triggers import Trigger


class FireCallback(TrainerCallback):
    """Trainer callback that applies `fire` to the model whenever `trigger` fires.

    Each firing adds the summary of its report to the trainer's log history under "fire/" and appends (global step,
    Report) to `reports`.

    Args:
        optimizer_state: "clear_changed", "clear" or "keep", as in `reset_optimizer_state`.
        name: tells several of these callbacks in one trainer apart.
        settings: `targets` and the settings of `FireSettings`, by name; scale="initial" is not possible.
    Raises: UserError for wrong settings; when training begins, for wrong targets, equal names, no saved state, or a metric
        without evaluations; and for a metric that two evaluations do not give.
    """

    def __init__(
        self, trigger: Trigger, *, optimizer_state: str = "clear_changed", name: str = "fire", **settings: Any
    ) -> None:
        self.triggered = TriggeredFire(trigger, optimizer_state, settings)
        self.reports = self.triggered.reports
        self._key = f"FireCallback {name!r}"
        self._training = False
        self._evaluated = -1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the targets exist, and restore the trigger if training resumes."""
        self._training = True
        self.triggered.check(kwargs["model"])
        if args.eval_strategy == "no" and (missing := self.triggered.trigger.waits_for()):
            raise UserError(
                f"the trigger waits for metric {missing[0]!r}, and eval_strategy='no': choose another one"
            )
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
            self.triggered.restart()
            self._evaluated = -1
            self._remember(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ignore evaluations from now on."""
        self._training = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Call the trigger without metrics."""
        self._look(args, state, {}, kwargs["model"], kwargs["optimizer"])

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Call the trigger with the metrics of an evaluation during training.

        An interrupted `train()` counts as going on: remove the callback before evaluating on its own then.
        """
        if self._training:  # trainer.evaluate() on its own must not change the model
            if state.global_step > self._evaluated >= 0:  # several data sets are evaluated at one step
                self.triggered.end_round()
            self._evaluated = state.global_step
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
        """Store the trigger's state in `state`: the trainer's own way confuses two callbacks of one class."""
        _stored(state)[self._key] = self.triggered.trigger.state_dict()


def _stored(state: TrainerState) -> dict[str, Any]:
    return cast(dict[str, Any], state.stateful_callbacks)  # declared as the list that its constructor takes
