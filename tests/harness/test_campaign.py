"""Campaigns: the order of the sweeps, what a plan counts, the commands, what a budget leaves out, how sweeps end."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from analysis import claims
from fire_core.errors import UserError
from harness import campaign
from harness.campaign import command, duration, launcher_overrides, load, main, measure, plan, train
from harness.config import in_file
from harness.domains import find

ROOT = Path(__file__).resolve().parents[2]
TINY = """
size: smoke
options: {threads: 1}
minutes: {random_label: 30}
assumed: a worked example
parts:
  - - {experiment: random_label, method: [none, fire], seed: [1, 2], jobs: 2}
    - {experiment: label_noise, method: none, seed: 1}
  - - {experiment: random_label, method: none, seed: [[3, 4]], batch_size: 8}
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


def settings(sweep):
    return [(run["experiment"], run["method"], run["seed"]) for run in sweep.runs()]


def test_one_seed_of_every_sweep_of_a_part_before_the_second_and_the_next_part(tiny):
    assert [settings(sweep) for sweep in load(tiny, "runs").sweeps] == [
        [("random_label", "none", "1"), ("random_label", "fire", "1")],
        [("label_noise", "none", "1")],
        [("random_label", "none", "2"), ("random_label", "fire", "2")],
        [("random_label", "none", "3"), ("random_label", "none", "4")],
    ]


def test_a_sweep_is_what_one_types_and_given_overrides_go_where_the_key_exists(tiny):
    [*_, last] = load(tiny, "elsewhere", ["learning_rate=0.01", "batch_size=16"]).sweeps
    assert last.domain == "vision" and last.overrides == (
        "experiment=random_label", "size=smoke", "method=none", "seed=3,4", "threads=1", "batch_size=16",
        "learning_rate=0.01", "run.root=elsewhere",
    )  # fmt: skip
    with pytest.raises(UserError, match=r"env.game=catch: no script of this campaign has this key"):
        load(tiny, "runs", ["env.game=catch"])


def finish(root, experiment, label, seed, seconds):
    """Leave a finished run that took so long."""
    folder = root / experiment / "smoke" / label / f"seed_{seed}"
    folder.mkdir(parents=True)
    meta = {"experiment": experiment, "method": label.split("-")[0], "started": "2026-01-01T00:00:00+00:00"}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "DONE").write_text("")
    os.utime(folder / "DONE", (0, 1767225600 + seconds))


def test_a_plan_worked_by_hand(tiny, tmp_path):
    """Seven runs. Sweeps 1 and 3 have two runs of 30 min, two at a time: 0.5 h each. Sweep 2 has one run of 12 min, as was
    measured of another method. One run of sweep 4 is done, and the other takes 30 min."""
    finish(tmp_path, "label_noise", "fire", 1, 12 * 60)
    finish(tmp_path, "random_label", "none-batch_size=8", 4, 30 * 60)
    finish(tmp_path, "random_label", "full_reset", 1, 60)
    (tmp_path / "random_label/smoke/full_reset/seed_1/meta.json").write_text('{"started": "yesterday"}')
    assert measure(str(tmp_path), "smoke") == {("label_noise", "fire"): 12, ("random_label", "none"): 30}
    lines = plan(load(tiny, str(tmp_path)), str(tmp_path), "ray", None).splitlines()
    assert lines[0] == "campaign tiny, size=smoke: 6 runs in 4 sweeps; 1 runs are finished"
    hours = [line.split(" h  ") for line in lines[2:6]]
    assert [float(part[0].split()[-1]) for part in hours] == [1.0, 0.2, 1.0, 0.5]
    assert [float(part[1].split()[-1]) for part in hours] == [0.5, 0.7, 1.2, 1.7]
    assert lines[7] == "total: 1.7 hours; 2.7 hours of runs with --launcher ray"
    assert lines[8].startswith("  assumed of 6 runs: as finished runs of the same experiment")
    nothing_is_done = plan(load(tiny, str(tmp_path)), str(tmp_path / "elsewhere"), "ray", None).splitlines()
    assert nothing_is_done[8] == "  assumed of 6 runs: minutes in the campaign's file, for a worked example"
    assert nothing_is_done[9].startswith("  assumed of 1 runs: minutes in the experiments' files")
    one_by_one = plan(load(tiny, str(tmp_path)), str(tmp_path), "basic", None).splitlines()
    assert one_by_one[7].startswith("total: 2.7 hours")
    two_at_a_time = plan(load(tiny, str(tmp_path)), str(tmp_path), "ray", 2).splitlines()
    assert two_at_a_time[7].startswith("total: 1.7 hours")  # a run alone takes as long as without a neighbour


def test_launchers_and_jobs_reach_hydra(tiny, capsys, monkeypatch):
    monkeypatch.setattr(campaign.importlib.util, "find_spec", lambda name: name)
    first = load(tiny, "runs").sweeps[0]
    script, *words = command(first, "basic", None)[1:]
    assert script.endswith("vision/train.py") and words == ["-m", *first.overrides]
    assert "+hydra.launcher.ray.init.num_cpus=2" in command(first, "ray", None)  # `jobs` of the sweep
    assert "+hydra.launcher.ray.init.num_cpus=5" in command(first, "ray", 5)
    assert launcher_overrides("submitit_slurm hydra.launcher.partition=gpu", 8) == [
        "hydra/launcher=submitit_slurm", "hydra.launcher.array_parallelism=8", "hydra.launcher.partition=gpu",
    ]  # fmt: skip
    assert main([tiny, "--commands", "--launcher", "submitit_local", "--jobs", "3", "precision=bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("hydra.launcher.array_parallelism=3" in shlex.split(one) for one in lines)


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "is no campaign"),
        ("!!python/object:os.system {}", "is no campaign"),
        ("{size: smoke, parts: [[{experiment: random_label}]]}", "'seed'"),
        ("{size: smoke, frist: 1, parts: []}", "'frist' is unknown"),
        (TINY.replace("label_noise", "fig2"), "experiment 'fig2' does not exist; did you mean 'fig"),
        (TINY.replace("batch_size", "batchsize"), "did you mean 'batch_size'"),
    ],
)
def test_files_that_are_no_campaign_are_one_line(tmp_path, text, told):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=told):
        load(str(path), "runs")


