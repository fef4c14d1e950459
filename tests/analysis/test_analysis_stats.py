"""Intervals, paired differences and Holm's correction against hand-worked numbers."""

import numpy as np
import pytest

from analysis import stats


def test_one_seed_has_no_interval():
    estimate = stats.estimate([0.5])
    assert (estimate.mean, estimate.n) == (0.5, 1) and np.isnan(
        [estimate.low, estimate.high, estimate.p]
    ).all()


def test_three_seeds_by_hand():
    estimate = stats.estimate([1.0, 2.0, 3.0])
    assert estimate.mean == pytest.approx(2.0)
    assert estimate.high - estimate.mean == pytest.approx(4.302653 / np.sqrt(3), abs=1e-5)
    assert estimate.p == pytest.approx(0.0741799, abs=1e-6)  # t = 2 sqrt(3) with two degrees of freedom


def test_seeds_that_agree_have_no_scatter():
    assert stats.estimate([0.5, 0.5]) == (0.5, 0.5, 0.5, 0.0, 2)
    assert stats.estimate([0.0, 0.0, 0.0]).p == 1.0


def test_paired_difference_uses_common_seeds_only():
    gap = stats.estimate(stats.paired({1: 0.8, 2: 0.9, 7: 5.0}, {1: 0.7, 2: 0.7, 3: 0.0}))
    assert gap.n == 2 and gap.mean == pytest.approx(0.15)
    assert stats.estimate(stats.paired({1: 1.0}, {2: 1.0})).n == 0


def test_holm_by_hand():
    """Sorted: .005 x 4, .01 x 3, .03 x 2, .04 x 1, made to grow."""
    assert stats.holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    corrected = stats.holm([0.5, np.nan, 0.9])
    assert corrected[[0, 2]].tolist() == [1.0, 1.0] and np.isnan(corrected[1])
    assert stats.holm([]).tolist() == []
