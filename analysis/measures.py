"""Which number stands for a run: one headline and a few companions per kind of experiment, computed from the
log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.load import Results
from fire_core.errors import UserError

TAIL = 0.1  # share of a run's steps that a "tail" mean covers


@dataclass(frozen=True)
class Measure:
    """`metric` reduced over a run. `reduce`: "final" (last value), "late_phases" (mean of the values at the
    end of the last quarter of the phases), "tail" (mean over the last tenth of the steps), "after" /
    "before" (first value after / last value before the last boundary)."""

    metric: str
    title: str
    reduce: str = "final"
    higher_is_better: bool = True

    @property
    def key(self) -> str:
        return self.metric if self.reduce == "final" else f"{self.metric}_{self.reduce}"


TEST = Measure("test_accuracy", "test accuracy, end")
SEEN = Measure("seen_accuracy", "test accuracy on classes seen, end")
TEST_AFTER = Measure("after_test_accuracy", "test accuracy right after the last boundary, before training")
MEMORISED = Measure(
    "train_accuracy", "training accuracy at the end of a task, last quarter of the tasks", "late_phases"
)
LATE_TEST = Measure(
    "test_accuracy", "test accuracy at the end of a task, last quarter of the tasks", "late_phases"
)
LOSSES = [
    Measure("val_loss_mix", "validation loss, mixture", "final", False),
    Measure("val_loss_a", "validation loss, old corpus A", "final", False),
    Measure("val_loss_b", "validation loss, new corpus B", "final", False),
    Measure("val_loss_mix", "mixture, right after the boundary", "after", False),
    Measure("val_loss_a", "A, right after the boundary", "after", False),
    Measure("val_loss_b", "B, right after the boundary", "after", False),
]
EVALUATED = Measure("eval_return", "evaluation return (raw score), end")
PLAYED = Measure("train_return", "training return (raw score), last tenth", "tail")
AROUND = [
    Measure("eval_return", "evaluation return, right after the boundary", "after"),
    Measure("eval_return", "evaluation return, right before the boundary", "before"),
]
CUT = Measure("eval_unfinished", "evaluation episodes that the step limit cut off, end", "final", False)
BY_PROTOCOL = {
    "warm_start": [TEST, TEST_AFTER],
    "continual": [TEST, TEST_AFTER],
    "class_incremental": [TEST, SEEN, TEST_AFTER],
    "random_label": [MEMORISED],
    "label_noise": [TEST, TEST_AFTER],
    "permuted": [LATE_TEST, MEMORISED],
}
BY_FIGURE = {
    "fig2a": BY_PROTOCOL["warm_start"],
    "fig2b": BY_PROTOCOL["continual"],
    "fig2c": BY_PROTOCOL["class_incremental"],
    "fig3": LOSSES,
    # The paper's panels of Atari are denser than its evaluations, so very likely training returns.
    "fig4a": [PLAYED, EVALUATED, *AROUND, CUT],
    "fig4b": [EVALUATED, PLAYED, *AROUND],
}
OTHERWISE = [TEST, LOSSES[0], EVALUATED, PLAYED, Measure("train_accuracy", "training accuracy, end")]


def measures_of(results: Results, experiment: str) -> list[Measure]:
    """The measures of one experiment whose metric was really logged, headline first. A new experiment is
    read by its protocol or, failing that, by what it logs."""
    part = results.select(experiment=experiment)
    logged = set(part.metrics["metric"].unique())
    first = part.runs.iloc[0] if len(part.runs) else {"protocol": "", "figure": ""}
    wanted = BY_PROTOCOL.get(first["protocol"]) or BY_FIGURE.get(first["figure"]) or OTHERWISE
    return [m for m in wanted if m.metric in logged] or [m for m in OTHERWISE if m.metric in logged][:1]


def curve(metrics: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows of one metric ordered by step within label and seed."""
    rows = metrics[metrics["metric"] == metric]
    return rows.sort_values(["label", "seed", "phase", "step"], kind="stable")


def phase_ends(metrics: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Last value of every phase: columns label, seed, phase, value."""
    rows = curve(metrics, metric)
    return rows.groupby(["label", "seed", "phase"], observed=True, as_index=False)[["step", "value"]].last()


def end_values(metrics: pd.DataFrame, measure: Measure) -> pd.DataFrame:
    """One number a run: columns label, seed, value; runs that never logged the metric are absent."""
    rows = curve(metrics, measure.metric)
    if rows.empty:
        raise UserError(f"no run logged '{measure.metric}'; logged: {sorted(set(metrics['metric']))}")
    keys = ["label", "seed"]
    if measure.reduce == "late_phases":
        ends = phase_ends(metrics, measure.metric)
        last = ends.groupby(keys, observed=True)["phase"].transform("max")
        ends = ends[ends["phase"] > last - np.maximum(1, (last + 1) // 4)]
        return ends.groupby(keys, observed=True, as_index=False)["value"].mean()
    last_phase = rows.groupby(keys, observed=True)["phase"].transform("max")
    if measure.reduce == "tail":
        last_step = rows.groupby(keys, observed=True)["step"].transform("max")
        rows = rows[rows["step"] >= (1 - TAIL) * last_step]
        return rows.groupby(keys, observed=True, as_index=False)["value"].mean()
    if measure.reduce == "before":
        rows = rows[rows["phase"] < last_phase]
    elif measure.reduce == "after":
        rows = rows[(rows["phase"] == last_phase) & (last_phase > 0)]
    grouped = rows.groupby(keys, observed=True, as_index=False)["value"]
    return grouped.first() if measure.reduce == "after" else grouped.last()


def by_seed(ends: pd.DataFrame, label: str) -> dict[int, float]:
    """{seed: value} of one label."""
    rows = ends[ends["label"] == label]
    return dict(zip(rows["seed"].astype(int), rows["value"].astype(float)))


def first_values(metrics: pd.DataFrame, metric: str) -> dict[int, float]:
    """{seed: first logged value} of one metric of one label."""
    rows = curve(metrics, metric).groupby("seed", observed=True)["value"].first()
    return {int(seed): float(value) for seed, value in rows.items()}


def before_boundary(metrics: pd.DataFrame, metric: str) -> dict[int, float]:
    """{seed: mean over the last tenth of the steps of phase 0} of one metric of one label, where it was logged there."""
    rows = curve(metrics, metric)
    rows = rows[rows["phase"] == 0]
    last = rows.groupby("seed", observed=True)["step"].transform("max")
    means = rows[rows["step"] >= (1 - TAIL) * last].groupby("seed", observed=True)["value"].mean()
    return {int(seed): float(value) for seed, value in means.items()}


def baseline_of(label: str, labels: Sequence[str]) -> str | None:
    """The `none` run to compare with: the one under the same overrides if it exists, else plain `none`."""
    _, dash, overrides = label.partition("-")
    same = f"none{dash}{overrides}"
    return same if same in labels else ("none" if "none" in labels else None)
