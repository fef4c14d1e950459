"""Means, intervals and paired differences of all runs in one frame, from which every table is written.

The frame has one row per setting (experiment, size, data), measure, label and reference: "none" (in the same network and
protocol where such a run exists), "fire", "unchanged" (the same method at its own settings), "muon" (for FIRE with Muon), or
"" if no other label shares a seed. A difference is label minus reference, paired by seed. `kind` is "result" (the first
measure of a setting is its `headline`) or "boundary". `changed` are the settings that a label changed.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from analysis import measures, names
from analysis.measures import CURVATURE, OLD_CURVATURE, Measure, Values
from analysis.runs import SETTING as KEYS
from analysis.runs import Results, settings
from analysis.stats import estimate, paired

SETTING = ["experiment", "figure", "panel", "size", "data"]
COLUMNS = [
    *SETTING, "kind", "headline", "metric", "measure", "higher_is_better", "method", "label", "name", "changed",
    "n", "mean", "low", "high",
    "reference", "difference", "difference_low", "difference_high", "pairs", "p",
]  # fmt: skip


def frame(results: Results) -> pd.DataFrame:
    """Return the frame of estimates of the finished runs (columns COLUMNS)."""
    rows = []
    for part in settings(results):
        setting = part.first[SETTING].to_dict()
        looks = names.looks(part)
        for kind, headline, measure, values in numbers(part):
            shared = setting | {"kind": kind, "headline": headline, "metric": measure.key}
            shared |= {"measure": measure.title, "higher_is_better": measure.higher_is_better}
            for label in filter(values.get, looks):
                known = shared | {"method": part.methods[label], "label": label, "name": looks[label].name}
                known["changed"] = names.changes(part.overrides[label])
                others = {} if kind == "boundary" else references(label, values, part)
                rows += [known | row for row in _rows(values[label], others)]
    return pd.DataFrame(rows, columns=COLUMNS)


def numbers(part: Results) -> Iterator[tuple[str, bool, Measure, Values]]:
    """Yield (kind, headline, measure, numbers of the runs) of everything that is estimated in one setting."""
    for place, measure in enumerate(measures.of(part)):
        yield "result", place == 0, measure, measures.values(part.metrics, measure)
    rows = part.boundaries
    last = rows[rows["phase"] == rows.groupby(["label", "seed"])["phase"].transform("max")]
    for column, title in names.NAMES["boundary"].items():
        values = measures.by_label(pd.to_numeric(last.set_index(["label", "seed"])[column]))
        yield "boundary", False, Measure(column, title, higher_is_better=False), values
    for measure in (CURVATURE, OLD_CURVATURE):
        if measure.metric in set(part.metrics["metric"]):
            yield "boundary", False, measure, measures.values(part.metrics, measure)


def _rows(own: dict[int, float], compared: Values) -> Iterator[dict[str, object]]:
    """Yield the mean of one label once per reference with which it shares a seed; once with "" if there is none."""
    mean, low, high, _, n = estimate(own)
    row = {"n": n, "mean": mean, "low": low, "high": high}
    gaps = {name: gap for name, other in compared.items() if (gap := estimate(paired(own, other))).n}
    for name, (difference, low, high, p, n) in (gaps or {"": estimate([])}).items():
        compare = {"difference": difference, "difference_low": low, "difference_high": high}
        yield row | compare | {"reference": name, "pairs": n, "p": p}


def references(label: str, known: Values, part: Results) -> Values:
    """Return {name of the reference: its numbers} among the labels `known`."""
    methods = part.methods
    changed = {each: {key: number(text) for key, text in part.overrides[each].items()} for each in methods}
    shared = {key: value for key, value in changed[label].items() if not key.startswith("method.")}
    same = [each for each in methods if methods[each] == "none" and changed[each] == shared]
    none = next((each for each in same if each in known), "" if same else "none")  # "": it is not finished
    wanted = {"none": none, "fire": "fire", "unchanged": methods[label]}
    wanted["muon"] = "muon" if methods[label] == "fire_muon" else ""
    return {name: known[other] for name, other in wanted.items() if other in known and other != label}


def number(text: str) -> str | float:
    """Return a setting as a number if it is one: 1e-3 is 0.001."""
    try:
        return float(text)
    except ValueError:
        return text


def of(frame: pd.DataFrame, part: Results) -> pd.DataFrame:
    return frame[(frame[KEYS] == part.first[KEYS].to_numpy()).all(axis=1)]


def means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame without its comparisons: one row per setting, measure and label."""
    return frame.drop_duplicates([*KEYS, "metric", "label"])


def against(frame: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Return the comparisons of the headline measures with `reference`."""
    return frame[frame["headline"] & (frame["reference"] == reference)]


def minus(rows: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Return one row per setting, measure and label, with the difference from `reference`, NaN where there is none."""
    rows = rows.assign(other=rows["reference"] != reference)
    found = means(rows.sort_values("other", kind="stable")).sort_index()
    found.loc[found["other"], ["difference", "difference_low", "difference_high"]] = np.nan
    return found


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `rows` with their differences turned so that a positive one is better, for losses too."""
    ends, losses = ["difference", "difference_low", "difference_high"], ~rows["higher_is_better"].astype(bool)
    turned = rows.copy()
    turned.loc[losses, ends] = -rows.loc[losses, [ends[0], ends[2], ends[1]]].to_numpy()
    return turned


def sides(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `rows` with the column `word`: "better" or "worse" than the reference where the 95 % interval of the
    difference excludes 0, else "". It describes the seeds that were run, is not corrected, and is no verdict."""
    gain = gains(rows)
    worse = np.where(gain["difference_high"] < 0, "worse", "")
    return rows.assign(word=np.where(gain["difference_low"] > 0, "better", worse))
