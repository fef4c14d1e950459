"""apply on folders as transformers writes them: the architecture in config.json decides the targets."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fire_core import fire
from fire_core.checkpoints.command_line import main
from fire_core.checkpoints.files import open_checkpoint
from fire_core.checkpoints.plan import plan
from vision.torchvision_import import import_torchvision

if find_spec("torchvision") is not None:
    import_torchvision()
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.reference
MODELS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 1},
}


@pytest.mark.parametrize("name", MODELS)
def test_apply_on_a_saved_folder_equals_fire_on_the_model(tmp_path: Path, name: str) -> None:
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(name, **tokens, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "old", max_shard_size="20KB")
    assert len(list((tmp_path / "old").glob("*.safetensors"))) > 1
    assert (
        main(["apply", str(tmp_path / "old"), str(tmp_path / "new"), "--targets=-head", "--solver=exact"])
        == 0
    )
    report = fire(model, targets="-head", solver="exact")
    assert len(report.treated()) > 5
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    expected = dict(model.named_parameters())
    for parameter_name, parameter in again.named_parameters():
        assert torch.allclose(parameter, expected[parameter_name], atol=1e-6), parameter_name


def test_experts_saved_one_by_one_are_found_by_name_and_shape(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    table, source = plan(open_checkpoint(tmp_path / "model"))
    assert "MixtralForCausalLM" in source
    experts = [t for t in table.included if "experts" in t.parameter]
    assert sum(t.shape[0] * t.shape[1] for t in experts) == 3 * 3 * 32 * 48
    assert sum("self_attn" in t.parameter for t in table.included) == 4
