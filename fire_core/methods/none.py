"""Warm start as it is: the reference level that every method is compared with."""

from dataclasses import dataclass
from typing import ClassVar

from fire_core.methods import Method, register


@register
@dataclass
class NoReset(Method):
    """Leaves weights and training alone. Cost: nothing."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "no intervention: train on from the old weights"
    source: ClassVar[str] = "baseline"
    treats_shards: ClassVar[bool] = True