def test_unknown_names_and_times_are_refused():
    with pytest.raises(UserError, match="there is no campaign 'aaa"):
        load("a" * 5000, "runs")
    assert measure("a" * 5000, "smoke") == {}
    assert duration("20m") == 1200 and duration("1.5h") == 5400
    with pytest.raises(UserError, match="30 hours"):
        duration("30 hours")
    with pytest.raises(UserError, match="--launcher slurm is unknown; did you mean 'submitit_slurm'"):
        launcher_overrides("slurm", 1)


@pytest.mark.parametrize("name, runs", [("smoke", 12), ("medium", 1168), ("paper", 465)])
def test_the_campaigns_of_the_repository_name_runs_that_exist(name, runs):
    found = load(name, "runs")
    assert sum(len(sweep.runs()) for sweep in found.sweeps) == runs
    for sweep in found.sweeps:
        for experiment, method, _ in settings(sweep):
            assert method not in find(sweep.domain).refuses
            assert found.size in in_file(experiment, "at")


def test_medium_has_the_confirming_seeds_that_the_statistics_page_plans():
    """Those of every panel of Figures 2 and 3, and of the panels of Figure 4 that need no Atari emulator."""
    confirming = defaultdict(set)
    for sweep in [*load("medium", "runs").sweeps, *load("rivals", "runs").sweeps]:
        for experiment, method, seed in settings(sweep):
            if int(seed) > 5:
                confirming[experiment, method].add(int(seed))
    run = {experiment for experiment, _ in confirming}
    planned = claims.confirming_plan()
    assert confirming == {key: set(seeds) for key, seeds in planned.items() if key[0] in run}
    assert {experiment for experiment, _ in planned if not experiment.startswith("fig4")} < run


def python(code):
    return [sys.executable, "-c", code]


def test_a_failed_sweep_neither_hides_nor_sinks_the_others(tmp_path, capfd):
    leave = python(f"open({str(tmp_path / 'left')!r}, 'w')")
    assert train([python("raise SystemExit(3)"), python("raise SystemExit(75)"), leave]) == 1
    assert (tmp_path / "left").exists()
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("failed (exit code 3): ") and said[1].startswith("stopped: ") and len(said) == 2
    assert train([python("raise SystemExit(75)"), leave]) == 75
    assert train([leave]) == 0


def test_no_sweep_starts_after_the_budget(tmp_path, capfd):
    sweeps = [python(f"import time; time.sleep(1.5); open({str(tmp_path / n)!r}, 'w')") for n in "abc"]
    assert train(sweeps, budget=1) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    assert "the budget is used up before sweep 2 of 3" in capfd.readouterr().out


@pytest.mark.parametrize("number, code, expected", [(signal.SIGINT, 75, 75), (signal.SIGTERM, 143, 143)])
def test_a_signal_stops_the_sweep_and_starts_no_other(tmp_path, number, code, expected):
    # os._exit and short naps: sys.exit is lost while `open` closes the file, and a signal just before a long sleep waits
    waits = (
        f"import os, signal, time\nsignal.signal({int(number)}, lambda *_: os._exit({code}))\n"
        f"open({str(tmp_path / 'ready')!r}, 'w')\nwhile True: time.sleep(0.1)"
    )
    other = python(f"open({str(tmp_path / 'other')!r}, 'w')")
    code = f"import sys; from harness.campaign import train; sys.exit(train([{python(waits)!r}, {other!r}]))"
    process = subprocess.Popen(python(code), cwd=ROOT, start_new_session=True)
    until = time.monotonic() + 120
    while not (tmp_path / "ready").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == expected
    assert not (tmp_path / "other").exists()


@pytest.mark.timeout(900)
def test_a_stopped_campaign_resumes_and_trains_no_run_twice(tmp_path):
    path, root = tmp_path / "two.yaml", tmp_path / "runs"
    runs = "{experiment: random_label, method: [none, fire], seed: [1, 2]}"
    path.write_text(f"{{size: smoke, parts: [[{runs}]]}}")
    line = [sys.executable, "-m", "harness.campaign", str(path), "threads=1", "--root", str(root)]
    first = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + 300
    while not any(root.glob("*/smoke/*/seed_*/DONE")) and time.monotonic() < until:
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=300)
    assert first.returncode in (75, 130), output[-3000:]
    done = {mark: mark.stat().st_mtime_ns for mark in root.glob("*/smoke/*/seed_*/DONE")}
    assert 0 < len(done) < 4
    planned = subprocess.run([*line, "--plan"], cwd=ROOT, capture_output=True, text=True)
    assert f"{4 - len(done)} runs in 2 sweeps; {len(done)} runs are finished" in planned.stdout
    second = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert len(list(root.glob("*/smoke/*/seed_*/DONE"))) == 4
    assert {mark: mark.stat().st_mtime_ns for mark in done} == done
