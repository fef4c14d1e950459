"""What is installed and which runs are where, as `make doctor` and `make status` say it."""

from synthetic_runs import write_run

from harness import doctor, status


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


def test_doctor_names_the_command_that_installs(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "installed", lambda name: "" if name == "ale-py" else "1.0")
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "dqn: cannot start" in text and "make install-dqn" in text
    assert text.count("  MISSING ") == 1
