"""Networks of timm and torchvision by name; the packages are imported on use."""

import copy
import inspect

import torch
from torch import nn

from fire_core.errors import UserError, first_line
from fire_core.targets import find_targets
from vision.torchvision_import import import_torchvision


def build_external(
    name: str, *, classes: int, channels: int, image_size: int, **settings: int | None
) -> nn.Module:
    """Return the untrained net `timm:<model>` or `torchvision:<model>` with `classes` outputs.

    Raises UserError if the package or the model does not exist, if the model does not have one of the settings, and for a
    net of torchvision if the images do not have 3 channels.
    """
    source, _, model = name.partition(":")
    if source not in ("timm", "torchvision"):
        raise UserError(
            f"model source {source!r} in {name!r} is unknown: use timm:<name> or torchvision:<name>"
        )
    build = _build_timm if source == "timm" else _build_torchvision
    try:
        net = build(model, classes, channels, image_size, settings)
    except UserError:
        raise
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        given = "".join(f" with {key}={value}" for key, value in settings.items())
        raise UserError(f"model {name} cannot be built{given} ({first_line(error)})") from error
    return net


def _build_timm(model: str, classes: int, channels: int, image_size: int, settings: dict) -> nn.Module:
    try:
        import_torchvision()  # timm imports it in turn
        import timm
    except ImportError as error:
        raise UserError(f"model timm:{model} needs the timm package: pip install timm") from error
    if not timm.is_model(model):
        raise UserError(f"timm has no model {model!r}: see timm.list_models()")
    arguments = dict(num_classes=classes, in_chans=channels, **settings)
    try:
        return timm.create_model(model, pretrained=False, img_size=image_size, **arguments)
    except TypeError:  # convolutional nets take no image size
        return timm.create_model(model, pretrained=False, **arguments)


def _build_torchvision(model: str, classes: int, channels: int, image_size: int, settings: dict) -> nn.Module:
    if channels != 3:
        raise UserError(
            f"model torchvision:{model} takes 3 channels, the images have {channels}: set data.channels=3"
        )
    models = import_torchvision().models
    if model not in models.list_models(module=models):
        raise UserError(f"torchvision has no classifier {model!r}: see torchvision.models.list_models()")
    builder = models.get_model_builder(model)
    if model in ("googlenet", "inception_v3"):  # they have further outputs, which training would have to know
        settings = {**settings, "aux_logits": False}
    if "image_size" in inspect.signature(builder).parameters or model.startswith("vit_"):
        settings = {**settings, "image_size": image_size}
    with torch.no_grad():
        net = builder(weights=None, num_classes=classes, **settings)
    shape = copy.deepcopy(net).to(
        "meta"
    )  # torchvision does not say which layer is the head: one run without values does
    heads = find_targets(shape, example=torch.empty(1, 3, image_size, image_size, device="meta"))
    for target in heads:
        if target.role == "head":
            net.get_submodule(target.module).is_head = True
    return net
