"""The import of torchvision, which works even if its compiled operators cannot be loaded.

The wheel on PyPI is linked to CUDA. With a CPU build of torch, it misses an operator; its name is declared here, and unused.
"""

import importlib
import sys
from types import ModuleType

import torch

from fire_core.errors import UserError

_declared: list[torch.library.Library] = []  # kept alive: the operators vanish with the object


def import_torchvision() -> ModuleType:
    """Return the torchvision package, whose `ops` may not work. Raises UserError if it is not installed."""
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        remedy = "make install-vision, or pip install -e '.[vision]'"
        raise UserError(f"torchvision is not installed: {remedy}") from error
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    if not _declared:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
    return importlib.import_module("torchvision")
