"""Settings, Muon, single layers and theorems: tables and sentences from runs whose numbers are known by hand."""

import pandas as pd
import pytest
import torch

from analysis import documents, estimates, further_questions, sensitivity, theory
from analysis.runs import load
from fire_core import find_targets
from harness.config import compose
from harness.domains import find
from language.model import Decoder, Shape
from tests.synthetic_runs import task_lines, warm_start_lines, write_run
from vision.models import build


def test_settings_are_held_against_fire_and_muon_against_both(tmp_path):
    levels = {
        "none": 0.3,
        "fire": 0.8,
        "fire-scale=initial": 0.6,
        "fire-normalize=spectral": 0.8,
        "muon": 0.5,
    }
    for label, level in (levels | {"fire_muon": 0.9}).items():
        for seed in (1, 2, 3):
            noise = 0.0005 * ((seed * len(label)) % 3)
            lines = task_lines([level, level + noise], seed)
            write_run(tmp_path, "settings_random_label", label, seed, lines, protocol="random_label")
    frame = estimates.frame(load(tmp_path))
    (told,) = further_questions.settings_told(frame)
    assert (told["name"], told["count"], told["better"]) == (
        "random labels",
        1,
        [],
    )  # spectral: equal to FIRE
    (worse,) = told["worse"]
    assert worse["changed"] == "scale=initial" and worse["difference"] == pytest.approx(-0.2, abs=1e-3)
    (told,) = further_questions.muon_told(frame)
    gains = {title: row["difference"] for title, row in told["rows"]}
    assert gains == {"Muon": pytest.approx(0.4, abs=1e-3), "FIRE": pytest.approx(0.1, abs=1e-3)}


@pytest.mark.parametrize(
    "domain, experiment, net",
    [
        (
            "vision",
            "sensitivity_resnet18",
            lambda: build("resnet18", classes=3, channels=1, image_size=16, width=4),
        ),
        ("language", "sensitivity_gpt", lambda: Decoder(Shape(4, 2, width=8, block=8, vocabulary=32))),
    ],
)
def test_the_sweep_over_layers_takes_each_matrix_once(domain, experiment, net):
    sweep = compose(find(domain), [f"experiment={experiment}"]).hydra.sweeper.params
    values = sweep["method.targets"].split(",")
    made = net()
    taken = [target.name for value in values for target in find_targets(made, value).included]
    assert sorted(taken) == sorted(target.name for target in find_targets(made).included)


def test_the_map_of_layers_shows_each_difference(tmp_path):
    levels = {"none": 0.5, "fire": 0.7, "fire-targets=head": 0.55}
    levels |= {"fire-targets=layer1.0.conv1": 0.6, "fire-targets=layer2.0.conv2": 0.4}
    for label, level in levels.items():
        write_run(tmp_path, "sensitivity_resnet18", label, 1, warm_start_lines(level, 1))
    results = load(tmp_path)
    texts = {text.get_text() for text in sensitivity.draw([results]).axes[0].texts}
    assert texts == {"+0.100", "-0.100", "head\n+0.050", "all\n+0.200"}
    (told,) = further_questions.where_told(results)
    assert (told["seeds"], told["best"]["layer_name"], told["worst"]["layer_name"]) == (
        1, "layer1.0.conv1", "layer2.0.conv2",
    )  # fmt: skip


def test_theorems_on_a_net_before_and_after_the_exact_projection():
    torch.manual_seed(0)
    make = {"classes": 4, "channels": 1, "image_size": 4, "width": 12, "depth": 2}
    net, trained = build("mlp", **make), build("mlp", **make)
    trained.load_state_dict(net.state_dict())
    inputs, labels = torch.randn(64, 16), torch.randint(4, (64,))
    before = pd.DataFrame(theory.rows_of(net, trained, inputs, labels))
    assert len(before) == 10 and (before[before["theorem"] == "1"]["measured"] == 0).all()
    theory.treated(net, {}, "fire_exact", 1)
    after = pd.DataFrame(theory.rows_of(net, trained, inputs, labels))
    assert after["holds"].all() and after["bound"].notna().all()
    activity = after[after["theorem"] == "4"]["measured"]
    assert activity.max() == pytest.approx(1.0, abs=1e-4)  # rows of one length
    features = theory.features_of(theory.weights_of(trained), inputs)
    assert len(features) == 3 and float(features[0].min()) == 0.0 > float(features[-1].min())
    both = pd.concat([before.assign(method="none"), after.assign(method="fire_exact")]).assign(network="MLP")
    nets = pd.DataFrame(columns=["network", "method", "matrices", "below_1", "below_1_scaled"])
    line = theory.premise_table(both, nets).iloc[0]
    # squared scales 12/16, 1 and 4/12 leave 12 (1 - 3/4)^2, 0 and 4 (1 - 1/3)^2 = 16/9
    assert line["FIRE exact: as stored"] == "67%" and list(line)[-1] == "100%"


def test_the_finding_of_a_figure_counts_the_panels_in_which_fire_is_ahead() -> None:
    """Of panels whose premise is met, at their largest size, by the confirming seeds where there are any."""
    rows = [
        # experiment, size, better, worse, premise, gain, exploring gain
        ("fig3_best", "medium", "fire", "none", True, 0.2, -0.1),
        ("fig3_30k", "medium", "none", "fire", True, None, 0.3),
        ("fig3_60k", "medium", "fire", "none", False, 0.5, 0.5),
        ("fig3_best", "small", "fire", "none", True, -0.2, -0.2),
        ("fig3_best", "medium", "fire", "rescale", True, 0.2, 0.2),
        ("fig3_best", "medium", "fire", "full_reset", True, None, None),
        ("fig2a_cifar10_resnet18", "medium", "fire", "none", True, 0.2, 0.2),
    ]
    names = ["experiment", "size", "better", "worse", "premise", "gain", "exploring_gain"]
    compared = pd.DataFrame(rows, columns=names).assign(planned=10)
    assert documents.ahead(compared, "fig3") == [("none", 1, 2)]
    assert documents.ahead(compared, "fig4") == []
