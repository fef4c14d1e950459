"""A run that is stopped at seeded random moments, by SIGTERM every third time, ends in the bytes of an undisturbed run."""

import random
import signal

import pytest
from training_scripts import SCRIPTS, Script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STOPS = 7
COUNT = """
import os, signal
from harness.runs import Run
due, steps = Run.due, 0
def counting(self, step):
    global steps
    steps += 1
    step_taken(steps)
    return due(self, step)
Run.due = counting
"""
WRITE = COUNT + "step_taken = lambda steps: open({path!r}, 'w').write(str(steps))"
STOP = """
if {gently}:
    signal.signal(signal.SIGPROF, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
step_taken = lambda steps: steps == {steps} and signal.setitimer(signal.ITIMER_PROF, {seconds})
step_taken(0)
"""
RUNS = {  # that of dqn saves rarely enough for the emulator and the replay to go back several steps
    "vision": "experiment=fig2a_cifar10_resnet18 method=snr",
    "language": "experiment=fig3_best method=muon model.dropout=0.1 phase_1.iterations=150 phase_2.iterations=150",
    "dqn": "experiment=fig4a_breakout method=redo method.threshold=0.5 replay_capacity=200 env.game=breakout "
    "env.frame_size=42 eval_max_steps=60 random_episodes=4 run.checkpoint_steps=12",
    "sac": "experiment=fig4b_hopper method=shrink_perturb trigger=every trigger.steps=60",
}


def stops(steps: int, seed: int) -> list[tuple[str, list[int]]]:
    """Return (code that runs ahead of the script and stops it, exit codes) of each stop: the second while the process
    starts, the others after at most `steps` / STOPS - 1 further steps each."""
    draw, result = random.Random(seed), []
    for number in range(STOPS):
        gently, after = number % 3 == 2, 0 if number == 1 else draw.randint(1, max(1, steps // STOPS - 1))
        seconds = draw.uniform(0.01, 0.1 if after else 0.8)
        code = COUNT + STOP.format(gently=gently, steps=after, seconds=seconds)
        result.append((code, [75, 143] if gently else [-signal.SIGPROF]))
    return result


@pytest.mark.parametrize("domain", RUNS)
def test_a_chain_of_stops_changes_no_byte(domain, tmp_path):
    script = Script(SCRIPTS[domain])

    def run(name, before, expect=(0,)):
        fixed = ["size=smoke", "device=cpu", "threads=1", "run.progress=false", "run.checkpoint_steps=1"]
        folders = [f"run.root={tmp_path / name}", f"run.data_root={tmp_path / 'data'}"]
        return script.run([*fixed, *folders, *RUNS[domain].split()], before, expect)

    def metrics(name):
        (found,) = (tmp_path / name).glob("fig*/smoke/*/seed_1/metrics.jsonl")
        assert (found.parent / "DONE").exists()
        return found.read_bytes()

    run("whole", WRITE.format(path=str(tmp_path / "steps")))
    for before, codes in stops(int((tmp_path / "steps").read_text()), seed=len(domain)):
        run("chain", before, codes)
    assert "resuming from" in run("chain", "") and metrics("chain") == metrics("whole")
