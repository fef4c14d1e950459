"""FIRE as a Lightning callback.

    trainer = Trainer(callbacks=[FireCallback(Plateau("val_loss", patience=3), solver="exact")])

The trigger sees every optimizer step without metrics, every validation with what it logged, and every end of a training
epoch with what training logged and `epoch`. With several processes rank 0 decides for all. What the trigger remembers is
saved with Lightning's checkpoints.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from fire_core.integrations.triggered import TriggeredFire, scalars
from fire_core.report import Report
from fire_core.triggers import Trigger


class FireCallback(pl.Callback):
    """`fire(module)` whenever the trigger fires. settings: as for `fire_core.fire`.

    optimizer_state: "clear_changed" (default), "clear" or "keep". Each firing logs its summary under "fire/" and is
    kept in `reports` as (global step, Report). Raises UserError at the start of fit for targets that do not exist.
    """

    def __init__(self, trigger: Trigger, *, optimizer_state: str = "clear_changed", **settings: Any) -> None:
        self.triggered = TriggeredFire(trigger, optimizer_state, settings)
        self._last_step = -1
        self._before: dict[str, Any] = {}
        self._validated: set[str] = set()

    @property
    def reports(self) -> list[tuple[int, Report]]:
        """(global step, report) of each firing."""
        return self.triggered.reports

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.triggered.check(pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._last_step:  # gradient accumulation: batches without an optimizer step
            self._last_step = trainer.global_step
            self._look(trainer, pl_module, {})

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        now = trainer.callback_metrics  # keeps old values: those of this validation are new tensors
        fresh = {name: value for name, value in now.items() if value is not self._before.get(name)}
        self._validated |= fresh.keys()
        self._look(trainer, pl_module, scalars(fresh))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        logged = {n: v for n, v in trainer.callback_metrics.items() if n not in self._validated}
        self._look(trainer, pl_module, {**scalars(logged), "epoch": float(trainer.current_epoch)})

    def _look(self, trainer: pl.Trainer, module: pl.LightningModule, observed: dict[str, float]) -> None:
        step = trainer.global_step
        if not self.triggered.is_due(step, observed, trainer.strategy.root_device):
            return
        report = self.triggered.apply(module, trainer.optimizers, step)
        for logger in trainer.loggers:
            logger.log_metrics({f"fire/{name}": value for name, value in report.summary().items()}, step)

    def state_dict(self) -> dict[str, Any]:
        return {"trigger": self.triggered.trigger.state_dict(), "last_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.triggered.trigger.load_state_dict(state_dict["trigger"])
        self._last_step = state_dict["last_step"]
