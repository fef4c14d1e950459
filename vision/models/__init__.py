"""Networks by name: those of this package at any width and depth, and those of timm."""

import inspect
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from fire_core.errors import UserError, first_line
from harness.runs import seeded
from vision.images import Images
from vision.models.resnet import ResNet
from vision.models.small import CNN, MLP
from vision.models.vgg import VGG
from vision.models.vit import ViT
from vision.official.switches import pass_zeros
from vision.torchvision_import import import_torchvision

MODELS: dict[str, Any] = {"resnet18": ResNet, "vit_tiny": ViT, "vgg16": VGG, "mlp": MLP, "cnn": CNN}
TIMM = "timm:"


def build(name: str, *, classes: int, channels: int, image_size: int, **settings: Any) -> nn.Module:
    """Return a net with new weights (the default initialisation of its package, from the global generator).

    `name` is one of `MODELS`, or `timm:<name>` for a net of timm, which is imported on use. `settings` are the net's own
    (`width`, `depth`, `heads`, `patch`, `norm`); None means its default. Raises UserError for names and settings that do
    not exist.
    """
    given = own_settings(name, **settings)
    if name.startswith(TIMM):
        return _from_timm(name, image_size, num_classes=classes, in_chans=channels, **given)
    return MODELS[name](classes=classes, channels=channels, image_size=image_size, **given)


def own_settings(name: str, **settings: Any) -> dict[str, Any]:
    """Return the settings of a net that are not None. Raises UserError as `build` does, but knows nothing of timm's."""
    given = {key: value for key, value in settings.items() if value is not None}
    if name.startswith(TIMM):
        return given
    if name not in MODELS:
        raise UserError(f"model {name!r} is unknown: use one of {', '.join(MODELS)}, or timm:<name>")
    known = inspect.signature(MODELS[name].__init__).parameters
    for key in sorted(given.keys() - known.keys()):
        own = ", ".join(sorted(known.keys() - {"self", "classes", "channels", "image_size"}))
        raise UserError(f"model.{key}={given[key]!r}: model {name} has no such setting, only {own}")
    return given


def _from_timm(name: str, image_size: int, **arguments: Any) -> nn.Module:
    import_torchvision()  # timm imports it in turn
    try:
        import timm

        try:
            return timm.create_model(name.removeprefix(TIMM), img_size=image_size, **arguments)
        except TypeError:  # convolutional nets take no image size
            return timm.create_model(name.removeprefix(TIMM), **arguments)
    except ImportError as error:
        raise UserError(f"model {name} needs the timm package: pip install timm") from error
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"model {name} cannot be built with {arguments} ({first_line(error)})") from error


def new_net(cfg: DictConfig, images: Images, device: torch.device) -> nn.Module:
    """Return the network of the config for these images, with newly drawn weights."""
    shape = {"classes": images.classes, "channels": images.channels, "image_size": images.image_size}
    with seeded(cfg.seed, "init"):
        net = build(**cfg.model, **shape)
        if cfg.batch_norm_start == "official":
            pass_zeros(net, images.channels, images.image_size)
    return net.to(device, memory_format=torch.channels_last if cfg.channels_last else torch.preserve_format)
