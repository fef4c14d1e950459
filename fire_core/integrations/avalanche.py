"""FIRE as a plugin of Avalanche, whose experiences are the phases.

    strategy = Naive(model=model, optimizer=optimizer, ..., plugins=[FirePlugin(solver="exact")])

Before each experience, measures of plasticity are published as metrics; before each but the first, FIRE is applied.
"""

from __future__ import annotations

from typing import Any

import torch
from avalanche.evaluation.metric_results import MetricValue
from avalanche.training.plugins import SupervisedPlugin

from fire_core.integrations.triggered import TriggeredFire
from fire_core.measure.plasticity import plasticity
from fire_core.report import Report
from fire_core.triggers import EveryNSteps, Trigger


class FirePlugin(SupervisedPlugin):
    """Avalanche plugin that applies `fire` to the model before an experience whenever `trigger` fires.

    It publishes "plasticity/dormant_share" and the other measures of `fire_core.measure.plasticity.plasticity`, before the
    treatment, and the summary of the report under "fire/". It appends (experience, Report) to `reports`.

    Args:
        trigger: called before each experience with the number of experiences trained before, and the measures;
            None is before each experience but the first.
        probe: number of samples of the coming experience for the measures; 0 measures nothing.
        optimizer_state: "clear_changed", "clear" or "keep", as in `reset_optimizer_state`.
        settings: `targets` and the settings of `FireSettings`, by name; scale="initial" is not possible.
    Raises: UserError for unknown settings, and before the first experience for targets that the model does not have.
    """

    def __init__(
        self,
        trigger: Trigger | None = None,
        *,
        probe: int = 256,
        optimizer_state: str = "clear_changed",
        **settings: Any,
    ) -> None:
        super().__init__()
        self.triggered = TriggeredFire(trigger or EveryNSteps(1), optimizer_state, settings)
        self.probe = probe

    @property
    def reports(self) -> list[tuple[int, Report]]:
        """The (experience, report) pair of each firing."""
        return self.triggered.reports

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Measure the plasticity of the model, and treat it if the trigger fires."""
        done = strategy.clock.train_exp_counter
        self.triggered.check(strategy.model)
        measured: dict[str, float] = {}
        if self.probe:
            data = strategy.adapted_dataset
            inputs = torch.stack([data[i][0] for i in range(min(self.probe, len(data)))])
            measured = plasticity(strategy.model, inputs.to(strategy.device))
        _publish(strategy, "plasticity", measured)
        if self.triggered.is_due(done, measured, strategy.device):
            report = self.triggered.apply(strategy.model, [strategy.optimizer], done)
            _publish(strategy, "fire", report.summary())


def _publish(strategy: Any, group: str, figures: dict[str, float]) -> None:
    for name, value in figures.items():
        step = strategy.clock.train_iterations
        strategy.evaluator.publish_metric_value(MetricValue(group, f"{group}/{name}", value, step))
