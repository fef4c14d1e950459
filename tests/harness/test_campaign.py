"""Campaigns: the order of the sweeps, what a plan counts, the commands, what a budget leaves out, how sweeps end."""

import os
import re
import shlex
import sys
from operator import itemgetter
from pathlib import Path

import pytest

from analysis import claims
from fire_core.errors import UserError
from harness.campaign import load, main, plan, train
from harness.config import content_of, options

TINY = """
size: smoke
options: {threads: 1}
work: {random_label: [mlp, 36000]}
rates: {mlp: 20}
assumed: a worked example
parts:
  - - {experiment: random_label, method: [none, fire], seed: [1, 2], run.jobs: 2}
    - {experiment: label_noise, method: none, seed: 1}
  - - {experiment: random_label, method: none, seed: [[3, 4]], batch_size: 8}
"""
LEAVE = "open('left', 'w')"
SETTING = itemgetter("experiment", "method", "seed")


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


def test_one_seed_of_every_sweep_of_a_part_before_the_second_and_the_next_part(tiny):
    assert [[*map(SETTING, sweep.runs)] for sweep in load(tiny)[1]] == [
        [("random_label", "none", "1"), ("random_label", "fire", "1")],
        [("label_noise", "none", "1")], [("random_label", "none", "2"), ("random_label", "fire", "2")],
        [("random_label", "none", "3"), ("random_label", "none", "4")],
    ]  # fmt: skip


def test_a_sweep_is_what_one_types_and_given_overrides_go_where_the_key_exists(tiny):
    [*_, last] = load(tiny, ["learning_rate=0.01", "batch_size=16", "hydra/launcher=ray"])[1]
    assert last.domain.name == "vision" and last.words[2:] == [
        "experiment=random_label", "size=smoke", "method=none", "seed=3,4", "threads=1", "batch_size=16",
        "learning_rate=0.01", "hydra/launcher=ray",
    ]  # fmt: skip
    sweeps = load("smoke", ["env.game=catch"])[1]
    assert {sweep.domain.name for sweep in sweeps if "env.game=catch" in sweep.words} == {"dqn"}
    with pytest.raises(UserError, match=r"env.game=catch: no script of this campaign has this key"):
        load(tiny, ["env.game=catch"])
    both = "{experiment: [label_noise, fig4a_catch], method: none, seed: 1}"
    Path(tiny).write_text(f"{{size: smoke, parts: [[{both}]]}}")
    with pytest.raises(UserError, match=r"'fig4a_catch'\]: one sweep has experiments of one script"):
        load(tiny)


def test_a_plan_worked_by_hand(tiny, tmp_path):
    """Runs of 30 min, of label_noise 12. Sweeps 1 and 3: two runs at a time, 0.5 h each; of 4, one is done."""
    for done in ("none-batch_size=8/seed_4", "none-batch_size=9/seed_3"):
        (folder := tmp_path / "random_label" / "smoke" / done).mkdir(parents=True)
        (folder / "DONE").touch()
    lines = plan(tiny, [f"run.root={tmp_path}"]).splitlines()
    minutes = content_of("label_noise")["minutes"]["smoke"]
    ends = [0.5, 0.5 + minutes / 60, 1.0 + minutes / 60, 1.5 + minutes / 60]
    for line, (left, of), end in zip(lines, ("22", "11", "22", "12"), ends):
        assert re.match(rf" *{left} of +{of} runs left, done after +{end:.1f} h: python ", line), line
    one_at_a_time = f"{2.5 + minutes / 60:.1f} if one at a time; assumed: a worked example"
    assert lines[4].endswith(f": 6 runs left, {ends[-1]:.1f} hours, {one_at_a_time}")
    command = shlex.split(lines[3].partition(" h: ")[2])
    assert command[1].endswith("vision/train.py") and command[2] == "-m" and "seed=3,4" in command


@pytest.mark.parametrize("name", options("campaign"))
def test_the_campaigns_of_the_repository_name_runs_that_exist(name):
    for sweep in load(name)[1]:
        for run in sweep.runs:
            assert run["method"] not in sweep.domain.refuses
            assert run["size"] in content_of(run["experiment"])["at"]


@pytest.fixture
def python(tmp_path):
    """Makes a command of Python code, which runs in `tmp_path`."""
    return lambda code: [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}"]


def test_a_failed_sweep_neither_hides_nor_sinks_the_others(python, tmp_path, capfd):
    assert train([python("raise SystemExit(3)"), python("raise SystemExit(75)"), python(LEAVE)]) == 1
    assert (tmp_path / "left").exists()
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("failed (exit code 3): ") and said[1].startswith("stopped: ") and len(said) == 2


def test_a_signal_to_the_campaign_reaches_the_running_sweep_and_starts_no_other(python, tmp_path):
    assert train([python(f"import time; os.kill({os.getpid()}, 15); time.sleep(60)"), python(LEAVE)]) == 143
    assert not (tmp_path / "left").exists()


def test_no_sweep_starts_after_the_budget(python, tmp_path, capfd):
    assert train([python(f"import time; time.sleep(1.5); open('{n}', 'w')") for n in "abc"], budget=1) == 0
    assert os.listdir(tmp_path) == ["a"]
    assert "the budget is used up before sweep 2 of 3" in capfd.readouterr().out


def test_a_budget_needs_a_unit(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["campaign", "smoke", "--budget", "30"])
    with pytest.raises(SystemExit):
        main()
    assert "--budget needs a unit, as in 30h or 20m" in capsys.readouterr().err


def test_a_file_that_is_no_campaign_is_one_line(tiny):
    assert len(load(tiny, ["seed=9"])[1]) == 3, "equal sweeps are one"
    with pytest.raises(UserError, match="method=fier does not exist; did you mean 'fire'"):
        load(tiny, ["method=fier"])
    Path(tiny).write_text("parts: [[")
    with pytest.raises(UserError, match="cannot be used: ParserError: while parsing a flow") as caught:
        load(tiny)
    assert tiny in str(caught.value) and "\n" not in str(caught.value)


def test_medium_has_the_confirming_seeds_that_the_statistics_page_plans():
    sweeps = [*load("medium")[1], *load("rivals")[1]]
    confirming = {run for sweep in sweeps for run in map(SETTING, sweep.runs) if int(run[2]) > 5}
    run, planned = {experiment for experiment, _, _ in confirming}, set()
    for rounds in (1, 2):
        for (experiment, method), seeds in claims.confirming_plan(rounds).items():
            if experiment in run and not (rounds == 1 and experiment.startswith("fig4a")):
                planned |= {(experiment, method, str(seed)) for seed in seeds}
    with_plan = {key[:2] for key in planned}  # later rivals have none yet
    assert {key for key in confirming if key[:2] in with_plan} == planned
    assert {name for name, _ in claims.confirming_plan() if not name.startswith("fig4")} < run
