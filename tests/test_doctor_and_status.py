"""What is installed and which runs are where, as `make doctor` and `make status` say it."""

import json

import pytest
from synthetic_runs import write_run

from fire_core.errors import UserError
from harness import doctor, status
from harness.runs.folders import describe_run, read_boundaries, read_config, read_lines, state_of


def test_status_knows_the_missing(tmp_path, capsys):
    write_run(tmp_path, "random_label", "none", 1, [{"step": 1}])
    write_run(tmp_path, "random_label", "none", 2, [], end="FAILED")
    write_run(tmp_path, "random_label", "fire", 1, [], end=None)
    (write_run(tmp_path, "random_label", "dash", 1, [], end="FAILED") / "FAILED").write_text("")
    assert status.main(["--root", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "missing: random_label small fire seed 2" in text
    assert "failed: random_label small none seed 2" in text
    assert "loss is nan" in text and "(empty)" in text and "never run: " in text


def test_a_done_run_without_its_metrics_is_damaged(tmp_path):
    folder = write_run(tmp_path, "random_label", "none", 1, [{"step": 1}])
    assert state_of(folder) == "done"
    (folder / "DONE").write_text("99 bytes of metrics.jsonl\n")
    assert state_of(folder) == "damaged"
    (folder / "DONE").write_text("")
    (folder / "metrics.jsonl").write_text("")
    assert state_of(folder) == "damaged"


def test_damaged_files_of_one_run_hide_no_other(tmp_path, capsys):
    good = write_run(tmp_path, "random_label", "none", 1, [{"step": 1}])
    deep = "[" * 100_000
    damage = {"DONE": b"\xff\xfe", "RUNNING": b"\xff", "meta.json": deep.encode(), "config.yaml": b"[1, 2]"}
    for seed, (name, content) in enumerate(damage.items(), start=2):
        end = "DONE" if seed > 3 else None
        folder = write_run(tmp_path, "random_label", "none", seed, [{"step": 1}], end=end)
        (folder / name).write_bytes(content)
    (folder / "boundary_1.json").write_text("3")
    (folder / "boundary_2.json").write_text('{"phase": "x"}')
    (folder / "metrics.jsonl").write_text(deep + "\n" + '{"step": 1}\n')
    write_run(tmp_path, "random_label", "no\x1b[2Jne", 1, [], end="FAILED")
    assert status.main(["--root", str(tmp_path), "--detail"]) == 0
    text = capsys.readouterr().out
    assert "done: random_label small none seed 1" in text and "\x1b" not in text
    assert read_boundaries(folder) == [{"phase": "x"}]
    assert read_lines(folder / "metrics.jsonl") == ([{"step": 1}], 1)
    with pytest.raises(UserError, match="holds no settings"):
        read_config(folder)
    odd = {"domain": "of another place", "earlier": 3, "overrides": "x", "trunk": 4, "method": ["m"]}
    (good / "meta.json").write_text(json.dumps(odd))
    assert describe_run(good, {})["status"] == "done"
    (good / "meta.json").write_text(json.dumps(odd | {"overrides": [1]}))
    assert "train.py" in describe_run(good, {})["command"]


def test_doctor_names_the_command_that_installs(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "installed", lambda name: "" if name == "ale-py" else "1.0")
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "dqn: cannot start" in text and "make install-dqn" in text
    assert text.count("  MISSING ") == 1
