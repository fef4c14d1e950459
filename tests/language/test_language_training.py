"""The training script end to end: resume, forks, several processes, bad input."""

import os
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf
from training_scripts import ROOT, Script, compose_config, killed, metrics_of

from fire_core.errors import UserError
from harness.runs import seeded
from language.data import Mixture
from language.distributed import World
from language.model import Decoder
from language.schedule import PhasePlan
from language.settings import check_settings

SCRIPT = Script("language/train.py")


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    return [f"run.data_root={tmp_path_factory.mktemp('data')}", "experiment=fig3_best"]


def test_phase_2_starts_from_the_named_fork_and_phase_1_is_trained_once(tmp_path, fixed):
    named = [*fixed, "phase_1.save_at=[3,9]", "method=none"]
    for fork in ("best", "9", "last"):
        SCRIPT.train(tmp_path, *named, f"boundary.fork={fork}")
    output = SCRIPT.train(tmp_path, *named, "boundary.fork=7", expect=2)
    assert "boundary.fork=7: phase_1 keeps best, last, 3, 9" in output
    assert len(list((tmp_path / "trunks").iterdir())) == 1
    curve = {}
    for fork in ("last", "9", "best"):
        rows = metrics_of(tmp_path, f"none-boundary.fork={fork}-phase_1.save_at=3,9")
        phase_1 = [row for row in rows if row["phase"] == 0]
        curve = curve or {row["iteration"]: row["val_loss_a"] for row in phase_1}
        wanted = {"last": curve[12], "9": curve[9], "best": min(curve.values())}[fork]
        start = next(row for row in rows if "act" in row)
        assert start["before_val_loss_a"] == start["after_val_loss_a"] == pytest.approx(wanted, abs=1e-7)
        assert start["step"] == phase_1[-1]["step"]
        assert rows[-1]["iteration"] == 8 and rows[-1]["step"] == start["step"] + 8
        mix = 0.5 * rows[-1]["val_loss_a"] + 0.5 * rows[-1]["val_loss_b"]
        assert rows[-1]["val_loss_mix"] == pytest.approx(mix, abs=1e-12)


def test_without_a_trunk_a_run_that_forked_early_is_gone_on_with(tmp_path, fixed):
    changes = [*fixed, "method=none", "phase_1.save_at=[3]", "boundary.fork=3"]
    changes += ["run.trunk=false", "run.checkpoint_steps=1", "phase_2.save_at=[3]"]
    SCRIPT.train(tmp_path / "whole", *changes)
    for step in (7, 5):  # in phase 1, whose steps are 1 to 12; from there on in phase 2, 3 to 11
        SCRIPT.train(tmp_path / "killed", *changes, before=killed(f"step == {step}"), expect=9)
    output = SCRIPT.train(tmp_path / "killed", *changes)
    assert "resuming from" in output and "step_000000000005.pt" in output
    assert {"3", "phase_2_3"} <= {path.stem for path in (tmp_path / "killed").rglob("*.pt")}
    found = metrics_of(tmp_path / "killed")
    assert found == metrics_of(tmp_path / "whole") and found[-1]["step"] == 11


def test_a_fork_leaves_the_losses_of_phase_1_behind_also_where_no_boundary_clears_them(tmp_path, fixed):
    line, first = [*fixed, "method=none", "boundary.fork=4", "trigger=every", "trigger.steps=100"], []
    for every in (3, 4):  # an evaluation at the fork clears them anyway
        SCRIPT.train(tmp_path / str(every), *line, f"phase_1.eval_every={every}")
        rows = metrics_of(tmp_path / str(every))
        first.append(next(row for row in rows if row["phase"] == 1 and "train_loss" in row))
    assert first[0] == first[1]


def test_windows_grow_at_the_boundary_and_are_evaluated_at_the_length_of_their_phase(tmp_path, fixed):
    SCRIPT.train(tmp_path, *fixed, "phase_1.block=16", "method=none")
    shape = check_settings(compose_config("language", ["size=smoke"]))
    with seeded(1, "init"):
        start = Decoder(shape).wpe.weight[16:].detach()
    [trunk] = tmp_path.glob("trunks/*/checkpoint/end.pt")
    run = tmp_path / "fig3_best/smoke/none-phase_1.block=16/seed_1"
    middle = torch.load(trunk, weights_only=True)["treatment"]["nets"]["net"]
    end = torch.load(run / "checkpoint/final.pt", weights_only=True)["net"]
    beyond = [net["wpe.weight"][16:] for net in (middle, end)]
    assert (beyond[0] / start).std() < 1e-5, "they have only decayed"
    assert (beyond[1] / start).std() > 1e-2
    narrow = metrics_of(tmp_path)
    boundary = next(line for line in narrow if "before_val_loss_a" in line)
    assert boundary["before_val_loss_a"] not in [line["val_loss_a"] for line in narrow if line["phase"] == 0]


