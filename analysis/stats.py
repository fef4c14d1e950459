"""Intervals, paired differences and the correction for multiple comparisons, computed with scipy.

Intervals are Student's t over seeds. With three seeds a percentile bootstrap would give little more than their range,
whose coverage is far below 95 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
LEVEL = 0.05  # of the Holm-corrected tests


class Estimate(NamedTuple):
    """Mean, its 95 % interval, the two-sided p-value of "the mean is 0", and the number of seeds. Interval and p-value
    are NaN for one seed."""

    mean: float
    low: float
    high: float
    p: float
    n: int


def estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Return the estimate by Student's t from one number per seed. Raises ValueError unless `values` is a non-empty
    vector of finite numbers."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"need a non-empty vector of finite numbers, got {values!r}")
    mean, nan = float(values.mean()), float("nan")
    if len(values) == 1:
        return Estimate(mean, nan, nan, nan, 1)
    if np.ptp(values) == 0:  # all seeds agree, so there is no scatter to test against
        return Estimate(mean, mean, mean, 1.0 if mean == 0 else 0.0, len(values))
    error = stats.sem(values)
    low, high = stats.t.interval(CONFIDENCE, len(values) - 1, mean, error)
    p = 2 * stats.t.sf(abs(mean) / error, len(values) - 1)
    return Estimate(mean, float(low), float(high), float(p), len(values))


def paired_difference(ours: Mapping[int, float], reference: Mapping[int, float]) -> Estimate | None:
    """Return the estimate of `ours` minus `reference` over the seeds that both have (a pair shares data order and
    initial weights), or None if they share no seed."""
    seeds = sorted(set(ours) & set(reference))
    return estimate([ours[seed] - reference[seed] for seed in seeds]) if seeds else None


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the p-values of one family after Holm's step-down correction. NaN stays NaN and does not count as a
    comparison."""
    p = np.asarray(p, dtype=np.float64)
    corrected = np.full(len(p), np.nan)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    steps = p[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return corrected
