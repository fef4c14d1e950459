"""Intervals, differences, areas and recovery times against hand-worked numbers and a reference package."""

import importlib
import importlib.util
import sys
import types

import numpy as np
import pytest

from analysis import stats

FIXED = np.array([0.71, 0.74, 0.69, 0.80, 0.77, 0.73, 0.75, 0.72, 0.70, 0.90, 0.66, 0.76])


def test_one_seed_has_no_interval():
    estimate = stats.estimate([0.5])
    assert (estimate.low, estimate.high, estimate.n, estimate.kind) == (None, None, 1, "none")
    assert "one seed" in estimate.note


def test_three_seeds_get_students_t_and_say_so():
    estimate = stats.estimate([1.0, 2.0, 3.0])
    assert estimate.kind == "t" and estimate.note == "only 3 seeds"
    assert estimate.value == pytest.approx(2.0)
    assert estimate.high - estimate.value == pytest.approx(4.302653 / np.sqrt(3), abs=1e-5)


def test_many_seeds_get_the_bootstrap_and_it_is_deterministic():
    first, second = stats.estimate(FIXED), stats.estimate(FIXED)
    assert first == second and first.kind == "bootstrap"
    assert first.low < FIXED.mean() < first.high


def test_global_generator_is_not_touched():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    stats.estimate(FIXED, kind="bootstrap")
    assert (np.random.get_state()[1] == before).all()


def test_t_interval_covers_95_percent_and_bootstrap_of_three_does_not():
    generator = np.random.default_rng(0)
    samples = generator.normal(size=(2000, 3))
    covered = [e.low <= 0 <= e.high for e in (stats.estimate(s, kind="t") for s in samples)]
    assert 0.93 < np.mean(covered) < 0.97
    ranges = [s.min() <= 0 <= s.max() for s in samples]
    assert np.mean(ranges) < 0.8


def test_bad_values_are_refused():
    for values in ([], [1.0, float("nan")], [[1.0]]):
        with pytest.raises(ValueError):
            stats.estimate(values)


def test_interquartile_mean_drops_both_tails():
    assert stats.interquartile_mean(np.array([-100.0, 1.0, 3.0, 100.0])) == pytest.approx(2.0)


def test_paired_difference_uses_common_seeds_only():
    gap = stats.paired_difference({1: 0.8, 2: 0.9, 7: 5.0}, {1: 0.7, 2: 0.7, 3: 0.0})
    assert gap.n == 2 and gap.value == pytest.approx(0.15)
    assert stats.paired_difference({1: 1.0}, {2: 1.0}) is None


def test_pairing_removes_what_seeds_share():
    shared = np.array([0.1, 0.5, 0.9])
    gap = stats.paired_difference(dict(enumerate(shared + 0.01)), dict(enumerate(shared)))
    assert gap.excludes_zero and gap.value == pytest.approx(0.01)


def test_probability_of_improvement_by_hand():
    assert stats.probability_of_improvement(np.array([1.0, 3.0]), np.array([2.0, 2.0])).value == 0.5
    assert stats.probability_of_improvement(
        np.array([1.0, 2.0]), np.array([1.0, 0.0])
    ).value == pytest.approx(7 / 8)


def test_area_is_the_mean_height():
    assert stats.area_under_curve([0, 10, 20], [0.0, 1.0, 1.0]) == pytest.approx(0.75)
    assert stats.area_under_curve([20, 0, 10], [1.0, 0.0, 1.0]) == pytest.approx(0.75)
    assert stats.area_under_curve([5], [0.3]) == pytest.approx(0.3)


def test_recovery_time_counts_from_the_boundary():
    x, y = [1, 2, 3, 4, 5, 6], [0.2, 0.6, 0.1, 0.5, 0.6, 0.9]
    assert stats.recovery_time(x, y, boundary=3) == 2.0
    assert stats.recovery_time(x, y, boundary=6) == 0.0
    assert stats.recovery_time(x, [-v for v in y], boundary=3, higher_is_better=False) == 2.0
    assert stats.recovery_time(x[:4], y[:4], boundary=3) is None
    assert stats.recovery_time(x, y, boundary=0) is None


def rliable_modules():
    """rliable needs only `arch.bootstrap`; the package around it may not load next to a newer pandas."""
    found = importlib.util.find_spec("arch")
    if found is None or importlib.util.find_spec("rliable") is None:
        pytest.skip("rliable is not installed (pip install -e '.[reference]')")
    package = types.ModuleType("arch")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules.setdefault("arch", package)
    return importlib.import_module("rliable.library"), importlib.import_module("rliable.metrics")


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
def test_intervals_agree_with_rliable():
    library, metrics = rliable_modules()
    generator = np.random.default_rng(3)
    scores = generator.normal(0.6, 0.1, size=(12, 4))
    for theirs, ours in (
        (metrics.aggregate_iqm, stats.interquartile_mean),
        (metrics.aggregate_mean, stats.mean),
    ):
        point, interval = library.get_interval_estimates(
            {"a": scores},
            lambda x, f=theirs: np.array([f(x)]),
            reps=4000,
            random_state=np.random.RandomState(0),
        )
        estimate = stats.stratified_estimate(scores, ours)
        assert estimate.value == pytest.approx(point["a"][0], abs=1e-9)
        assert [estimate.low, estimate.high] == pytest.approx(interval["a"][:, 0].tolist(), abs=1e-2)
    chance, interval = library.get_interval_estimates(
        {"pair": (scores[:, :1], scores[:, 1:2])},
        lambda x, y: np.array([metrics.probability_of_improvement(x, y)]),
        reps=2000,
        random_state=np.random.RandomState(0),
    )
    ours = stats.probability_of_improvement(scores[:, 0], scores[:, 1])
    assert ours.value == pytest.approx(chance["pair"][0], abs=1e-9)
    assert [ours.low, ours.high] == pytest.approx(interval["pair"][:, 0].tolist(), abs=3e-2)
