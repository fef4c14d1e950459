"""The vision script as a user runs it: what it measures, and what mistakes are answered with."""

from unittest.mock import Mock

import pytest
import torch
from omegaconf import OmegaConf
from tiny_nets import linear, untouched
from torch import nn
from training_scripts import ROOT, Script, compose_config, metrics_of

from fire_core import UserError
from vision.evaluate import evaluate, reestimated
from vision.images import Images
from vision.protocols import PhaseData
from vision.schedule import set_learning_rate

SCRIPT = Script("vision/train.py")


def test_with_replay_old_and_new_classes_are_logged_apart(tmp_path):
    """The accuracy on classes seen is weighted by their numbers, 4, 3 and 3 of 10; batch norm gives a second one."""
    what = ["experiment=fig2c_tiny_imagenet_vgg16", "run.trunk=false", "method=none"]
    SCRIPT.train(tmp_path, *what, "protocol.replay=0.5")
    lines = metrics_of(tmp_path)
    ends = [line for line in lines if "seen_accuracy" in line]
    assert "old_accuracy" not in ends[0] and ends[0]["new_accuracy"] == ends[0]["seen_accuracy"]
    for old, line in zip((4, 7), ends[1:], strict=True):
        mean = (old * line["old_accuracy"] + 3 * line["new_accuracy"]) / (old + 3)
        assert line["seen_accuracy"] == pytest.approx(mean)
    for key in ("after_old_accuracy", "after_reestimated_test_accuracy"):
        assert [key in line for line in lines] == ["act" in line for line in lines]


def test_a_run_of_one_phase_that_another_has_trained_has_its_results(tmp_path):
    for method in ("none", "fire"):
        SCRIPT.train(tmp_path, "experiment=random_label", "protocol.tasks=1", f"method={method}")
    none, fire = (path.read_text() for path in tmp_path.rglob("summary.json"))
    assert none == fire and "train_accuracy" in fire


def test_the_pass_for_new_statistics_leaves_the_net_as_it_was():
    """An image is 10 or 14, and its class is told by the sign after batch norm: by the old mean, 0, both are of class 1."""
    frozen = nn.BatchNorm1d(2).eval()
    layers = nn.BatchNorm2d(1), nn.Dropout(0.1), nn.Flatten(), linear([[-1.0], [1.0]], [0.0, 0.0]), frozen
    net, pixels = nn.Sequential(*layers), torch.tensor([10, 14] * 4, dtype=torch.uint8).view(8, 1, 1, 1)
    labels = torch.tensor([0, 1] * 4)
    images = Images("two", pixels, labels, pixels, labels, 2, torch.zeros(1), torch.tensor([1 / 255]))
    phase = PhaseData(0, "all", torch.arange(8), labels, epochs=1)
    curriculum = Mock(return_value=[(images.normalise(pixels), labels)], images=images, phase=phase)
    curriculum.cfg = OmegaConf.create({"eval_batch_size": 5, "precision": "fp32"})
    draws, modes = torch.get_rng_state(), [m.training for m in net.modules()]
    with untouched(net):
        assert reestimated(net, curriculum) == {"reestimated_test_accuracy": 1.0}
    assert [m.training for m in net.modules()] == modes and torch.equal(torch.get_rng_state(), draws)
    assert evaluate(net, curriculum) == {"test_accuracy": 0.5}


MISTAKES = [
    (["protocol.epochs=[1,1,1]"], "protocol.epochs=[1, 1, 1]: give one number, or 2 of them"),
    (["device=cuda:99"], "device='cuda:99' cannot be used"),
    (["-m", "data=image_folder", "data.folder=a,b"], "runs of this sweep would have one folder"),
    (["x\x1b[2J=3"], r"x\x1b[2J=3"), (["model=timm", "model.name=torch:x"], "model 'torch:x' is unknown"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, answer", MISTAKES)
def test_mistakes_are_one_clear_line(arguments, answer, tmp_path):
    line = SCRIPT.train(tmp_path, *arguments, expect=2).strip()
    assert line.startswith("error: ") and answer in line and line.isprintable()
    assert not list(tmp_path.glob("**/DONE"))


@pytest.mark.parametrize("share, rates", [("0.2", [(0.5, 1.0)] * 2), ("[0.2,0]", [(0.5, 1.0), (1.0, 1.0)])])
def test_the_warm_up_is_that_of_the_phase(share, rates):
    cfg = compose_config("vision", ["experiment=label_noise", "size=smoke", f"warmup_share={share}"])
    optimizer = torch.optim.SGD([torch.zeros(1)])
    seen, nothing = [], torch.zeros(0)
    for index in (0, 1):
        for epoch in (0, 1):
            set_learning_rate(optimizer, cfg, PhaseData(index, "", nothing, nothing, 10), epoch)
            seen.append(optimizer.param_groups[0]["lr"] / cfg.learning_rate)
    assert seen == pytest.approx([*rates[0], *rates[1]])


def test_the_experiment_of_the_guide_may_lie_in_another_folder(tmp_path):
    own = tmp_path / "mine/experiment/my_own.yaml"
    own.parent.mkdir(parents=True)
    own.write_text((ROOT / "CONTRIBUTING.md").read_text().partition("```yaml\n")[2].partition("```")[0])
    with pytest.raises(UserError):
        compose_config("vision", ["experiment=my_own"])
    place = ["--config-dir", str(tmp_path / "mine"), "experiment=my_own"]
    assert "name: random_label" in SCRIPT.train(tmp_path, *place, "--cfg", "job")
    own.write_text("domain: vision\n")
    assert f"{own} has no section `at`" in SCRIPT.train(tmp_path, *place, expect=2)
    own.write_text("at: [1\n")
    assert SCRIPT.train(tmp_path, *place, expect=2).startswith(f"error: {own} is no YAML: while parsing")


def test_lower_precision_changes_the_loss_by_little(tmp_path):
    for precision in ("fp32", "bf16"):
        what = ["experiment=random_label", "run.trunk=false"]
        SCRIPT.train(tmp_path / precision, f"precision={precision}", *what)
    full, low = (metrics_of(tmp_path / precision)[-1]["train_loss"] for precision in ("fp32", "bf16"))
    assert 0 < abs(low - full) < 0.02 * full
