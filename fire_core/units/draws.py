"""Laws from which new weights of units are drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from fire_core.errors import UserError

# law -> (shape of the distribution, standard deviation or half width times the root of fan_in)
LAWS = {
    "default": ("uniform", 1.0),  # PyTorch's own, for Linear and convolutions
    "he_uniform": ("uniform", 6.0**0.5),
    "he_normal": ("normal", 2.0**0.5),
    "lecun_uniform": ("uniform", 3.0**0.5),
    "lecun_normal": ("normal", 1.0),
}


def draw(law: str, shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return new incoming weights of units, (units, in, ...), float32 on the CPU; fan_in is the size of one unit's.

    Raises UserError for a law that is not in `LAWS`.
    """
    if law not in LAWS:
        raise UserError(f"law={law!r}: choose one of {', '.join(LAWS)}")
    kind, width = LAWS[law]
    bound = width * max(torch.Size(shape[1:]).numel(), 1) ** -0.5
    if kind == "normal":
        return torch.randn(shape, generator=generator).mul_(bound)
    return torch.rand(shape, generator=generator).mul_(2 * bound).sub_(bound)
