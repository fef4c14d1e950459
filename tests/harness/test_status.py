"""Which runs are where, as `make status` says it."""

from synthetic_runs import write_run

from harness import status


def test_status_knows_the_missing(tmp_path, capsys):
    write_run(tmp_path, "random_label", "none", 1, [{"step": 1}])
    write_run(tmp_path, "random_label", "none", 2, [], end="FAILED")
    write_run(tmp_path, "random_label", "fire", 1, [], end=None)
    (write_run(tmp_path, "random_label", "dash", 1, [], end="FAILED") / "FAILED").write_text("")
    status.main(["--root", str(tmp_path)])
    text = capsys.readouterr().out
    assert "missing: random_label small fire seed 2" in text
    assert "failed: random_label small none seed 2" in text
    assert "loss is nan" in text and "(empty)" in text and "never run: " in text
