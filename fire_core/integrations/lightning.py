"""FIRE as a Lightning callback; docs/how-to/lightning.md says when the trigger is called, and with which metrics."""

from typing import Any

from lightning.pytorch import Callback

from fire_core.integrations.triggered import TriggeredFire


class FireCallback(TriggeredFire, Callback):
    state_key = ""  # one of each callback, instead of Lightning's
    _validated: frozenset[str] = frozenset()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._known = self._known and trainer.global_step > 0  # else it is another training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(trainer.global_step, pl_module, trainer.callbacks)
        self._last_step = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0 and not trainer.fit_loop._skip_backward:
            summary = self.act(trainer.global_step, pl_module, trainer.optimizers)
            for logger in trainer.loggers if summary else ():
                logger.log_metrics(summary, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step != self._last_step:  # gradient accumulation: batches without an optimizer step
            self._last_step = trainer.global_step
            self.observe(trainer.global_step, {})

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            now = trainer.callback_metrics  # keeps old values: those of this validation are new tensors
            fresh = {name: value for name, value in now.items() if value is not self._before.get(name)}
            self._validated |= fresh.keys()
            self.observe(trainer.global_step, fresh)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        logged = {n: v for n, v in trainer.callback_metrics.items() if n not in self._validated}
        self.observe(trainer.global_step, {**logged, "epoch": trainer.current_epoch})
