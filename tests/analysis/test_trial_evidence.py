"""What the committed runs say about trials: analysis/trial_evidence.py."""

import numpy as np
import pandas as pd
import pytest

from analysis import trial_evidence
from analysis.runs import COLUMNS, Results
from analysis.trial_evidence import ALWAYS, METHODS, Panel, leader, losses, lost, panels

FINAL = np.array([[0.0] * 6, [0.25] * 6, [0.5] * 6, [1.0] * 6])  # of none, full reset, S&P, FIRE
FINAL = FINAL + 0.1 * np.arange(6)  # seeds differ, methods do not change places


def test_loss_is_the_share_of_the_range_that_the_choice_leaves():
    right, wrong = (Panel("images", {0.2: early}, FINAL, {0.2: 0.2}) for early in (FINAL, -FINAL))
    assert lost(right, leader, 0.2) == pytest.approx(0) and lost(wrong, leader, 0.2) == pytest.approx(1)
    assert [lost(right, ALWAYS[name], 0.2) for name in METHODS] == pytest.approx([1, 0.75, 0.5, 0])
    assert losses([right], leader, 0.2)["images"] == [pytest.approx(0)]
    assert losses([right], leader, 0.2, repeats=6)["all"] == []  # no seed is left to judge by
    assert losses([right], leader, 0.5)["all"] == []


def results_of(runs, values):
    setting = {"experiment": "fig2a_x", "size": "medium", "data": "d", "domain": "vision", "figure": "fig2a"}
    runs, metrics = (pd.DataFrame(rows).assign(**setting, protocol="warm_start") for rows in (runs, values))
    return Results(runs, metrics.assign(metric="test_accuracy"), pd.DataFrame(columns=COLUMNS["boundaries"]))


def test_trial_reads_the_first_value_at_or_after_its_share_and_never_a_late_one():
    """Boundary at 100 (and 10 more for each seed), end 100 later, logged after 25 and 100: only 20 % reads anything, 25."""
    rows = [
        {"label": label, "seed": seed, "phase": phase, "step": step + 10 * seed, "value": value}
        for place, label in enumerate(METHODS)
        for seed in range(4)
        for phase, step, value in ((0, 100, 0.0), (1, 125, 10.0 + place), (1, 200, 20.0 + place + seed))
    ]
    runs = [{"label": m, "method": m, "seed": s, "status": "done"} for m in METHODS for s in range(4)]
    (found,) = panels([results_of(runs, rows)])
    assert set(found.early) == {0.2} and found.read[0.2] == pytest.approx(0.25)
    assert found.early[0.2].tolist() == [[10.0 + place] * 4 for place in range(4)]
    assert found.final[3].tolist() == [23.0, 24.0, 25.0, 26.0]


def test_fresh_trials_are_judged_by_the_full_runs_of_their_seed():
    """FIRE leads in the trials and is second of four in the full runs, so a third of the range is lost; S&P's run failed."""
    ends = {"none": 0.0, "full_reset": 0.9, "fire": 0.6}
    tried = {(m, r): 0.1 * r + (m == "fire") for m in METHODS for r in (1, 2, 3)}
    full, trial = {"seed": 26, "overrides": "[]"}, {"seed": 26, "overrides": '["trial.share=.2"]'}
    runs = [full | {"label": m, "method": m, "status": "done" if m in ends else "failed"} for m in METHODS]
    runs += [trial | {"label": f"{m}-trial{r}", "method": m, "status": "done"} for m, r in tried]
    values = ends | {f"{m}-trial{r}": value for (m, r), value in tried.items()}
    at = {"seed": 26, "phase": 1, "step": 9}
    rows = [at | {"label": label, "value": value} for label, value in values.items()]
    (row,) = trial_evidence.fresh(results_of(runs, rows)).to_dict("records")
    assert row["leader"] == row["cautious"] == "fire" and row["loss of the leader"] == pytest.approx(1 / 3)
    assert row["loss of none"] == 1 and row["loss of fire"] == pytest.approx(1 / 3)
    other = [run | {"overrides": run["overrides"].replace("=.2", "=.05")} for run in runs]
    assert trial_evidence.fresh(results_of(other, rows)).empty  # trials of another length
    assert trial_evidence.fresh(results_of(runs[:-1], rows)).empty  # one repeat is not done


@pytest.mark.parametrize("loss, said", [(0, "holds up"), (0.5, "does not hold up"), (0.3, "is not decided")])
def test_verdict_follows_the_written_rule(loss, said):
    none = [1.0, 0.9, 0.8, 1.0, 0.9] if loss != 0.3 else [1.0, 0.0, 0.9, 0.0, 0.4]
    table = pd.DataFrame({"experiment": list("abcde"), "loss of none": none})
    table = table.assign(**{"loss of the leader": loss, "loss of fire": 0.4}, repeats=3)
    table = pd.concat([table.assign(seed=seed) for seed in range(26, 31)], ignore_index=True)
    assert f"The trial {said}:" in trial_evidence.verdict(table)
    assert trial_evidence.verdict(table[:3]) == "Open: 3 of 25 seeds, in 3 of 5 panels."
    for other in (table.assign(repeats=2), table.assign(seed=1)):
        assert "Open: 0 of 25 seeds" in trial_evidence.verdict(other)
