"""SAC runs stacked in one process equal single runs to rounding; with workers, they write the same bytes."""

import os
import re
import signal
import sys
from functools import partial

import numpy as np
import pytest
import torch
from test_sac_update import learner, over_a_boundary
from training_scripts import Script, killed

pytest.importorskip("mujoco")

import rl.sac.stack
import rl.sac.update
from fire_core.errors import UserError
from harness.runs.stack import pause, take_turns
from harness.stop import StopRequest
from rl.captured import captured
from rl.sac.env import Task
from rl.sac.worker import InWorker

SCRIPT = Script("rl/sac/train.py")
SHORT = ["experiment=fig4b_hopper", "eval_limit=20", "random_episodes=1", "run.checkpoint_steps=10"]
METHODS = ["none", "fire", "plasticity_injection", "l2_init", "plasticity_injection", "muon"]


def train(number: int, method: str, found: dict) -> int:
    """A learner, batches and noise of its own, over a method's boundary. In a stack the third falls in later."""
    pause(0.2 * (number == 2), None)
    ours = learner(number)
    ours.passes = rl.sac.stack.shared_passes(ours)
    figures = over_a_boundary(ours, method, number)
    found[number] = figures, {name: dict(net.state_dict()) for name, net in ours.nets().items()}
    return 0


@pytest.mark.parametrize("methods, compiled", [(METHODS, False), (["l2_init"] * 3, True)])
def test_updates_of_a_stack_are_those_of_single_learners(methods, compiled, monkeypatch):
    """In float64, over a boundary after which the learners have three shapes; and with passes that compile as one graph."""
    single, stacked = {}, {}
    for run in enumerate(methods):
        train(*run, single)
    if compiled:
        monkeypatch.setattr(rl.sac.update, "captured", partial(captured, backend="aot_eager"))
        learners = partial(rl.sac.update.Learner, compile=True)
        monkeypatch.setattr(sys.modules["test_sac_update"], "Learner", learners)
    assert take_turns([partial(train, *run, stacked) for run in enumerate(methods)]) == 0
    torch.testing.assert_close(stacked, single, rtol=1e-9, atol=1e-11)


IN_THIS_PROCESS = """
import harness.launch
class Pool:
    def __init__(self, places, modules): self.code = 0
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def start(self, function, *runs): self.code = function(*runs)
    def exit_code(self): return self.code
harness.launch.Pool = Pool
"""


def test_a_stack_is_killed_stops_resumes_and_has_the_folders_of_single_runs(tmp_path):
    sweep = ["-m", *SHORT, "steps=110", "midpoint=60", "method=none,fire"]
    stack, single = tmp_path / "stack", tmp_path / "single"
    stopped = killed("step >= 90 and self.stop_signal is None", "signal.raise_signal(signal.SIGTERM)")
    for before, expected in ((killed("step >= 80"), 9), (stopped, 75), ("", 0)):
        both = {"before": IN_THIS_PROCESS + before, "expect": expected}
        said = SCRIPT.train(stack, *sweep, "stack=2", "workers=true", **both)
        assert "Traceback" not in said
    assert said.endswith("sweep: 2 of 2 done\n")
    SCRIPT.train(single, *sweep, before=IN_THIS_PROCESS)

    files, alike = ({path.relative_to(root) for path in root.rglob("*")} for root in (stack, single))
    assert files == alike
    resumed = []
    for name in (name for name in alike if name.name == "final.pt"):
        log = (stack / name.parents[1] / "log.txt").read_text()
        resumed.append(re.findall(r"resuming from .*step_0*(\d+).pt", log))
        assert log.count("; saved ") == 1 and log.count("act 1 (boundary)") == 1
        assert f"method={name.parts[2].split('-')[0]} | seed={name.parts[3][-1]}" in log
        ours, theirs = (torch.load(root / name, weights_only=True)["actor"] for root in (stack, single))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        assert (stack / name).stat().st_size < 1.1 * (single / name).stat().st_size  # without the other run's
    assert all(len(steps) == 2 for steps in resumed) and len({first for first, _ in resumed}) > 1


def test_a_signal_that_comes_before_a_run_of_a_stack_begins_stops_it_too():
    found = []
    take_turns([lambda: signal.raise_signal(15) or 0, lambda: found.append(StopRequest().name) or 0])
    assert found == ["SIGTERM"]


def test_workers_leave_every_byte_of_a_run_that_is_killed(tmp_path):
    line = [*SHORT, "steps=60", "midpoint=40", "eval_every=10", "method=redo", "method.threshold=0.9"]
    written = []
    for workers, ends in (("false", [""]), ("true", [killed("step >= 50"), ""])):
        root = tmp_path / workers
        for before in ends:
            SCRIPT.train(root, *line, f"workers={workers}", before=before, expect=9 if before else 0)
        written.append({path.relative_to(root): path.read_bytes() for path in root.rglob("metrics.jsonl")})
    assert written[0] == written[1] and len(written[0]) == 2


def test_a_worker_hands_on_errors_and_what_was_printed_and_says_when_it_has_ended(capsys):
    with pytest.raises(UserError, match=r"'h1-jump-v0' cannot be made: .*h1-jump"):
        InWorker(Task, "h1-jump-v0")
    task = InWorker(Task, "Hopper-v5")
    assert task.reset(0).shape == (task.observation_size,)
    for _ in range(2):
        task.step([np.nan] * 3)
    assert "MuJoCo: Nan, Inf or huge value in CTRL" in capsys.readouterr().err
    with pytest.raises(ValueError, match="cannot reshape") as caught:
        task.step([0.0])
    assert "In the worker process" in caught.value.__notes__[0]
    # batch systems send it to all processes: the run saves first
    os.kill(task._process.pid, signal.SIGTERM)
    assert task.state_dict()["seed"] == 0
    os.kill(task._process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"Task\('Hopper-v5',\) has ended with exit code -9"):
        task.reset(0)
