"""apply on folders as transformers writes them: the architecture in config.json decides the targets."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tests.architectures  # noqa: F401 (its import makes that of torchvision possible)
from fire_core import UserError, fire
from fire_core.checkpoints.command_line import main
from fire_core.checkpoints.files import open_checkpoint
from fire_core.checkpoints.targets import targets_of

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.reference
TOKENS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
MODELS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
}


@pytest.mark.parametrize("name", MODELS)
def test_apply_on_a_saved_folder_equals_fire_on_the_model(tmp_path: Path, name: str) -> None:
    # shards and whole models are stacked differently, which tells on ill-conditioned matrices
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **TOKENS, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "old", max_shard_size="20KB")
    assert len(list((tmp_path / "old").glob("*.safetensors"))) > 1
    folders = str(tmp_path / "old"), str(tmp_path / "new")
    assert main(["apply", *folders, "--targets=-head", "--solver=exact"]) == 0
    report = fire(model, targets="-head", solver="exact")
    assert len(report.treated()) > 5
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    expected = dict(model.named_parameters())
    for parameter_name, parameter in again.named_parameters():
        assert torch.allclose(parameter, expected[parameter_name], atol=1e-6), parameter_name


def test_the_command_reads_config_json_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Where torchvision is broken, nothing in this process may help; the file lacks the prefix of the inner model."""
    config = transformers.GPT2Config(**TOKENS, **MODELS["gpt2"], tie_word_embeddings=False)
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.save_pretrained(tmp_path / "old")
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path / "old")
    command = [sys.executable, "-m", "fire_core", "apply", tmp_path / "old", tmp_path / "new"]
    command, here = [*command, "--targets=no_head"], Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here)
    assert done.returncode == 0 and "config.json (GPT2LMHeadModel)" in done.stdout, done.stderr
    fire(model, targets="no_head")
    new = load_file(tmp_path / "new" / "model.safetensors")
    assert len(new) == len(model.transformer.state_dict())
    for name, value in model.transformer.state_dict().items():
        assert torch.allclose(new[name], value, atol=1e-6), name


def test_experts_saved_one_by_one_are_guessed_only_if_that_is_allowed(tmp_path: Path) -> None:
    sizes = {**MODELS["llama"], "num_hidden_layers": 1, "num_key_value_heads": 2, "num_local_experts": 3}
    config = transformers.MixtralConfig(**TOKENS, **sizes)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    with pytest.raises(UserError, match="does not describe 10 of the matrices"):
        targets_of(checkpoint)
    table, source = targets_of(checkpoint, guess=True)
    assert source == "targets from config.json (MixtralForCausalLM), 10 matrices from names and shapes"
    experts = [t for t in table.included if "experts" in t.parameter]
    assert sum(t.shape[0] * t.shape[1] for t in experts) == 3 * 3 * 32 * 48
    assert sum("self_attn" in t.parameter for t in table.included) == 4
