"""Campaigns: what a plan counts, which runs come first, what a budget leaves out, and that a killed campaign resumes."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fire_core.errors import UserError
from harness.campaign import __main__ as campaign
from harness.campaign import training
from harness.campaign.__main__ import at_a_time, check_options, duration, launcher_of, options_of
from harness.campaign.manifest import Job, load
from harness.campaign.rates import end_of, first_step, learning_starts, rate_of, wait_for_step
from harness.campaign.schedule import ready, simulate, spent_trunks, within
from harness.campaign.training import command
from harness.campaign.work import EVALUATION, Work, assumed
from harness.config import CONF
from harness.launch import identity
from harness.overrides import compose_config
from harness.runs.trunk import FolderLock

ROOT = Path(__file__).resolve().parents[1]
SMALL_WORK = Work(
    trunk=60, fork=40, trunk_tests=0, fork_tests=0, operations=None, precision="fp32", compile=False, per_step=1,
    trunk_bytes=100, running_bytes=10, left_bytes=1, memory=5, trunk_memory=7,
)  # fmt: skip


def job(name, trunk, domain="vision", rank=(0, False, 0, 0)):
    folder = Path("runs/cell/paper") / name / "seed_1"
    return Job(
        domain=domain, experiment="cell", method=name, seed=1, arguments=(), folder=folder,
        trunk=None if trunk is None else Path(trunk), work=SMALL_WORK, rank=rank, minutes=None, last_phase=None,
    )  # fmt: skip


def cost(jobs):
    return {one.name: (60.0, 40.0) for one in jobs}


# ------------------------------------------------------------------------------------------------ arithmetic
def test_an_evaluated_unit_counts_a_third():
    work = replace(SMALL_WORK, trunk_tests=30, fork_tests=60)
    assert work.trunk_units == pytest.approx(60 + 30 * EVALUATION)
    assert work.fork_units == pytest.approx(60)


def test_a_probe_replaces_what_is_assumed():
    from harness.campaign.rates import probe_key

    one = replace(job("none", None), work=replace(SMALL_WORK, operations=1e9))
    guess = rate_of(one, {}, processes=2)
    assert guess.source.startswith("assumed")
    expected = assumed()["share"]["vision"]["fp32"] * assumed()["peak"]["fp32"] * 1e12 / 1e9 / 2
    assert guess.per_second == pytest.approx(expected)
    measured = {probe_key(one, 2): 123.0}
    assert rate_of(one, measured, processes=2).per_second == 123.0
    assert rate_of(one, measured, processes=4).source.startswith("assumed")  # they share the machine


def test_compiled_cells_are_taken_to_be_faster_and_methods_that_watch_are_not_compiled(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text(
        "{size: paper, first: [fire], jobs: {vision: 2}, cells: "
        "[{experiment: fig2a_cifar10_resnet18, runs: [{seeds: [1], methods: [fire, snr]}]}]}"
    )
    rates = {}
    for option in ("compile=true", "compile=false"):
        for one in load(str(path), str(tmp_path), lambda domain, option=option: (option,)).jobs:
            rates[one.method, option] = rate_of(one, {}, processes=2).per_second
    factor = assumed()["compiled"]["vision"]
    assert rates["fire", "compile=true"] == pytest.approx(factor * rates["fire", "compile=false"])
    assert rates["snr", "compile=true"] == rates["snr", "compile=false"]


def test_options_go_to_the_runs_that_have_the_key():
    assert options_of("vision", ["data.folder=x", "env.game=y"]) == ("data.folder=x",)
    check_options(["data.folder=${data.name}"])
    for wrong in ("data.foldr=x", "data.folder"):
        with pytest.raises(UserError, match=f"--option {wrong}: give KEY=VALUE"):
            check_options([wrong])


@pytest.mark.parametrize(("experiment", "size"), [("fig4b_hopper", "smoke"), ("fig4a_asterix", "paper")])
def test_probes_of_agents_learn_before_the_boundary(experiment, size, tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text(
        f"{{size: {size}, first: [none], jobs: {{dqn: 1, sac: 1}}, cells: "
        f"[{{experiment: {experiment}, runs: [{{seeds: [1], methods: [none]}}]}}]}}"
    )
    (one,) = load(str(path), str(tmp_path)).jobs
    cfg = compose_config(one.domain, [*one.arguments, f"learning_starts={learning_starts(one)}"])
    assert 0 < learning_starts(one) < first_step(one) < cfg.midpoint


def test_a_run_that_ends_within_its_probe_is_measured_whole(tmp_path):
    home = tmp_path / "cell" / "seed_1"
    home.mkdir(parents=True)
    (home / "config.yaml").write_text("")
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    one = job("none", None)
    assert end_of(one, tmp_path) is None
    assert wait_for_step(process, tmp_path, 5)[0] == 0
    (home / "DONE").write_text("")
    assert end_of(one, tmp_path)[0] == 60 + 40


def test_a_rate_that_nobody_knows_says_so():
    timed = rate_of(replace(job("none", None), minutes=5), {}, processes=1)
    assert timed.per_second == pytest.approx(100 / 300)
    unknown = rate_of(job("none", None), {}, processes=1)
    assert unknown.source.startswith("unknown")
    assert unknown.per_second == pytest.approx(100 / (60 * assumed()["minutes"]))


def test_forecast_of_a_worked_campaign():
    """One trunk of 60 s, three forks of 40 s, two at a time: the leader ends at 100, the forks at 100 and 140."""
    jobs = [job(name, "trunk") for name in ("none", "fire", "full_reset")]
    forecast = simulate(jobs, cost(jobs), {"vision": 2})
    assert sorted(forecast.ends.values()) == [100, 100, 140]
    assert forecast.seconds == 140
    assert forecast.disk == 100 + 2 * 10 + 1  # the trunk, two runs and what the first one left
    assert forecast.left == 100 + 3 * 1
    assert forecast.memory == 2 * 5 + 7  # two processes and the replay that they share


def test_what_a_full_reset_repeats_is_counted_once():
    from harness.campaign.plan import once

    jobs = [replace(job(name, None), last_phase="same") for name in ("best", "later")]
    assert [one.work.fork for one in once(jobs)] == [40, 0]


def test_deleted_trunks_lower_the_peak_of_the_disk():
    jobs = [job(f"{name}{n}", f"trunk{n}") for n in (1, 2, 3) for name in ("none", "fire")]
    kept = simulate(jobs, cost(jobs), {"vision": 1})
    deleted = simulate(jobs, cost(jobs), {"vision": 1}, delete_trunks=["vision"])
    assert kept.disk == 3 * 100 + 10 + 5 * 1
    assert deleted.disk == 100 + 10 + 5 * 1
    assert deleted.left == 6


# ------------------------------------------------------------------------------------------------ order
@pytest.fixture(scope="module")
def medium_like(tmp_path_factory):
    """A manifest of two cells, three methods and two seeds at the size of the tests."""
    folder = tmp_path_factory.mktemp("campaign")
    path = folder / "tiny.yaml"
    path.write_text(
        """
