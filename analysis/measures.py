"""The number that stands for a run: a headline measure and a few others for each kind of experiment."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.runs import Results

Values = dict[str, dict[int, float]]  # {label: {seed: number}}
TAIL = 0.1  # share of the steps that "tail" averages over


@dataclass(frozen=True)
class Measure:
    """A metric of the log and the rule that reduces it to one number per run.

    `reduce`: "final" (last value), "late_phases" (mean over the last values of the last quarter of the phases), "tail"
    (mean over the last tenth of the steps), "after" (right after the last boundary), "before" (last value before it).
    """

    metric: str
    title: str
    reduce: str = "final"
    higher_is_better: bool = True

    @property
    def sign(self) -> int:
        """1, or -1 if lower is better."""
        return 1 if self.higher_is_better else -1

    @property
    def logged(self) -> str:
        """Name under which the metric was logged."""
        return f"after_{self.metric}" if self.reduce == "after" else self.metric

    @property
    def axis(self) -> str:
        return self.title.split(",")[0].split(" at the")[0]

    @property
    def key(self) -> str:
        """Name of the measure in the frame of estimates: the metric, followed by the rule unless that is "final"."""
        return self.metric if self.reduce == "final" else f"{self.metric}_{self.reduce}"


TEST = Measure("test_accuracy", "test accuracy, end")
# What is measured at a boundary is named here, and nowhere else in the analysis.
CURVATURE = Measure("after_curvature", "largest Hessian eigenvalue on the data to come", "final", False)
# of earlier runs, on the first images of the phase, which at a warm start are old ones
OLD_CURVATURE = Measure(
    "after_hessian_norm", "largest Hessian eigenvalue on images seen before", "final", False
)
ACTED = "test accuracy right after the last boundary, before training"
TEST_AFTER = Measure("after_test_accuracy", ACTED)
TEST_RENEWED = Measure("after_reestimated_test_accuracy", f"{ACTED}, with new statistics of batch norm")
AT_ENDS = "accuracy at the end of a task, last quarter of the tasks"
MEMORISED = Measure("train_accuracy", f"training {AT_ENDS}", "late_phases")
CORPORA = {"mix": "the mixture", "a": "the old corpus", "b": "the new corpus"}
LOSSES = [
    Measure(f"val_loss_{corpus}", f"validation loss on {name}, {moment}", reduce, False)
    for reduce, moment in (("final", "end"), ("after", "right after the boundary"))
    for corpus, name in CORPORA.items()
]
EVALUATED = Measure("eval_return", "evaluation return, end")
PLAYED = Measure("train_return", "training return, last tenth of the steps", "tail")
RIGHT = "evaluation return, right {} the boundary"
AROUND = [Measure("eval_return", RIGHT.format(at), at) for at in ("after", "before")]
AT_BOUNDARY = {  # right before it, right after it, and at the end of training
    "fig2": (Measure("test_accuracy", "test accuracy", "before"), TEST_AFTER, TEST),
    "fig3": (Measure("val_loss_mix", "validation loss", "before", False), LOSSES[3], LOSSES[0]),
    "fig4": (*reversed(AROUND), EVALUATED),
}
OLD = Measure("old_accuracy", "test accuracy on the classes of earlier phases, end")
NEW = Measure("new_accuracy", "test accuracy on the classes of the last phase, end")
UNFINISHED = Measure("eval_unfinished", "evaluation episodes that the step limit ended", "final", False)
BY_PROTOCOL = {
    "warm_start": [TEST, TEST_AFTER, TEST_RENEWED],
    "continual": [TEST, TEST_AFTER, TEST_RENEWED],
    "class_incremental": [TEST, OLD, NEW, TEST_AFTER, TEST_RENEWED],
    "random_label": [MEMORISED],
    "label_noise": [TEST, TEST_AFTER],
    "permuted": [Measure("test_accuracy", f"test {AT_ENDS}", "late_phases"), MEMORISED],
}
BY_FIGURE = {
    "fig3": [*LOSSES, Measure("dormant_share", "dormant share, end", "final", False)],
    # The paper's panels of Atari are denser than its evaluations, so very likely training returns.
    "fig4a": [PLAYED, EVALUATED, *AROUND, UNFINISHED],
    "fig4b": [EVALUATED, PLAYED, *AROUND],
}
EXPORTED = (  # metrics that an export holds beside those of `of`
    "dormant_share feature_rank hessian_norm random_return eval_unfinished before_dormant_share before_feature_rank "
    f"before_dfi after_dfi {CURVATURE.metric} {OLD_CURVATURE.metric} before_weight_norm after_weight_norm"
).split()
OTHERWISE = [TEST, LOSSES[0], EVALUATED, PLAYED, Measure("train_accuracy", "training accuracy, end")]


def of(part: Results) -> list[Measure]:
    """Return the measures of one setting whose metric was logged, the headline first. The protocol decides which they
    are or, without one, the figure; other experiments have those of Figure 3 if losses were logged, else OTHERWISE."""
    logged = set(part.metrics["metric"])
    otherwise = BY_FIGURE["fig3"] if LOSSES[0].metric in logged else OTHERWISE
    wanted = BY_PROTOCOL.get(part.first["protocol"]) or BY_FIGURE.get(part.first["figure"]) or otherwise
    return [m for m in wanted if m.logged in logged] or [m for m in OTHERWISE if m.metric in logged][:1]


def digits(metric: str, values: Iterable[float] = (np.inf,)) -> int:
    """Return the decimals of a measure: 1 for returns of which one exceeds 1, 4 for accuracies, losses and shares."""
    return 1 if "return" in metric and any(abs(value) > 1 for value in values) else 4


def ordered_rows(metrics: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the rows of one metric, ordered by step within label and seed."""
    return metrics[metrics["metric"] == metric].sort_values(["label", "seed", "phase", "step"], kind="stable")


