"""Folders as transformers writes them are read: the architecture in config.json decides the targets."""

from pathlib import Path

import pytest
import torch

import tests.architectures  # noqa: F401 (its import makes that of torchvision possible)
from fire_core import fire
from fire_core.checkpoints.command_line import main
from fire_core.checkpoints.files import open_checkpoint
from fire_core.checkpoints.targets import targets_of
from fire_core.errors import UserError

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.reference
TOKENS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
MODELS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("torch_files", [False, True])
def test_apply_on_a_folder_equals_fire_on_the_model(tmp_path: Path, name: str, torch_files: bool) -> None:
    """The shards are read, and one safetensors file is written, which transformers loads with the old config.json."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **TOKENS, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    old, new = tmp_path / "old", tmp_path / "new" / "model.safetensors"
    model.save_pretrained(old, max_shard_size="20KB")
    assert len(list(old.glob("*.safetensors"))) > 1
    if torch_files:
        for file in old.glob("model*"):
            file.unlink()
        torch.save(model.state_dict(), old / "pytorch_model.bin")  # with the tied weight under both names
    rule = "all" if torch_files else "-head"
    assert main(["apply", str(old), str(new), f"--targets={rule}", "--solver=exact"]) == 0
    report = fire(model, targets=rule, solver="exact")
    assert len(report.treated()) == len(targets_of(open_checkpoint(old), rule)[0].included) > 5
    config.save_pretrained(new.parent)
    again = dict(transformers.AutoModelForCausalLM.from_pretrained(new.parent).named_parameters())
    for parameter_name, parameter in model.named_parameters():
        assert torch.allclose(parameter, again[parameter_name], atol=1e-6), parameter_name


def test_matrices_that_the_model_does_not_describe_stay_out(tmp_path: Path) -> None:
    """Mixtral's experts are saved one by one, under names that its model in transformers does not have."""
    sizes = {**MODELS["llama"], "num_hidden_layers": 1, "num_key_value_heads": 2, "num_local_experts": 3}
    config = transformers.MixtralConfig(**TOKENS, **sizes)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    table, source = targets_of(open_checkpoint(tmp_path / "model"))
    assert source == "targets from config.json (MixtralForCausalLM)"
    experts = [target for target in table if "experts" in target.parameter]
    assert len(experts) == 9 and {t.reason for t in experts} == {"not in config.json (MixtralForCausalLM)"}
    assert sum("self_attn" in target.parameter for target in table.included) == 4


def test_what_a_config_names_is_called_only_if_it_is_a_model_class(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.randn(4, 4)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2Config"], "n_layer": 1}'
    )
    with pytest.raises(UserError, match="is not a model"):
        targets_of(open_checkpoint(tmp_path), "all", None)