size: smoke
first: [none, fire]
jobs: {vision: 2, language: 1, dqn: 1, sac: 1}
cells:
  - {experiment: random_label, options: [threads=1], runs: [{seeds: [1, 2], methods: [none, l2_init, fire]}]}
  - {experiment: label_noise, options: [threads=1], runs: [{seeds: [1], methods: [none]}]}
"""
    )
    return str(path), folder


def test_core_methods_first_and_one_seed_of_all_before_the_second(medium_like):
    path, folder = medium_like
    names = [one.name for one in load(path, str(folder / "order")).jobs]
    assert names == [
        "random_label/none/seed_1",
        "random_label/fire/seed_1",
        "label_noise/none/seed_1",
        "random_label/l2_init/seed_1",
        "random_label/none/seed_2",
        "random_label/fire/seed_2",
        "random_label/l2_init/seed_2",
    ]


def test_jobs_are_the_runs_that_their_commands_start(medium_like):
    path, folder = medium_like
    for one in load(path, str(folder / "same")).jobs[:4]:
        cfg = compose_config(one.domain, list(one.arguments))
        from fire_core.methods import create
        from harness.runs.trunk import fingerprint

        _, trunk = identity(cfg, create(**cfg.method))
        assert one.trunk == (folder / "same" / "trunks" / fingerprint(trunk) if trunk else None)


def test_a_budget_takes_the_first_that_fit_and_charges_a_trunk_once():
    jobs = [job("none", "trunk"), job("fire", "trunk"), job("none2", "other"), job("fire3", "trunk")]
    chosen = within(jobs, cost(jobs), {"vision": 1}, budget=185)
    assert [one.method for one in chosen] == [
        "none",
        "fire",
        "fire3",
    ]  # 100 + 40 + 40; another trunk does not fit


def test_a_launcher_that_is_not_installed_names_its_target(monkeypatch):
    monkeypatch.setitem(campaign.LAUNCHERS, "ray", ("hydra_plugins.nowhere", "install-ray"))
    with pytest.raises(UserError, match="--launcher ray needs a plugin of Hydra: make install-ray"):
        launcher_of("ray", gpus=1)


def test_a_launcher_makes_each_run_a_sweep_of_one(medium_like, monkeypatch):
    monkeypatch.setitem(campaign.LAUNCHERS, "submitit_slurm", ("json", "install-slurm"))
    manifest = load(medium_like[0], str(medium_like[1]))
    chosen = launcher_of("submitit_slurm hydra.launcher.partition=gpu", gpus=1)
    _, script, *rest = command(manifest.jobs[0], 1, chosen)
    assert script.endswith("vision/train.py")
    assert rest[-3:] == ["-m", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu"]
    assert tuple(rest[:-3]) == manifest.jobs[0].arguments
    assert launcher_of("", gpus=8) == ()
    assert set(at_a_time(manifest, 7).at_a_time.values()) == {7}


@pytest.mark.parametrize(
    ("text", "gpus", "told"),
    [
        ("slurm", 1, "--launcher slurm is unknown; did you mean 'submitit_slurm'"),
        ("ray 'x", 1, "give a launcher and its settings"),
        (" ", 1, "give a launcher and its settings"),
        ("ray threads=2", 1, "settings of a launcher begin with hydra.launcher."),
        ("ray", 8, "--gpus 8 is torchrun on this machine"),
    ],
)
def test_launchers_that_cannot_work_are_named(text, gpus, told, monkeypatch):
    monkeypatch.setattr(campaign, "LAUNCHERS", dict.fromkeys(campaign.LAUNCHERS, ("json", "install-it")))
    with pytest.raises(UserError, match=told):
        launcher_of(text, gpus)


def test_durations():
    assert duration("20m") == 1200 and duration("1.5h") == 5400
    with pytest.raises(UserError, match="30 hours"):
        duration("30 hours")


# ------------------------------------------------------------------------------------------------ what starts when
def test_nothing_starts_that_would_wait_for_a_trunk():
    jobs = [job("none", "trunk"), job("fire", "trunk"), job("redo", None)]
    assert ready(jobs, [], {"vision": 3}, trunks=()) == [jobs[0], jobs[2]]
    assert ready(jobs[1:], jobs[:1], {"vision": 3}, trunks=()) == [jobs[2]]
    assert ready(jobs[1:], jobs[:1], {"vision": 3}, trunks={Path("trunk")}) == jobs[1:]
    assert ready(jobs[1:2], [], {"vision": 3}, trunks=(), busy={Path("trunk")}) == []


def test_domains_take_turns():
    vision, rl = job("none", None), job("fire", None, domain="sac")
    assert ready([rl], [vision], {"vision": 2, "sac": 2}, trunks=()) == []
    assert ready([rl], [], {"vision": 2, "sac": 2}, trunks=()) == [rl]


def test_a_trunk_goes_only_with_its_last_run(tmp_path):
    trunk = tmp_path / "trunk"
    trunk.mkdir()
    last = job("fire", trunk)
    assert spent_trunks([trunk], [last]) == []
    training.delete_spent([trunk], [last])
    assert trunk.exists()
    lock = FolderLock(trunk)
    assert lock.acquire(wait=False)
    training.delete_spent([trunk], [])
    assert trunk.exists()  # another process is in it
    lock.release()
    training.delete_spent([trunk], [])
    assert not trunk.exists()


def test_unknown_manifests_and_keys_are_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no campaign 'papr'; did you mean 'paper'\?$"):
        load("papr", str(tmp_path))
    path = tmp_path / "odd.yaml"
    path.write_text("{size: smoke, first: [none], jobs: {}, frist: [none], cells: []}")
    with pytest.raises(UserError, match="'frist' is unknown"):
        load(str(path), str(tmp_path))
    path.write_text("{size: smoke, first: [none], jobs: {}, cells: [{experiment: fig2, runs: []}]}")
    with pytest.raises(UserError, match=r"odd.yaml: experiment 'fig2' does not exist; did you mean 'fig"):
        load(str(path), str(tmp_path))
    path.write_text("{size: smoke, first: [none], jobs: {}, cells: [{runs: []}]}")
    with pytest.raises(UserError, match=r"odd.yaml: key 'experiment' is missing in \{'runs'"):
        load(str(path), str(tmp_path))


def test_the_manifest_of_the_paper_names_what_exists():
    import yaml

    from fire_core.methods import available
    from harness.campaign.manifest import read, sizes_of

    for name in ("paper", "medium", "smoke"):
        for cell in read(name)["cells"]:
            assert (CONF / "experiment" / f"{cell['experiment']}.yaml").is_file()
            assert {m for group in cell["runs"] for m in group["methods"]} <= set(available())
            assert name == "medium" or name in sizes_of(cell["experiment"])
    assert yaml.safe_load((CONF / "campaign" / "paper.yaml").read_text())["size"] == "paper"


# ------------------------------------------------------------------------------------------------ how runs end
@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [("sys.exit(75)", 75, "stopped: cell/"), ("sys.exit(3)", 1, "failed: cell/"), ("finish()", 0, "")],
)
def test_a_run_that_was_stopped_has_not_failed(
    medium_like, tmp_path, monkeypatch, capsys, ending, code, told
):
    (tmp_path / "cell").mkdir()
    one = replace(job("none", None), folder=tmp_path / "cell")
    manifest = replace(load(medium_like[0], str(tmp_path)), jobs=[one], afterwards=("this",))
    script = f"import pathlib, sys; finish = pathlib.Path({str(one.folder / 'DONE')!r}).touch; {ending}"
    monkeypatch.setattr(training, "command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(training.Drawing, "want", lambda *_: None)
    monkeypatch.setattr(campaign, "load", lambda *_: manifest)
    later: list = []
    monkeypatch.setattr(campaign.subprocess, "run", lambda command, **_: later.append(command[-1]))
    monkeypatch.setattr(sys, "argv", ["campaign", "tiny", "--root", str(tmp_path), "--no-preflight"])
    assert campaign.main() == code
    assert capsys.readouterr().err.startswith(told)
    assert later == ([] if code else ["this"])


# ------------------------------------------------------------------------------------------------ kill and resume
@pytest.mark.timeout(600)
def test_a_stopped_campaign_resumes_and_leaves_tables(medium_like, tmp_path):
    path, root = tmp_path / "one_seed.yaml", tmp_path / "runs"
    path.write_text(Path(medium_like[0]).read_text().replace("seeds: [1, 2]", "seeds: [1]"))
    command = [sys.executable, "-m", "harness.campaign", str(path), "--root", str(root), "--no-preflight"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 300
    while not any(root.glob("*/smoke/*/seed_*/DONE")) and time.monotonic() < until:
        time.sleep(0.2)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 75, output[-3000:]
    done = set(root.glob("*/smoke/*/seed_*/DONE"))
    assert 0 < len(done) < 4
    stamps = {mark: mark.stat().st_mtime_ns for mark in done}
    second = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert len(list(root.glob("*/smoke/*/seed_*/DONE"))) == 4
    assert {mark: mark.stat().st_mtime_ns for mark in done} == stamps  # what was done is not trained again
    assert "waiting for another run" not in "".join(
        log.read_text() for log in root.glob("campaign/logs/*.log")
    )
    assert (root / "random_label" / "smoke" / "table.md").is_file()
