"""Run folders, checkpoints, trunks and seeds, without any training."""

import json
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from fire_core import Report, UserError
from harness.runs import Run, generator, machine, numpy_generator, seeded
from harness.runs import checkpoint as checkpoints
from harness.runs.run import FinishedElsewhere


def open_run(root, *, label="fire", trunk=None, rate=0.1, seed=1, **settings):
    usual = {"checkpoint_seconds": 300.0, "checkpoint_steps": 0, "keep": 2}
    folder, saving = root / "e" / "smoke" / label / f"seed_{seed}", SimpleNamespace(**usual | settings)
    return Run({"label": label, "rate": rate, "seed": seed}, folder, trunk=trunk, saving=saving)


def play(run, *, phases=2, steps=4, stop_after=None, boundary_value=1.0):
    """A little 'training' whose state is a tensor; the same calls as the scripts make."""
    if run.finished:
        return (run.folder / "metrics.jsonl").read_text()
    with run:
        saved = run.resume() or {"at": {"phase": 0, "step": 0}, "value": torch.zeros(())}
        at, value = saved["at"], saved["value"]
        while at["step"] < phases * steps:
            phase = at["step"] // steps
            if phase > at["phase"]:
                run.leave_trunk(at["step"], {"at": dict(at), "value": value})
                value, at["phase"] = value + boundary_value, phase
                run.boundary(phase, Report())
            value = value * 1.5 + torch.rand((), generator=generator(1, "noise", at["step"]))
            at["step"] += 1
            run.log(phase=phase, step=at["step"], value=value)
            if run.due(at["step"]):
                run.save(at["step"], {"at": dict(at), "value": value})
            if at["step"] == stop_after:
                raise KeyboardInterrupt
        run.finish({"value": value})
    return (run.folder / "metrics.jsonl").read_text()


def test_a_run_leaves_its_whole_record(tmp_path):
    run = open_run(tmp_path)
    (torn := run.folder / ".meta.json.x1.torn").parent.mkdir(parents=True)
    torn.write_text("of a process that was killed while it wrote")
    assert not run.finished
    text, names = play(run), {p.name for p in run.folder.iterdir()}
    assert {"DONE", "config.yaml", "meta.json", "metrics.jsonl", "summary.json", "boundary_1.json"} <= names
    assert not {"FAILED", "RUNNING", torn.name} & names
    meta = json.loads((run.folder / "meta.json").read_text())
    assert meta["experiment"] == "e" and meta["seed"] == 1 and meta["versions"]["torch"] == torch.__version__
    assert [json.loads(line)["step"] for line in text.splitlines()] == list(range(1, 9))
    assert open_run(tmp_path).finished


