"""Intervals, paired differences and the correction for multiple comparisons, computed with scipy.

Intervals are Student's t over seeds: of three seeds, a percentile bootstrap covers far less than 95 %.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

CONFIDENCE = 0.95
LEVEL = 0.05  # of the Holm-corrected tests


class Estimate(NamedTuple):
    """Mean, its 95 % interval, two-sided p-value of "the mean is 0", number of seeds. Interval and p are NaN below two."""

    mean: float
    low: float
    high: float
    p: float
    n: int


def estimate(numbers: Mapping[int, float] | Iterable[float]) -> Estimate:
    """Return the estimate by Student's t from one finite number per seed; all is NaN where there are none."""
    values = np.array([*(numbers.values() if isinstance(numbers, Mapping) else numbers)], dtype=np.float64)
    nan, n = float("nan"), len(values)
    mean = float(values.mean()) if n else nan
    if n < 2:
        return Estimate(mean, nan, nan, nan, n)
    if np.ptp(values) == 0:  # all seeds agree, so there is no scatter to test against
        return Estimate(mean, mean, mean, 1.0 if mean == 0 else 0.0, n)
    error = values.std(ddof=1) / n**0.5
    # as scipy.stats.t does, without its checks, which take most of the time of a table
    reach = float(error * special.stdtrit(n - 1, (1 + CONFIDENCE) / 2))
    return Estimate(mean, mean - reach, mean + reach, float(2 * special.stdtr(n - 1, -abs(mean) / error)), n)


def paired(ours: Mapping[int, float], reference: Mapping[int, float]) -> dict[int, float]:
    """Return {seed: `ours` minus `reference`} of the seeds that both have; a pair shares data order and initial weights."""
    return {seed: ours[seed] - reference[seed] for seed in sorted(set(ours) & set(reference))}


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the p-values of one family after Holm's step-down correction. NaN stays NaN and is no comparison."""
    corrected = np.array(p, dtype=np.float64)
    order = np.argsort(corrected)[: np.count_nonzero(~np.isnan(corrected))]  # NaN comes last
    times = np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(corrected[order] * times), 1.0)
    return corrected
