"""What a calibration says of runs whose numbers are known by hand."""

import json

import pandas as pd
import pytest

from analysis import calibration
from analysis.runs import Results, figure_and_panel
from tests.synthetic_runs import write_run


def lines(metric, values):
    """values: (label, seed, phase, step, value)."""
    columns = ["label", "seed", "phase", "step", "value"]
    return pd.DataFrame(values, columns=columns).assign(metric=metric)


def rows_of(experiment, *metrics):
    figure, _ = figure_and_panel(experiment)
    domain = {"fig3": "language", "fig4a": "dqn", "fig4b": "sac"}.get(figure, "vision")
    run = {"status": "done", "domain": domain, "figure": figure, "protocol": "" if figure else experiment}
    nothing = pd.DataFrame()
    return calibration.rows(Results(pd.DataFrame([run]), pd.concat(metrics), nothing, nothing))


def test_images_lose_what_a_full_reset_ends_above_no_reset():
    ends = [("none", 1, 0.30), ("none", 2, 0.40), ("full_reset", 1, 0.33), ("full_reset", 2, 0.45)]
    ends += [("fire", 1, 0.9)]  # of one seed alone: the other seed still counts
    rows = [(m, s, 1, step, v if step else 0.9) for m, s, v in ends for step in (0, 5)]
    told = lines("test_accuracy", rows)
    (row,) = rows_of("fig2a_cifar10_resnet18", told)
    assert (row["seeds"], row["none"], row["full_reset"]) == (2, pytest.approx(0.35), pytest.approx(0.39))
    assert row["difference"] == pytest.approx(0.04)
    assert row["interval"] == "-0.08706..0.1671"  # 0.04 -+ 12.706 * 0.01: one degree of freedom


def test_random_labels_are_judged_by_the_last_quarter_of_the_tasks():
    told = [
        (method, 1, task, 10 * task + epoch, (level if task >= 6 else 1.0) if epoch else 0.5)
        for method, level in (("none", 0.3), ("full_reset", 0.7))
        for task in range(8)
        for epoch in (0, 9)
    ]
    (row,) = rows_of("random_label", lines("train_accuracy", told))
    assert (row["none"], row["full_reset"]) == (pytest.approx(0.3), pytest.approx(0.7))
    assert row["difference"] == pytest.approx(0.4)


def test_language_overfits_and_loses():
    old = [("none", 1, 0, step, value) for step, value in ((0, 5.0), (10, 3.0), (20, 3.5))]
    mixture = [(m, 1, 1, 30, v) for m, v in (("none", 4.2), ("full_reset", 4.0))]
    told = pd.concat([lines("val_loss_a", old), lines("val_loss_mix", mixture)])
    rise, lost = rows_of("fig3_60k", told)
    assert rise["difference"] == pytest.approx(0.5) and rise["interval"] == ""
    assert lost["difference"] == pytest.approx(0.2)


def test_agents_learn_and_lose():
    """Only the last quarter of a half counts: steps above 6 of 0 to 8, and above 16 of 10 to 18."""
    returns = [
        (m, 1, 0, step, 10.0 if step > 6 else 90.0) for m in ("none", "full_reset") for step in (0, 4, 8)
    ]
    for method, level in (("none", 12.0), ("full_reset", 9.0)):
        returns += [(method, 1, 1, step, level if step > 16 else 90.0) for step in (10, 14, 18)]
    told = pd.concat([lines("eval_return", returns), lines("random_return", [("none", 1, 0, 0, 4.0)])])
    learned, lost = rows_of("fig4b_walk", told)
    assert learned["difference"] == pytest.approx(10 - 4)
    assert (lost["none"], lost["full_reset"]) == (pytest.approx(2), pytest.approx(5))
    assert lost["difference"] == pytest.approx(3)


def test_finished_runs_without_overrides_are_read_and_written_with_their_time(tmp_path, monkeypatch, capsys):
    for label, seed, value, end in (
        ("none", 1, 0.3, "DONE"),
        ("none", 2, 0.1, None),
        ("none-x=1", 1, 0.9, "DONE"),
        ("full_reset", 1, 0.4, "DONE"),
    ):
        lines = [{"phase": 1, "step": 5, "test_accuracy": value}]
        folder = write_run(tmp_path, "fig2a_cifar10_resnet18", label, seed, lines, end=end)
        timing = [{"phase": 1, "boundary_seconds": 9.0}, {"phase": 1, "train_seconds": 90.0}]
        (folder / "timing.jsonl").write_text("\n".join(map(json.dumps, timing)) + "\n")
    monkeypatch.setattr(calibration, "RESULTS", tmp_path)
    given = ["fig2a_cifar10_resnet18", "small", "--setting", "any", "--root", str(tmp_path), "--chosen"]
    assert calibration.main(given) == 0
    (row,) = pd.read_csv(tmp_path / "calibration.csv", dtype={"commit": str}).to_dict("records")
    assert (row["difference"], row["minutes"], row["commit"]) == (pytest.approx(0.1), 1.5, "0123456789")
    assert (row["seeds"], row["chosen"], row["setting"]) == (1, "yes", "any")
    assert calibration.main([given[0], "medium", *given[2:]]) == 2
    assert "error: no finished run of fig2a_cifar10_resnet18, size medium" in capsys.readouterr().err
