"""Narrow forms of the paper's nets (`test_official_vision` holds the wide ones), and nets of timm."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from fire_core import UserError, fire
from vision.models import build

SMALL = {"mlp": {"width": 16, "depth": 2, "image_size": 14}, "cnn": {"width": 8, "image_size": 14}}


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_layer_norm_of_the_small_nets_comes_before_each_relu(name):
    plain, normed = (build(name, classes=3, channels=1, **SMALL[name], norm=norm) for norm in (None, "layer"))
    assert not any(isinstance(module, nn.GroupNorm) for module in plain.modules())
    modules = [module for module in normed.modules() if isinstance(module, nn.GroupNorm | nn.ReLU)]
    assert [type(module) for module in modules] == [nn.GroupNorm, nn.ReLU] * (len(modules) // 2)
    assert len(modules) == 2 * sum(isinstance(module, nn.ReLU) for module in plain.modules())
    assert all(module.num_groups == 1 for module in modules[::2])
    assert normed(torch.randn(4, 1, 14, 14)).shape == (4, 3)
    with pytest.raises(UserError, match="norm='layer'"):
        build("resnet18", classes=3, channels=1, image_size=8, norm="layer")


@pytest.mark.reference
def test_nets_of_timm_go_through_the_same_table():
    if not find_spec("timm"):
        pytest.skip("timm is not installed")
    net = build("timm:vit_tiny_patch16_224", classes=5, channels=3, image_size=32)
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 5)
    sample = {row.name: row for row in fire(net).treated()}["blocks.0.attn.qkv.weight[q]"]
    assert sample.dfi_factor < sample.dfi_before


def test_the_vit_leaves_out_what_nothing_reads_and_stays_the_same_function():
    torch.manual_seed(0)
    net = build("vit_tiny", classes=5, channels=3, image_size=16, width=24, depth=2, heads=2).double()
    inputs, results = torch.randn(3, 3, 16, 16, dtype=torch.float64), []
    for net.all_tokens in (True, False):
        net.zero_grad()
        outputs = net(inputs)
        outputs.square().sum().backward()
        results.append([outputs.detach(), *(p.grad.clone() for p in net.parameters())])
    torch.testing.assert_close(*results)
