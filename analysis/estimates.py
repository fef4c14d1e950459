"""Means, intervals and paired differences of all runs in one frame, from which every table is written.

The frame has one row per setting (experiment, size, data), measure, label and reference. The reference is the label
that this label is compared with: "none" (no intervention, in the same network and protocol where such a run exists),
"fire", "unchanged" (the same method at its own settings), "muon" (for FIRE with Muon), "random_actions", or "" if no other
label shares a seed with it. A difference is label minus reference, paired by seed. `kind` is "result" (the first measure
of a setting is its `headline`), "learning" or "boundary". Labels come in the order of every table; `name` is what tables
call them, and `changed` the settings that they changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd

from analysis import measures, names
from analysis.measures import HESSIAN, Measure, Values
from analysis.runs import Results, settings
from analysis.stats import estimate, paired_difference

SETTING = ["experiment", "figure", "panel", "size", "data"]
COLUMNS = [
    *SETTING, "kind", "headline", "metric", "measure", "higher_is_better", "method", "label", "name", "changed",
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


def frame(results: Results) -> pd.DataFrame:
    """Return the frame of estimates of the finished runs (columns COLUMNS)."""
    rows = []
    for part in settings(results):
        setting = part.first[SETTING].to_dict()
        looks, changed = names.looks(part), part.overrides
        methods = dict(zip(part.runs["label"], part.runs["method"]))
        for kind, headline, measure, values in numbers(part):
            shared = setting | {"kind": kind, "headline": headline, "metric": measure.key}
            shared |= {"measure": measure.title, "higher_is_better": measure.higher_is_better}
            for label in [*filter(values.get, looks), *(label for label in values if label not in looks)]:
                known = shared | {"method": methods.get(label, label), "label": label}
                known["name"] = (looks.get(label) or names.look(label)).name
                known["changed"] = names.changes(changed.get(label, {}))
                compared = {} if kind == "boundary" else references(label, values, methods, changed)
                others = {name: values[other] for name, other in compared.items()}
                rows += [known | row for row in _rows(values[label], others)]
    return pd.DataFrame(rows, columns=COLUMNS)


def numbers(part: Results) -> Iterator[tuple[str, bool, Measure, Values]]:
    """Yield (kind, headline, measure, numbers of the runs) of everything that is estimated in one setting."""
    for place, measure in enumerate(measures.of(part)):
        yield "result", place == 0, measure, measures.values(part.metrics, measure)
    random = measures.by_label(_first(part.metrics, "random_return"))
    if random:
        level = {seed: value for values in random.values() for seed, value in values.items()}
        for metric, title in (("eval_return", "evaluation return"), ("train_return", "training return")):
            if learned := measures.before_boundary(part.metrics, metric):
                told = f"{title} before the boundary, last tenth of its steps"
                measure = Measure(f"{metric}_learned", told)
                yield "learning", False, measure, {"all methods": learned, "random_actions": level}
    rows = part.boundaries
    last = rows[rows["phase"] == rows.groupby(["label", "seed"])["phase"].transform("max")]
    for column, title in BOUNDARY.items():
        values = measures.by_label(pd.to_numeric(last.set_index(["label", "seed"])[column]))
        yield "boundary", False, Measure(column, title, higher_is_better=False), values
    if HESSIAN.metric in set(part.metrics["metric"]):
        yield "boundary", False, HESSIAN, measures.values(part.metrics, HESSIAN)


def _first(metrics: pd.DataFrame, metric: str) -> pd.Series:
    return measures.ordered_rows(metrics, metric).groupby(["label", "seed"])["value"].first()


def _rows(own: dict[int, float], compared: Values) -> Iterator[dict[str, object]]:
    """Yield the mean of one label once per reference with which it shares a seed; once with "" if there is none."""
    found = estimate(list(own.values()))
    row = {"n": found.n, "mean": found.mean, "low": found.low, "high": found.high}
    row |= {"lowest": min(own.values()), "highest": max(own.values())}
    row |= {"reference": "", "pairs": 0, "p": np.nan}
    gaps = {name: gap for name, other in compared.items() if (gap := paired_difference(own, other))}
    for name, gap in gaps.items():
        compare = {"difference": gap.mean, "difference_low": gap.low, "difference_high": gap.high}
        yield row | compare | {"reference": name, "pairs": gap.n, "p": gap.p}
    if not gaps:
        yield row


def references(
    label: str, known: Iterable[str], methods: dict[str, str], changed: dict[str, dict[str, str]]
) -> dict[str, str]:
    """Return {name of the reference: its label} among the labels `known`."""

    def beside(label: str) -> dict[str, str]:  # what was changed beside the method's own settings
        return {k: v for k, v in changed.get(label, {}).items() if not k.startswith("method.")}

    method, known = methods.get(label, label), list(known)
    same = [each for each in known if methods.get(each) == "none" and changed.get(each) == beside(label)]
    wanted = {
        "none": same[0] if same else "none",
        "fire": "fire",
        "unchanged": method,
        "muon": "muon" if method == "fire_muon" else "",
        "random_actions": "random_actions",
    }
    return {name: other for name, other in wanted.items() if other in known and other != label}


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