def test_a_copy_without_git_says_what_it_knows(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert (machine.describe()["commit"], machine.describe()["dirty"]) == (None, None)
    monkeypatch.setenv("FIRE_COMMIT", "a" * 40)
    assert (machine.describe()["commit"], machine.describe()["dirty"]) == ("a" * 40, None)


@pytest.mark.parametrize("trunk", [None, {"rate": 0.1}])
@pytest.mark.parametrize("now", [None, {"rate": 0.1}])
@pytest.mark.parametrize("stop_after", [3, 4, 5, 7])
def test_interrupted_equals_uninterrupted_with_a_trunk_and_without(tmp_path, stop_after, trunk, now):
    whole = play(open_run(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        play(open_run(tmp_path / "cut", trunk=trunk, checkpoint_steps=2), stop_after=stop_after)
    assert play(open_run(tmp_path / "cut", trunk=now, checkpoint_steps=2)) == whole
    if None in (trunk, now):
        return
    other = play(open_run(tmp_path / "cut", label="none", trunk=trunk), boundary_value=0.0)
    assert other.splitlines()[:4] == whole.splitlines()[:4] and other != whole
    [trunk] = (tmp_path / "cut" / "trunks").iterdir()
    assert [path.name for path in (trunk / "checkpoint").glob("*.pt")] == ["end.pt"]


def stopped(root, **settings):
    """A run that was killed at step 3, with a checkpoint of step 2."""
    with pytest.raises(KeyboardInterrupt):
        play(open_run(root, checkpoint_steps=2, **settings), stop_after=3)
    return open_run(root, **settings)


@pytest.mark.parametrize("trunk", [None, {"rate": 0.1}])
def test_lost_metrics_are_not_made_up(tmp_path, trunk):
    run = stopped(tmp_path, trunk=trunk)
    path = (run.trunk or run.folder) / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:10])
    with pytest.raises(UserError, match=r"metrics\.jsonl has 10 bytes, .*put the file back, or delete"):
        play(run)
    assert path.read_bytes() == whole[:10]
    if trunk:  # the same where the trunk is finished and another run starts from it
        path.write_bytes(whole)
        play(run)
        path.write_text("")
        with pytest.raises(UserError, match="has 0 bytes"):
            play(open_run(tmp_path, label="none", trunk=trunk))


@pytest.mark.parametrize(
    "lost", [None, Path.unlink, *(partial(Path.write_text, data=d) for d in ("{", "[1]"))]
)
@pytest.mark.parametrize("finished", [False, True])
def test_another_config_is_a_new_folder_also_where_the_meta_file_is_lost(tmp_path, lost, finished):
    run = stopped(tmp_path)
    if finished:
        play(run)
    if lost:
        lost(run.folder / "meta.json")
    other = open_run(tmp_path, rate=0.2)
    assert other.folder != run.folder and not other.finished and open_run(tmp_path).folder == run.folder
    for rate, first in ((0.1, run), (0.2, other)):  # all seeds of a label have one config
        assert open_run(tmp_path, rate=rate, seed=2).folder.parent == first.folder.parent
    assert play(open_run(tmp_path)) == play(open_run(tmp_path / "whole"))


def test_the_folder_and_the_checkpoint_of_another_config_are_refused(tmp_path):
    late = open_run(tmp_path / "a", rate=0.2)  # found its folder before another took it
    run, other = stopped(tmp_path / "a"), stopped(tmp_path / "b", rate=0.2)
    with pytest.raises(UserError, match="another config has taken"), late:
        pass
    name = "checkpoint/step_000000000002.pt"
    (other.folder / name).write_bytes((run.folder / name).read_bytes())
    with pytest.raises(UserError, match=f"belongs to config {run.meta['identity']}, this run is"):
        play(other)
    play(run)
    with pytest.raises(UserError, match="another config has taken"), late:
        pass


def test_a_run_that_another_process_trains_is_waited_for_and_not_trained_again(tmp_path, capsys, monkeypatch):
    first, second = open_run(tmp_path), open_run(tmp_path)

    def end_first(seconds, until):
        """As its process would, as soon as the second one waits for it."""
        first.resume()
        first.finish({})
        first.__exit__(None, None, None)

    first.__enter__()
    monkeypatch.setattr("harness.runs.run.pause", end_first)
    with pytest.raises(FinishedElsewhere, match="finished by another process"), second:
        pass
    assert "waiting for another process" in capsys.readouterr().out


def flip(path):
    """Flip one bit of the tensor in a checkpoint."""
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((64,), 7.0).numpy().tobytes()) + 124] ^= 128
    path.write_bytes(content)


def test_a_flipped_bit_in_a_checkpoint_is_found_and_the_one_before_is_used(tmp_path, capsys):
    with open_run(tmp_path) as run:
        run.resume()
        for step in (2, 4):
            run.log(step=step)
            run.save(step, {"value": torch.full((64,), 7.0), "step": step})
    one, two = sorted((run.folder / "checkpoint").glob("*.pt"))
    flip(two)
    with run:
        assert run.resume()["step"] == 2
    text = capsys.readouterr().out
    assert "step_000000000004.pt cannot be read (record" in text and f"resuming from {one}" in text
    assert (run.folder / "metrics.jsonl").read_text() == '{"step": 2}\n'
    flip(one)
    with pytest.raises(UserError, match="differs from its checksum"), run:
        run.resume()


