"""Sweeps on this machine: what is shown, where the output goes, how signals stop all runs, and failures."""

import os
import signal
import time

from sweeps import finish, metrics, start


def test_ctrl_c_stops_all_runs_after_saving(tmp_path):
    """In a terminal, it reaches every process of the group, but the runs are in sessions of their own."""
    process = start(tmp_path, "protocol.epochs=400", "run.checkpoint_seconds=1000")
    until = time.monotonic() + 200
    while len(list(tmp_path.glob("random_label/smoke/*/seed_*/RUNNING"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 75, output
    assert "Traceback" not in output and "the same command resumes" in output
    assert not list(tmp_path.rglob("RUNNING"))
    logs = [path.read_text() for path in tmp_path.rglob("log.txt")]
    assert len(logs) == 2 and all("Traceback" not in log for log in logs)
    assert sum("; saved " in log for log in logs) >= 1  # the other one waits for the shared first phase


def test_a_failed_run_shows_its_error_the_others_are_done_and_the_same_command_does_the_rest(tmp_path):
    taken = tmp_path / "random_label" / "smoke" / "none"
    taken.parent.mkdir(parents=True)
    taken.write_text("a file where the runs of `none` want a folder")
    fails = tmp_path / "random_label" / "smoke" / "fire" / "seed_2"
    (fails / "metrics.jsonl").mkdir(parents=True)
    output, _ = (process := start(tmp_path)).communicate()
    assert process.returncode == 1 and "Traceback" not in output
    assert output.count("cannot write in") == 2 and "not done: none-" not in output
    assert "not done: none seed 1; none seed 2; fire seed 2" in output
    (line,) = [line for line in output.splitlines() if line.startswith("failed: ")]
    assert line.startswith("failed: fire seed 2: ") and line.endswith(f"({fails / 'log.txt'})")
    assert "sweep: 1 of 4 done, 1 failed" in output
    (fails / "metrics.jsonl").rmdir()
    taken.unlink()
    before = metrics(tmp_path)
    assert list(before) == ["fire/seed_1/metrics.jsonl"]
    (fails.with_name("seed_1") / "meta.json").write_text('{"commit": "another"}')
    lines = finish(start(tmp_path)).splitlines()
    ends = [line for line in lines if "seed" in line and "train_accuracy" in line and line.endswith(" s")]
    assert len(ends) == 3 and lines[-1] == "sweep: 4 of 4 done"
    assert len([line for line in lines if " running (" not in line]) <= 7  # where it takes long, it says so
    assert "1 of 4 runs are finished already; the files here may differ from the code of 1 of them" in lines
    logs = [log.read_text() for log in tmp_path.glob("random_label/smoke/*/seed_*/log.txt")]
    assert ["phase 2" in log for log in logs] == [True] * 4 and before.items() <= metrics(tmp_path).items()
