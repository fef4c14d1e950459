"""No intervention: the baseline with which every method is compared."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fire_core.methods.method import Method, register


@register
@dataclass
class NoReset(Method):
    """Does nothing. Cost: nothing."""

    name: ClassVar[str] = "none"
    title: ClassVar[str] = "none (continue)"
    summary: ClassVar[str] = "no intervention: train on from the old weights"
    source: ClassVar[str] = "baseline"
    off: ClassVar[dict[str, Any] | None] = {}
