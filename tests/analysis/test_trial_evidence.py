"""What the committed runs say about trials: analysis/trial_evidence.py."""

import numpy as np
import pandas as pd
import pytest

from analysis import trial_evidence
from analysis.runs import Results
from analysis.trial_evidence import METHODS, Panel, cautious, leader, losses, lost, panels

FINAL = np.array([[0.0] * 6, [0.25] * 6, [0.5] * 6, [1.0] * 6])  # of none, full reset, S&P, FIRE
FINAL = FINAL + 0.1 * np.arange(6)  # seeds differ, methods do not change places


def panel(early):
    return Panel("panel", "images", {0.2: early}, FINAL, {0.2: 0.2})


def test_loss_is_the_share_of_the_range_that_the_choice_leaves():
    right, wrong = panel(FINAL), panel(-FINAL)
    assert lost(right, leader, 0.2) == pytest.approx(0) and lost(wrong, leader, 0.2) == pytest.approx(1)
    assert [lost(right, name, 0.2) for name in METHODS] == pytest.approx([1, 0.75, 0.5, 0])
    assert losses([right], leader, 0.2, repeats=6) == {}  # no seed is left to judge by
    assert losses([right], leader, 0.5) == {}


def test_cautious_rule_keeps_none_until_the_interval_excludes_0():
    clear = np.array([[0.0, 0.1, 0.2], [0.0, 0.1, 0.2], [0.0, 0.1, 0.21], [0.5, 0.6, 0.71]])
    noisy = np.array([[0.0, 0.1, 0.2], [0.4, -0.3, 0.1], [0.2, 0.4, -0.5], [0.9, -0.6, 0.4]])
    assert METHODS[cautious(clear)] == METHODS[leader(clear)] == "fire"
    assert METHODS[cautious(noisy)] == "none" and METHODS[leader(noisy)] == "fire"


def test_trial_reads_the_first_value_at_or_after_its_share_and_never_a_late_one():
    """Boundary at step 100, end at 200, logged at 125 and 200: 20 % reads 125, 5 % and 50 % read nothing."""
    rows = [
        {
            "label": label,
            "seed": seed,
            "phase": phase,
            "step": step,
            "metric": "test_accuracy",
            "value": value,
        }
        for place, label in enumerate(METHODS)
        for seed in range(4)
        for phase, step, value in ((0, 100, 0.0), (1, 125, 10.0 + place), (1, 200, 20.0 + place + seed))
    ]
    setting = {"experiment": "fig2a_x", "size": "medium", "data": "d", "domain": "vision", "figure": "fig2a"}
    setting |= {"protocol": "warm_start", "status": "done"}
    runs = pd.DataFrame([{"label": m, "method": m, "seed": s} | setting for m in METHODS for s in range(4)])
    empty = pd.DataFrame(columns=["label"])
    (found,) = panels([Results(runs, pd.DataFrame(rows), empty, empty)])
    assert set(found.early) == {0.2} and found.read[0.2] == pytest.approx(0.25)
    assert found.early[0.2].tolist() == [[10.0 + place] * 4 for place in range(4)]
    assert found.final[3].tolist() == [23.0, 24.0, 25.0, 26.0]


def test_cell_has_mean_interval_range_and_count():
    assert trial_evidence.cell([0.1, 0.2, 0.6]) == "0.30 [-0.36, 0.96; 0.15 to 0.40] (3)"
    assert trial_evidence.cell([0.07, 0.07]) == "0.07 (2)" and trial_evidence.cell([]) == ""
