"""FIRE on every layer, where an experiment's own rule treats some and resets others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fire_core.methods import register
from fire_core.methods.fire import Fire


@register
@dataclass
class FireAll(Fire):
    """`fire` under a name of its own, so that "project everything, reset nothing" runs beside the experiment's rule.

    In DQN the official method resets the linear layers to their initial values and projects the convolutions only.
    """

    name: ClassVar[str] = "fire_all"
    summary: ClassVar[str] = "published FIRE on every layer, nothing reset"
    source: ClassVar[str] = "ablation of Han et al. 2026, DQN setting"
    domains: ClassVar[tuple[str, ...]] = ("dqn",)  # elsewhere it is `fire`
