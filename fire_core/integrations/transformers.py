"""FIRE as a callback of transformers' Trainer.

    trainer = Trainer(model, args, ..., callbacks=[FireCallback(EveryNSteps(10_000), targets="no_embedding")])

The trigger sees every optimizer step without metrics, and every evaluation with its metrics ("eval_loss"). With several
processes rank 0 decides for all. What the trigger remembers is written into each checkpoint folder and read on resume.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fire_core.errors import UserError
from fire_core.integrations.treatment import Treatment, numbers
from fire_core.report import Report
from fire_core.triggers import Trigger

FILE = "fire_trigger.json"


class FireCallback(TrainerCallback):
    """`fire(model)` whenever the trigger fires. settings: as for `fire_core.fire`.

    optimizer_state: "clear_changed" (default), "clear" or "keep". `reports` keeps (global step, Report) of each firing;
    summaries also go to the trainer's log history under "fire/". Raises UserError at the start of training for targets
    that do not exist, and on resume from a checkpoint that this callback was not part of.
    """

    def __init__(self, trigger: Trigger, *, optimizer_state: str = "clear_changed", **settings: Any) -> None:
        self.treatment = Treatment(trigger, optimizer_state, settings)
        self._training = False

    @property
    def reports(self) -> list[tuple[int, Report]]:
        return self.treatment.reports

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training = True
        self.treatment.check(kwargs["model"])
        if state.global_step > 0:
            path = _folder(args, state) / FILE
            if not path.exists():
                raise UserError(
                    f"{path} is missing: resume from a checkpoint of a run with this callback, in its folder"
                )
            self.treatment.trigger.load_state_dict(json.loads(path.read_text()))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._look(state, {}, kwargs["model"], kwargs["optimizer"])

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._training:  # trainer.evaluate() looks at a model, it does not change it
            self._look(state, numbers(kwargs["metrics"]), kwargs["model"], kwargs["optimizer"])

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            (_folder(args, state) / FILE).write_text(json.dumps(self.treatment.trigger.state_dict()))

    def _look(
        self, state: TrainerState, observed: dict[str, float], model: nn.Module, optimizer: Optimizer
    ) -> None:
        decision = [self.treatment.trigger(state.global_step, observed)]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(decision, 0)
        if decision[0]:
            report = self.treatment.apply(model, [optimizer], state.global_step)
            summary = {f"fire/{name}": value for name, value in report.summary().items()}
            state.log_history.append({**summary, "step": state.global_step})


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
