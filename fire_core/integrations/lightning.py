"""FIRE as a Lightning callback.

    trainer = Trainer(callbacks=[FireCallback(Plateau("val_loss", patience=3), solver="exact")])

The trigger is called after every optimizer step without metrics, after every validation with the metrics it logged, and
at the end of every training epoch with the metrics of training and `epoch`. With several processes, rank 0 decides for
all. Lightning's checkpoints hold the state of the trigger.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from fire_core.integrations.triggered import TriggeredFire, scalars
from fire_core.triggers import Trigger


class FireCallback(pl.Callback):
    """Lightning callback that applies `fire` to the module whenever `trigger` fires.

    Each firing logs the summary of its report under "fire/" and appends (global step, Report) to `reports`.

    Args:
        optimizer_state: "clear_changed", "clear" or "keep", as in `reset_optimizer_state`.
        name: tells several of these callbacks in one trainer apart.
        settings: `targets` and the settings of `FireSettings`, by name; scale="initial" is not possible.
    Raises: UserError for unknown settings, at the start of fit for targets that the module does not have, and for a metric
        that two epochs with validation do not give.
    """

    def __init__(
        self,
        trigger: Trigger,
        *,
        optimizer_state: str = "clear_changed",
        name: str = "FireCallback",
        **settings: Any,
    ) -> None:
        self._name = name
        self.triggered = TriggeredFire(trigger, optimizer_state, settings)
        self.reports = self.triggered.reports
        self._last_step = -1
        self._before: dict[str, Any] = {}
        self._validated: set[str] = set()
        self._round_has_validation = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that the targets exist."""
        self.triggered.check(pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start over if training begins at step 0: the callback may have seen another fit."""
        if trainer.global_step == 0:
            self.triggered.restart()
            self._last_step = -1

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Call the trigger without metrics if the optimizer has made a step."""
        if trainer.global_step != self._last_step:  # gradient accumulation: batches without an optimizer step
            self._last_step = trainer.global_step
            self._look(trainer, pl_module, {})

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the metrics logged so far, to tell those of this validation apart."""
        self._before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Call the trigger with the metrics of a validation during fit, except those of the sanity check."""
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        now = trainer.callback_metrics  # keeps old values: those of this validation are new tensors
        fresh = {name: value for name, value in now.items() if value is not self._before.get(name)}
        self._validated |= fresh.keys()
        self._round_has_validation = True
        self._look(trainer, pl_module, scalars(fresh))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Call the trigger with the metrics that training logged, and "epoch"."""
        logged = {n: v for n, v in trainer.callback_metrics.items() if n not in self._validated}
        self._look(trainer, pl_module, {**scalars(logged), "epoch": float(trainer.current_epoch)})
        if self._round_has_validation or not trainer.enable_validation:
            self._round_has_validation = False
            self.triggered.end_round()

    def _look(self, trainer: pl.Trainer, module: pl.LightningModule, observed: dict[str, float]) -> None:
        step = trainer.global_step
        if not self.triggered.is_due(step, observed, trainer.strategy.root_device):
            return
        summary = self.triggered.apply(module, trainer.optimizers, step).summary()  # frees the old weights
        for logger in trainer.loggers:
            logger.log_metrics({f"fire/{name}": value for name, value in summary.items()}, step)

    @property
    def state_key(self) -> str:
        """The name under which a checkpoint keeps the state of this callback."""
        return self._name

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trigger and the last step that it saw."""
        return {"trigger": self.triggered.trigger.state_dict(), "last_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.triggered.trigger.load_state_dict(state_dict["trigger"])
        self._last_step = state_dict["last_step"]
