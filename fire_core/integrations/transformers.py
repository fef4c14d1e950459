"""FIRE as a callback of transformers' Trainer, whose own state (trainer_state.json) holds that of the trigger."""

import gc
from typing import Any

from transformers import TrainerCallback

from fire_core.errors import UserError
from fire_core.integrations.triggered import TriggeredFire


class FireCallback(TriggeredFire, TrainerCallback):
    _training = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training = True
        # the trainer tells its callbacks nothing of one another: its list of them holds this one too
        lists = [holder for holder in gc.get_referrers(self) if isinstance(holder, list)]
        others = [item for holder in lists for item in holder if isinstance(item, TrainerCallback)]
        self._known, saved = False, state.stateful_callbacks.pop(self.state_key, None)
        if saved is not None and state.global_step == 0:
            raise UserError(f"two callbacks are {self.state_key}: give them other names")
        if saved is not None:
            self.load_state_dict(saved)
        self.begin(state.global_step, kwargs["model"], others)
        state.stateful_callbacks[self.state_key] = self.state_dict()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if summary := self.act(state.global_step, kwargs["model"], [kwargs["optimizer"]]):
            state.log_history.append({**summary, "step": state.global_step})
            state.stateful_callbacks[self.state_key] = self.state_dict()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(state, {})

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training:  # trainer.evaluate() on its own must not change the model
            self._look(state, kwargs["metrics"])

    def _look(self, state: Any, metrics: dict[str, Any]) -> None:
        self.observe(state.global_step, metrics)
        # the trainer's own way of storing it confuses two callbacks of one class
        state.stateful_callbacks[self.state_key] = self.state_dict()