def test_two_processes_give_the_losses_of_one_with_twice_the_accumulation(tmp_path, fixed):
    changes = [*fixed, "method=fire", "accumulation=4", "phase_1.stop_at=8"]
    changes += ["eval_windows=7", "eval_batch_size=1"]  # seven batches of the validation for two processes
    SCRIPT.train(tmp_path / "one", *changes)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT.path]
    line += ["size=smoke", "device=cpu", f"run.root={tmp_path / 'two'}", *changes]
    threads = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=250, env=threads)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert len(one) == len(two) and one[-1]["phase"] == 1
    for a, b in zip(one, two, strict=True):
        assert a["step"] == b["step"] and a.keys() == b.keys()
        for key in (key for key in a if "loss" in key):
            assert a[key] == pytest.approx(b[key], abs=1e-5), (key, a["step"])


def test_processes_that_do_not_divide_the_micro_batches_are_refused():
    world = World("cpu")
    assert list(world.share_of(4)) == [0, 1, 2, 3]
    world.size, world.rank = 2, 1
    assert list(world.share_of(4)) == [1, 3]
    world.size = 3
    with pytest.raises(UserError, match=r"accumulation=4 cannot be shared evenly by 3 processes"):
        world.share_of(4)


def test_learning_rate_by_hand():
    source = Mixture((), (), block=1, batch_size=1, seed=1, phase=0)
    rates = {"learning_rate": 1.0, "final_learning_rate": 0.2, "warmup_share": 0.1, "warmup_limit": 10}
    plan = PhasePlan(0, "phase_1", source, 110, 110, 1, (), OmegaConf.create(rates))
    assert [plan.rate(0), plan.rate(9)] == pytest.approx([1 / 11, 10 / 11])
    assert [plan.rate(10), plan.rate(60), plan.rate(110)] == pytest.approx([1.0, 0.6, 0.2])


@pytest.mark.parametrize("fork, shrink", [("best", 0.5), ("30k", 0.8), ("60k", 0.5)])
def test_paper_settings_number_by_number(fork, shrink, fidelity):
    experiment = f"fig3_{fork}"
    cfg = compose_config("language", [f"experiment={experiment}", "size=paper", "method=shrink_perturb"])
    released = {
        "boundary.fork": fork.replace("k", "000"), "optimizer_state": "clear", "corpus.a.name": "wikitext103",
        "corpus.b.name": "openwebtext", "corpus.tokenizer": "gpt2", "model.layers": 12, "model.heads": 12,
        "model.width": 768, "model.block": 1024, "model.vocabulary": 50304, "model.dropout": 0.0,
        "model.bias": False, "model.tied": True, "phase_1.passes": 400, "phase_1.save_at": [30_000, 60_000],
        "phase_2.passes": 1, "batch_size": 60, "accumulation": 8, "learning_rate": 6e-4,
        "final_learning_rate": 6e-5, "warmup_share": 0.1, "warmup_limit": 2000, "betas": [0.9, 0.95],
        "weight_decay": 0.1, "clip_norm": 1.0, "eval_windows": 200 * 60, "precision": "fp16",
        "compile": True, "method.shrink": shrink,
    }  # fmt: skip
    differing = [key for key, value in released.items() if OmegaConf.select(cfg, key) != value]
    fidelity("reference", experiment, "settings that differ from the released script", len(differing), 0)
    share = abs(cfg.phase_2.share_a - 0.1 / 9.1)
    fidelity("reference", experiment, "share of WikiText-103 in phase 2", share, 1e-6)
    fire = compose_config("language", [f"experiment={experiment}", "size=paper", "method=fire"])
    fidelity("reference", experiment, "iterations of FIRE", abs(fire.method.iterations - 5), 0)
