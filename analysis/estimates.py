"""Means, intervals and paired differences of all runs in one frame, from which every table and sentence is written.

The frame has one row per setting (experiment, size, data), measure, label and reference. The reference is the label
that this label is compared with: "none" (no intervention, under the same overrides where such a run exists), "fire",
"unchanged" (the same method without overrides), "muon" (for FIRE with Muon), "random_actions", or "" if
no other label shares a seed with it. A difference is label minus reference, paired by seed. `kind` is "result" (the
first measure of a setting is its `headline`), "learning" or "boundary".
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from analysis import measures
from analysis.measures import Measure
from analysis.runs import Results, settings
from analysis.stats import estimate, paired_difference

SETTING = ["experiment", "figure", "panel", "size", "data"]
COLUMNS = [
    *SETTING, "kind", "headline", "metric", "measure", "higher_is_better", "method", "label",
    "n", "mean", "low", "high", "lowest", "highest",
    "reference", "difference", "difference_low", "difference_high", "pairs", "p",
]  # fmt: skip
BOUNDARY = {
    "matrices": "matrices changed",
    "dfi_before": "DfI before",
    "dfi_after": "DfI after, as stored",
    "dfi_factor": "DfI after, before scaling",
    "sfe": "SFE",
    "sfe_share": "SFE / SFE of a full reset",
    "common_dfi_before": "DfI before, FIRE's matrices",
    "common_dfi_after": "DfI after, FIRE's matrices",
    "common_sfe_share": "SFE / SFE of a full reset, FIRE's matrices",
    "seconds": "seconds",
}
HESSIAN = "after_hessian_norm"  # of the whole network, on data of the next phase
Values = dict[str, dict[int, float]]  # {label: {seed: value}}


def frame(results: Results) -> pd.DataFrame:
    """Return the frame of estimates of the finished runs (columns COLUMNS)."""
    rows = []
    for part in settings(results):
        setting = part.first[SETTING].to_dict()
        methods = dict(zip(part.runs["label"], part.runs["method"]))
        for kind, headline, measure, values in numbers(part):
            shared = setting | {
                "kind": kind,
                "headline": headline,
                "metric": measure.key,
                "measure": measure.title,
            }
            shared["higher_is_better"] = measure.higher_is_better
            for label in values:
                known = shared | {"method": methods.get(label, label), "label": label}
                rows += [
                    known | row
                    for row in _rows(label, values, methods, compared=kind in ("result", "learning"))
                ]
    return pd.DataFrame(rows, columns=COLUMNS)


def numbers(part: Results) -> Iterator[tuple[str, bool, Measure, Values]]:
    """Yield (kind, headline, measure, numbers of the runs) of everything that is estimated in one setting."""
    for place, measure in enumerate(measures.of(part)):
        yield "result", place == 0, measure, measures.values(part.metrics, measure)
    random = measures.by_label(_first(part.metrics, "random_return"))
    if random:
        level = {seed: value for values in random.values() for seed, value in values.items()}
        for metric, title in (("eval_return", "evaluation return"), ("train_return", "training return")):
            learned = {
                int(seed): value for seed, value in measures.before_boundary(part.metrics, metric).items()
            }
            if learned:
                measure = Measure(
                    f"{metric}_learned", f"{title} before the boundary, last tenth of its steps"
                )
                yield "learning", False, measure, {"all methods": learned, "random_actions": level}
    last = part.boundaries[
        part.boundaries["phase"] == part.boundaries.groupby(["label", "seed"])["phase"].transform("max")
    ]
    for column, title in BOUNDARY.items():
        values = measures.by_label(pd.to_numeric(last.set_index(["label", "seed"])[column]))
        yield "boundary", False, Measure(column, title, higher_is_better=False), values
    if HESSIAN in set(part.metrics["metric"]):
        measure = Measure(HESSIAN, "largest Hessian eigenvalue on the data to come", higher_is_better=False)
        yield "boundary", False, measure, measures.values(part.metrics, measure)


def _first(metrics: pd.DataFrame, metric: str) -> pd.Series:
    return measures.ordered_rows(metrics, metric).groupby(["label", "seed"])["value"].first()


def _rows(label: str, values: Values, methods: dict[str, str], compared: bool) -> Iterator[dict[str, object]]:
    """Yield the mean of one label once per reference with which it shares a seed; once with "" if there is none."""
    numbers = list(values[label].values())
    found = estimate(numbers)
    row = {"n": found.n, "mean": found.mean, "low": found.low, "high": found.high}
    row |= {"lowest": min(numbers), "highest": max(numbers), "reference": "", "pairs": 0, "p": np.nan}
    references = _references(label, values, methods) if compared else {}
    alone = True
    for name, reference in references.items():
        gap = paired_difference(values[label], values[reference])
        if gap is not None:
            alone = False
            compare = {"difference": gap.mean, "difference_low": gap.low, "difference_high": gap.high}
            yield row | compare | {"reference": name, "pairs": gap.n, "p": gap.p}
    if alone:
        yield row


def _references(label: str, values: Values, methods: dict[str, str]) -> dict[str, str]:
    """Return {name of the reference: its label}, without references that were not run."""
    method = methods.get(label, label)
    overrides = label.removeprefix(method)
    wanted = {
        "none": f"none{overrides}" if f"none{overrides}" in values else "none",
        "fire": "fire",
        "unchanged": method if overrides else "",
        "muon": "muon" if method == "fire_muon" else "",
        "random_actions": "random_actions",
    }
    return {name: other for name, other in wanted.items() if other in values and other != label}


def of(frame: pd.DataFrame, part: Results) -> pd.DataFrame:
    """Return the estimates of one setting."""
    keys = ["experiment", "size", "data"]
    return frame[(frame[keys] == part.first[keys].to_numpy()).all(axis=1)]


def means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame without its comparisons: one row per setting, measure and label."""
    return frame.drop_duplicates(["experiment", "size", "data", "metric", "label"])


def sides(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `rows` with the column `word`: "better" or "worse" than the reference where the 95 % interval of the
    difference excludes 0, else "". It describes the seeds that were run, is not corrected, and is no verdict."""
    better = (rows["difference"] > 0) == rows["higher_is_better"].astype(bool)
    clear = (rows["difference_low"] > 0) | (rows["difference_high"] < 0)
    return rows.assign(word=np.where(clear, np.where(better, "better", "worse"), ""))
