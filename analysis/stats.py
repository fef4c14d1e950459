"""Numbers with their uncertainty. Arrays in, `Estimate` out; no plotting, no global random state.

Every interval says how it was made. The percentile bootstrap of three seeds is only the range of the three,
far from 95 % coverage, so small samples get Student's t (exact if seeds scatter normally) and large ones the
bootstrap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as distributions

CONFIDENCE = 0.95
RESAMPLES = 10_000
BOOTSTRAP_FROM = 10  # seeds
Statistic = Callable[[np.ndarray], float]


@dataclass(frozen=True)
class Estimate:
    """A value, its interval (None when there is none) and how many seeds it rests on."""

    value: float
    low: float | None
    high: float | None
    n: int
    kind: str  # "none" | "t" | "bootstrap"

    @property
    def note(self) -> str:
        if self.n == 1:
            return "one seed: no interval"
        return f"only {self.n} seeds" if self.n < 5 else ""

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def mean(values: np.ndarray) -> float:
    return float(np.mean(values))


def interquartile_mean(values: np.ndarray) -> float:
    """Mean of the middle half of all entries (runs x tasks are pooled), Agarwal et al. 2021."""
    return float(distributions.trim_mean(np.asarray(values).ravel(), 0.25))


def default_generator() -> np.random.Generator:
    """The same stream at every call: figures and tables do not change from one print to the next."""
    return np.random.default_rng(20260208)


def estimate(
    values: Sequence[float] | np.ndarray,
    statistic: Statistic = mean,
    kind: str = "auto",
    generator: np.random.Generator | None = None,
) -> Estimate:
    """95 % interval of `statistic` over `values` (one number a seed). `kind`: "t" (mean only), "bootstrap",
    or "auto": t below BOOTSTRAP_FROM seeds for a mean, else bootstrap. One value has no interval."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"need a non-empty vector of finite numbers, got {values!r}")
    n, value = len(values), statistic(values)
    if n == 1:
        return Estimate(value, None, None, 1, "none")
    if kind == "auto":
        kind = "t" if n < BOOTSTRAP_FROM and statistic is mean else "bootstrap"
    if kind == "t":
        if statistic is not mean:
            raise ValueError(
                "Student's t is an interval of the mean; use kind='bootstrap' for another statistic"
            )
        reach = distributions.t.ppf(0.5 + CONFIDENCE / 2, n - 1) * values.std(ddof=1) / np.sqrt(n)
        return Estimate(value, value - float(reach), value + float(reach), n, "t")
    low, high = _bootstrap(values[:, None], statistic, generator or default_generator())
    return Estimate(value, low, high, n, "bootstrap")


def stratified_estimate(
    scores: np.ndarray,
    statistic: Statistic = interquartile_mean,
    generator: np.random.Generator | None = None,
) -> Estimate:
    """Bootstrap interval of a statistic of `scores` (runs, tasks): runs are resampled within each task on
    their own, tasks are kept. Seeds of different tasks are taken as independent."""
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 2:
        raise ValueError(f"need (runs, tasks), got shape {scores.shape}")
    if len(scores) == 1:
        return Estimate(statistic(scores), None, None, 1, "none")
    low, high = _bootstrap(scores, statistic, generator or default_generator())
    return Estimate(statistic(scores), low, high, len(scores), "bootstrap")


def _bootstrap(
    scores: np.ndarray, statistic: Statistic, generator: np.random.Generator
) -> tuple[float, float]:
    runs, tasks = scores.shape
    picks = generator.integers(0, runs, size=(RESAMPLES, runs, tasks))
    samples = scores[picks, np.arange(tasks)]
    if statistic is mean:
        drawn = samples.mean(axis=(1, 2))
    elif statistic is interquartile_mean:
        drawn = distributions.trim_mean(samples.reshape(RESAMPLES, -1), 0.25, axis=1)
    else:
        drawn = np.array([statistic(sample) for sample in samples])
    low, high = np.quantile(drawn, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return float(low), float(high)


def paired_difference(
    ours: Mapping[int, float], baseline: Mapping[int, float], kind: str = "auto"
) -> Estimate | None:
    """Estimate of ours - baseline over the seeds that both have (pairs share data order and first weights);
    None if they share no seed."""
    seeds = sorted(set(ours) & set(baseline))
    return estimate([ours[s] - baseline[s] for s in seeds], kind=kind) if seeds else None


def probability_of_improvement(
    ours: np.ndarray, baseline: np.ndarray, generator: np.random.Generator | None = None
) -> Estimate:
    """P(a random run of ours > a random run of the baseline), ties count half (Agarwal et al. 2021). Both
    (runs,) or (runs, tasks): averaged over tasks, resampled within each."""
    ours, baseline = (np.asarray(a, dtype=np.float64).reshape(len(a), -1) for a in (ours, baseline))
    generator = generator or default_generator()

    def chance(a: np.ndarray, b: np.ndarray) -> float:
        gap = a[:, None, :] - b[None, :, :]
        return float(((gap > 0) + 0.5 * (gap == 0)).mean())

    value, n, tasks = chance(ours, baseline), min(len(ours), len(baseline)), np.arange(ours.shape[1])
    if n == 1:
        return Estimate(value, None, None, 1, "none")
    drawn = [
        chance(
            ours[generator.integers(0, len(ours), ours.shape), tasks],
            baseline[generator.integers(0, len(baseline), baseline.shape), tasks],
        )
        for _ in range(RESAMPLES // 5)
    ]
    low, high = np.quantile(drawn, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return Estimate(value, float(low), float(high), n, "bootstrap")


def area_under_curve(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """Mean height of the piecewise linear curve through (x, y) over the range of x; y itself for a single
    point."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    if len(x) == 0:
        raise ValueError("an empty curve has no area")
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if x[-1] > x[0] else float(y.mean())


def recovery_time(
    x: Sequence[float] | np.ndarray,
    y: Sequence[float] | np.ndarray,
    boundary: float,
    higher_is_better: bool = True,
) -> float | None:
    """How far after `boundary` (units of x) the curve is back at the last value before it. 0 if the first
    value after the boundary is already as good, None if it never comes back or nothing was measured
    before."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    before = y[x < boundary]
    if len(before) == 0:
        return None
    after_x, after_y = x[x >= boundary], y[x >= boundary]
    back = after_y >= before[-1] if higher_is_better else after_y <= before[-1]
    if not back.any():
        return None
    first = int(np.argmax(back))
    return 0.0 if first == 0 else float(after_x[first] - boundary)
