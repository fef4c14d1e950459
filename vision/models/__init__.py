"""Networks by name: those of this package at any width and depth, and those of timm and torchvision."""

import inspect
from typing import Any

from torch import nn

from fire_core.errors import UserError
from vision.models.external import build_external
from vision.models.resnet import ResNet
from vision.models.small import CNN, MLP
from vision.models.vgg import VGG
from vision.models.vit import ViT

MODELS: dict[str, type[nn.Module]] = {
    "resnet18": ResNet,
    "vit_tiny": ViT,
    "vgg16": VGG,
    "mlp": MLP,
    "cnn": CNN,
}


def build(
    name: str, *, classes: int, channels: int, image_size: int, **settings: int | str | None
) -> nn.Module:
    """Return a net with new weights (the default initialisation of its package, from the global generator).

    `name` is one of `MODELS`, or `timm:<name>` / `torchvision:<name>` for a net of those packages, imported on
    use. `settings` are the net's own arguments (`width`, `depth`, `heads`, `patch`, `norm`); None means its default.
    Raises UserError for an unknown name, and for a setting that the net does not have.
    """
    given = own_settings(name, **settings)
    if ":" in name:
        return build_external(name, classes=classes, channels=channels, image_size=image_size, **given)
    return MODELS[name](classes=classes, channels=channels, image_size=image_size, **given)


def own_settings(name: str, **settings: Any) -> dict[str, Any]:
    """Return the settings of a net that are not None. Raises UserError as `build` does."""
    given = {key: value for key, value in settings.items() if value is not None}
    if ":" in name:
        return given
    if name not in MODELS:
        raise UserError(
            f"model {name!r} is unknown: use one of {', '.join(MODELS)}, or timm:<name>, torchvision:<name>"
        )
    known = inspect.signature(MODELS[name].__init__).parameters
    surplus = sorted(set(given) - set(known))
    if surplus:
        own = sorted(set(known) - {"self", "classes", "channels", "image_size"})
        wrong = f"model.{surplus[0]}={given[surplus[0]]!r}"
        raise UserError(f"{wrong}: model {name} has no such setting, only {', '.join(own)}")
    return given
