"""What predicts the gain of FIRE, on numbers known by hand."""

import numpy as np
import pandas as pd
import pytest
from synthetic_runs import boundary_report, warm_start_lines, write_run

from analysis import predictors
from analysis.runs import load, settings


def test_a_measure_that_decides_the_gain_predicts_panels_it_has_not_seen():
    x = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    lost = [1.0, -1.0, 1.1, -1.1, 1.2]
    table = pd.DataFrame({"gain": 0.5 * x - 0.2, "dormant": x, "lost": lost, "rank": np.nan})
    table["dfi"], table["norm"] = np.nan, [1.0, 2.0, 3.0, np.nan, np.nan]
    found = predictors.errors(table).set_index("measure")
    assert list(found.index) == ["dormant", "lost"]  # the others are known for fewer than five panels
    assert found.loc["dormant", "error"] == pytest.approx(0.0, abs=1e-12) and found.loc[
        "dormant", "correlation"
    ] == pytest.approx(1.0)
    # the mean of the four others is off by 5/4 of the distance from the mean of all: 1.25 * 0.5 * sqrt(2)
    assert found.loc["dormant", "error_of_mean"] == pytest.approx(1.25 * 0.5 * np.sqrt(2))
    assert found.loc["lost", "ratio"] > 1
    fewer = [predictors.unseen_errors(np.delete(lost, i), np.delete(table["gain"], i)) for i in range(5)]
    ratios = [line / mean for line, mean in fewer]
    assert (found.loc["lost", "lowest"], found.loc["lost", "highest"]) == (min(ratios), max(ratios))


def test_measures_of_a_panel_by_hand(tmp_path):
    """FIRE ends at 0.6 and a full reset at 0.5 where none ends at 0.4; a tenth of the units was dormant, the rank 100, and
    DfI 18 before and 1.5 after, over three matrices."""
    for seed in (1, 2):
        for label, level in {"none": 0.4, "fire": 0.6, "full_reset": 0.5}.items():
            lines = warm_start_lines(level - seed / 1000, seed)
            lines.insert(10, {"phase": 0, "step": 100, "dormant_share": 0.1, "feature_rank": 100.0})
            lines.append(
                {"phase": 0, "step": 100, "clock": seed}
            )  # equal in nothing else, a seed would count twice
            lines.append({"phase": 1, "step": 300, "dormant_share": 0.7, "feature_rank": 5.0})
            write_run(tmp_path, "fig2a_x", label, seed, lines, boundary=boundary_report(label))
    (row,) = predictors.panels(settings(load(tmp_path))).to_dict("records")
    assert (row["gain"], row["lost"]) == pytest.approx((0.5, 0.25))
    assert (row["dormant"], row["rank"], row["dfi"]) == pytest.approx((0.1, 2.0, np.log10(18.0 / 1.5)))
    assert np.isnan(row["norm"])
