"""The theorems, measured on a network whose answers are known, and the sweep over layers."""

import pandas as pd
import pytest
import torch

from analysis import theory
from fire_core import find_targets
from harness.config import compose
from harness.domains import find
from language.model import Decoder, Shape
from vision.models import build


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
