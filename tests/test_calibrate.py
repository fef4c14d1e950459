"""What a calibration says of runs whose numbers are known by hand."""

import json

import pandas as pd
import pytest

from benchmarks import calibrate
from fire_core.errors import UserError
from tests.synthetic_runs import write_run


def lines(metric, values):
    """values: (method, seed, phase, step, value)."""
    columns = ["method", "seed", "phase", "step", "value"]
    return pd.DataFrame(values, columns=columns).assign(metric=metric)


def test_images_lose_what_a_full_reset_ends_above_no_reset():
    ends = [("none", 1, 0.30), ("none", 2, 0.40), ("full_reset", 1, 0.33), ("full_reset", 2, 0.45)]
    ends += [("fire", 1, 0.9)]  # of one seed alone: the other seed still counts
    told = lines(
        "test_accuracy", [(m, s, 1, step, v if step else 0.9) for m, s, v in ends for step in (0, 5)]
    )
    (row,) = calibrate.rows("fig2a_cifar10_resnet18", told)
    assert (row["seeds"], row["none"], row["full_reset"]) == (2, pytest.approx(0.35), pytest.approx(0.39))
    assert row["difference"] == pytest.approx(0.04)
    assert (
        row["interval"] == "-0.08706..0.1671"
    )  # 0.04 -+ 12.706 * 0.01, Student's t with one degree of freedom


def test_random_labels_are_judged_by_the_last_quarter_of_the_tasks():
    told = [
        (method, 1, task, 10 * task + epoch, (level if task >= 6 else 1.0) if epoch else 0.5)
        for method, level in (("none", 0.3), ("full_reset", 0.7))
        for task in range(8)
        for epoch in (0, 9)
    ]
    (row,) = calibrate.rows("random_label", lines("train_accuracy", told))
    assert (row["none"], row["full_reset"]) == (pytest.approx(0.3), pytest.approx(0.7))
    assert row["difference"] == pytest.approx(0.4)


def test_language_overfits_and_loses():
    old = [("none", 1, 0, step, value) for step, value in ((0, 5.0), (10, 3.0), (20, 3.5))]
    mixture = [(m, 1, 1, 30, v) for m, v in (("none", 4.2), ("full_reset", 4.0))]
    told = pd.concat([lines("val_loss_a", old), lines("val_loss_mix", mixture)])
    rise, lost = calibrate.rows("fig3_60k", told)
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
    learned, lost = calibrate.rows("fig4b_walk", told)
    assert learned["difference"] == pytest.approx(10 - 4)
    assert (lost["none"], lost["full_reset"]) == (pytest.approx(2), pytest.approx(5))
    assert lost["difference"] == pytest.approx(3)


def test_runs_on_disk_are_read_with_their_time(tmp_path):
    for method, value in (("none", 0.3), ("full_reset", 0.4)):
        folder = tmp_path / "fig2a_cifar10_resnet18" / "medium" / method / "seed_1"
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text(json.dumps({"method": method, "commit": "0123456789abcdef"}))
        (folder / "metrics.jsonl").write_text(
            json.dumps({"phase": 1, "step": 5, "test_accuracy": value}) + "\n"
        )
        timing = [{"phase": 1, "boundary_seconds": 9.0}, {"phase": 1, "train_seconds": 90.0}]
        (folder / "timing.jsonl").write_text("\n".join(map(json.dumps, timing)) + "\n")
        (folder / "DONE").write_text("")
    told, minutes, commit = calibrate.on_disk(tmp_path, "fig2a_cifar10_resnet18", "medium")
    (row,) = calibrate.rows("fig2a_cifar10_resnet18", told)
    assert (row["difference"], minutes, commit) == (pytest.approx(0.1), 1.5, "0123456789")


def test_runs_with_overrides_and_unfinished_runs_are_left_out(tmp_path):
    for label, seed, value, end in (
        ("none", 1, 0.3, "DONE"),
        ("none", 2, 0.1, None),
        ("none-x=1", 1, 0.9, "DONE"),
        ("full_reset", 1, 0.4, "DONE"),
    ):
        write_run(tmp_path, "random_label", label, seed, [{"phase": 0, "step": 1, "loss": value}], end=end)
    told, _, _ = calibrate.on_disk(tmp_path, "random_label", "small")
    assert sorted(told["value"]) == [0.3, 0.4]
    with pytest.raises(UserError, match="no finished run of random_label, size medium"):
        calibrate.on_disk(tmp_path, "random_label", "medium")


def test_a_folder_without_runs_is_one_line(tmp_path, monkeypatch, capsys):
    given = ["calibrate", "random_label", "medium", "--setting", "any", "--root", str(tmp_path)]
    monkeypatch.setattr("sys.argv", given)
    with pytest.raises(SystemExit):
        calibrate.main()
    assert "error: no finished run of random_label, size medium" in capsys.readouterr().err