def test_a_damaged_end_of_a_trunk_names_the_trunk(tmp_path):
    trunk = {"rate": 0.1}
    play(open_run(tmp_path, trunk=trunk))
    [end] = (tmp_path / "trunks").glob("*/checkpoint/end.pt")
    for damage in (lambda: end.write_bytes(end.read_bytes()[:200]), end.unlink):
        damage()
        with pytest.raises(UserError, match=f"end.pt .*: delete {end.parents[1]} and the same command"):
            play(open_run(tmp_path, label="none", trunk=trunk))
    shutil.rmtree(end.parents[1])
    play(open_run(tmp_path, label="none", trunk=trunk))


def test_a_signal_after_the_last_step_ends_the_process_and_leaves_a_finished_run(tmp_path, monkeypatch):
    run, finish = open_run(tmp_path), Run.finish
    monkeypatch.setattr(Run, "finish", lambda *a: (finish(*a), signal.raise_signal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with pytest.raises(KeyboardInterrupt):
        play(run)
    signal.signal(signal.SIGINT, before)
    assert (run.folder / "DONE").exists() and not (run.folder / "RUNNING").exists()
    monkeypatch.undo()
    assert play(open_run(tmp_path)) == play(open_run(tmp_path / "whole"))


SHORT_WRITE = RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0")
FAILED = {"No space left": OSError(28, "No space left"), "of disk are free": SHORT_WRITE}


@pytest.mark.parametrize("words, failure", FAILED.items())
def test_failed_save_keeps_the_old_checkpoint(tmp_path, monkeypatch, words, failure):
    checkpoints.save(tmp_path, 1, {"a": 1})
    monkeypatch.setattr(torch, "save", Mock(side_effect=failure))
    with pytest.raises(UserError, match=f"cannot write checkpoint .*{words}"):
        checkpoints.save(tmp_path, 2, {"a": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["step_000000000001.pt"]


def test_keeps_the_last_and_the_named(tmp_path):
    for name in ("step_000000000009", "best"):
        (tmp_path / f".{name}.pt.x1.torn").write_bytes(b"of a process that was killed while it wrote")
    checkpoints.save(tmp_path, 1, {"a": 1}, name="best")
    for step in range(5):
        checkpoints.save(tmp_path, step, {"a": step}, keep=2)
    assert sorted(p.stem for p in tmp_path.iterdir()) == ["best", "step_000000000003", "step_000000000004"]
    assert checkpoints.load_latest(tmp_path)["a"] == 4


def test_non_finite_metrics_become_null(tmp_path):
    with open_run(tmp_path) as run:
        run.resume()
        run.log(step=1, loss=float("nan"), rank=torch.tensor(3))
    assert json.loads((run.folder / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "rank": 3}


def test_streams_are_pure_and_apart():
    draw = [torch.rand(3, generator=generator(1, "data", 2, 3)) for _ in range(2)]
    assert torch.equal(*draw)
    others = [generator(2, "data", 2, 3), generator(1, "policy", 2, 3), generator(1, "data", 3, 2)]
    assert all(not torch.equal(draw[0], torch.rand(3, generator=g)) for g in others)
    assert numpy_generator(1, "a").random() == numpy_generator(1, "a").random()
    before, first = torch.get_rng_state(), []
    for _ in range(2):
        with seeded(1, "init"):
            first.append(torch.rand(2))
    assert torch.equal(*first) and torch.equal(before, torch.get_rng_state())


def test_a_checkpoint_is_due_after_seconds_or_steps(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("harness.runs.run.time.monotonic", lambda: now[0])
    with open_run(tmp_path, checkpoint_seconds=10, checkpoint_steps=5) as run:
        run.resume()
        assert not run.due(4) and run.due(5)
        run.save(5, {})
        now[0] = 9.0
        run.save(9, {}, name="best")  # a run does not resume from it
        assert not run.due(9)
        now[0] = 10.0
        assert run.due(9)