def with_acts(metrics: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the rows of one metric and those of what was measured right after a boundary, ordered as `ordered_rows`."""
    acts = metrics[metrics["metric"] == f"after_{metric}"].assign(metric=metric)
    return ordered_rows(pd.concat([acts, metrics[metrics["metric"] == metric]]), metric)


def phase_ends(metrics: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the last value of every phase (columns label, seed, phase, step, value)."""
    rows = ordered_rows(metrics, metric)
    return rows.groupby(["label", "seed", "phase"], as_index=False)[["step", "value"]].last()


def values(metrics: pd.DataFrame, measure: Measure) -> Values:
    """Return {label: {seed: number}}. Runs that did not log the metric, or whose number is not finite, are absent. So are
    those whose last phase logged no finite value, if the number is the final one."""
    ended = metrics.groupby(["label", "seed"])[["phase", "step"]].max().add_prefix("ended_")
    late = measure.reduce == "late_phases"
    rows = phase_ends(metrics, measure.metric) if late else ordered_rows(metrics, measure.logged)
    if rows.empty:
        return {}
    rows = rows.join(ended, on=["label", "seed"])
    last_phase = rows.groupby(["label", "seed"])["phase"].transform("max")
    keep = {
        "final": rows["phase"] == rows["ended_phase"],
        "late_phases": rows["phase"] > last_phase - np.maximum(1, (last_phase + 1) // 4),
        "tail": rows["step"] >= (1 - TAIL) * rows["ended_step"],
        "before": rows["phase"] < last_phase,
        "after": rows["phase"] == last_phase,
    }[measure.reduce]
    reduce = {"late_phases": "mean", "tail": "mean"}.get(measure.reduce, "last")
    return by_label(rows[keep].groupby(["label", "seed"])["value"].agg(reduce))


def random_returns(metrics: pd.DataFrame) -> dict[int, float]:
    return ordered_rows(metrics, "random_return").groupby("seed")["value"].first().to_dict()


def by_label(series: pd.Series) -> Values:
    """Return a series with the index (label, seed) as {label: {seed: value}}, without values that are not finite."""
    found: Values = {}
    for (label, seed), value in series[np.isfinite(series)].items():
        found.setdefault(str(label), {})[int(seed)] = float(value)
    return found


def before_boundary(metrics: pd.DataFrame, metric: str) -> dict[int, float]:
    """Return {seed: mean over the last tenth of the steps of phase 0}, of `none` or, without it, of the first label."""
    found = values(metrics[metrics["phase"] == 0], Measure(metric, "", "tail"))
    preferred = sorted(found, key=lambda label: (label != "none", label))
    return {seed: value for label in reversed(preferred) for seed, value in found[label].items()}
