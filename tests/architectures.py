"""Real architectures with their usual sizes and few layers, for tests and for docs/concepts/architectures.md.

fire-core targets tests.architectures:gpt2 tests.architectures:llama ...
"""

from importlib.util import find_spec

from torch import nn

from vision.torchvision_import import import_torchvision

if find_spec("torchvision") is not None:
    import_torchvision()


def _language_model(name: str, **settings: object) -> nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **settings))


def gpt2() -> nn.Module:
    return _language_model("gpt2", n_layer=2)


def llama() -> nn.Module:
    return _language_model("llama", num_hidden_layers=2, num_key_value_heads=8)


def phi3() -> nn.Module:
    return _language_model("phi3", num_hidden_layers=2, num_key_value_heads=8)


def mixtral() -> nn.Module:
    return _language_model("mixtral", num_hidden_layers=2)


def vit() -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", depth=2)


def convnext() -> nn.Module:
    import timm

    return timm.create_model("convnext_tiny", depths=(1, 1, 1, 1))


def mha() -> nn.Module:
    """torch's own encoder layer."""
    return nn.TransformerEncoderLayer(512, 8)


ALL = ("gpt2", "llama", "phi3", "mixtral", "vit", "convnext", "mha")
