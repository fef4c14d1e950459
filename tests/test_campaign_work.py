"""The work of a run as a plan counts it: images, tokens and operations, against the scripts and by hand."""

import pytest
import torch

from harness.campaign.work import assumed, stages_of, work_of
from harness.overrides import compose_config
from vision.images import Images
from vision.protocols import make_phases


def test_stages_of_the_three_protocols_by_hand():
    assert stages_of({"name": "warm_start", "share": 0.1, "epochs": [1000, 100]}, 50_000, 10) == [
        (5_000, 1000),
        (50_000, 100),
    ]
    continual = stages_of({"name": "continual", "stages": 10, "epochs": 100}, 50_000, 10)
    assert sum(images * epochs for images, epochs in continual) == 27_500_000
    classes = stages_of({"name": "class_incremental", "stages": 20, "epochs": 100}, 100_000, 200)
    assert classes[0] == (5_000, 100) and classes[-1] == (100_000, 100)
    assert sum(images * epochs for images, epochs in classes) == 105_000_000


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("warm_start", {"share": 0.1}),
        ("continual", {"stages": 5}),
        ("continual", {"stages": 5, "replay": 0.1}),
        ("class_incremental", {"stages": 3}),
        ("class_incremental", {"stages": 3, "replay": 0.1}),
        ("class_incremental", {"stages": 3, "replay": 0.0}),
        ("random_label", {"tasks": 3, "count": 70}),
        ("permuted", {"tasks": 3}),
        ("label_noise", {"noisy": 60, "clean": 90}),
    ],
)
def test_stages_have_the_images_that_the_script_trains_on(name, settings):
    pictures, labels = torch.zeros(200, 1, 2, 2, dtype=torch.uint8), torch.arange(200) % 10
    images = Images(
        "ten", pictures, labels, pictures, labels, 10, (*"abcdefghij",), torch.zeros(1), torch.ones(1)
    )
    phases = make_phases(name, images, seed=1, epochs=2, **settings)
    expected = [(len(phase.indices), 2) for phase in phases]
    assert stages_of({"name": name, "epochs": 2, **settings}, 200, 10) == expected


def test_language_takes_the_lengths_of_the_paper():
    cfg = compose_config("language", ["experiment=fig3_60k", "size=paper"])
    work = work_of(cfg)
    assert work.trunk == 60_000 * 491_520  # of 95,000: no run starts from a later iteration
    assert work.fork // 491_520 == (116_736_000 + 9_035_582_198) // 491_520  # about 18.6 k iterations
    assert round(work.fork / 491_520, -2) == 18_600


def test_language_counts_tokens_in_the_windows_of_each_phase():
    typed = ["experiment=language_context", "size=small", "phase_1.iterations=20", "phase_1.eval_every=1"]
    cfg = compose_config("language", typed)
    work, batch = work_of(cfg), cfg.accumulation * cfg.batch_size
    assert (work.trunk, work.fork) == (20 * batch * 128, 15 * batch * 512)
    assert work.per_step == batch * 128  # probes measure phase 1
    assert (work.trunk_tests, work.fork_tests) == (20 * 2 * 8 * 128, (2 + 2) * 2 * 8 * 512)


def test_assumed_operations_and_weights_are_those_of_the_nets():
    from torch.utils.flop_counter import FlopCounterMode

    from vision.models import build

    known = assumed()
    for experiment in ("fig2a_cifar10_resnet18", "fig2a_cifar100_vit_tiny", "fig2a_tiny_imagenet_vgg16"):
        cfg = compose_config("vision", [f"experiment={experiment}", "size=paper"])
        pixels = 64 if cfg.data.name == "tiny_imagenet" else 32
        with torch.device("meta"):
            net = build(**cfg.model, classes=known["classes"][cfg.data.name], channels=3, image_size=pixels)
            with FlopCounterMode(display=False) as counter:
                net(torch.empty(1, 3, pixels, pixels))
        told = known["nets"][f"{cfg.model.name}/{cfg.data.name}"]
        assert told["gflop"] == pytest.approx(counter.get_total_flops() / 1e9, abs=1e-3)
        assert told["parameters"] == sum(p.numel() for p in net.parameters())


def test_operations_of_a_token_are_those_that_the_script_counts():
    pytest.importorskip("tokenizers")
    from language.model import Decoder
    from language.settings import check_settings

    cfg = compose_config("language", ["experiment=fig3_best", "size=paper"])
    with torch.device("meta"):
        net = Decoder(check_settings(cfg))
    assert work_of(cfg).operations == pytest.approx(net.flops_per_token(), rel=0.01)
