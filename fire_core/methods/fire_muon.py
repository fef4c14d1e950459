"""FIRE at boundaries with Muon as the optimizer, to see whether FIRE still helps where updates are orthogonalised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fire_core.methods.fire import Fire
from fire_core.methods.method import register
from fire_core.methods.muon import Muon
from fire_core.report import Report
from fire_core.state import State


@register
@dataclass
class FireMuon(Muon):
    """Trains as `Muon` does, and applies `fire` at each boundary.

    Args:
        iterations: of `fire`. projected: the matrices that `fire` projects, a rule of `find_targets`.
        targets: the matrices that Muon trains.

    Cost: that of both.
    """

    iterations: int = Fire.iterations
    projected: str | list[str] = "all"

    name: ClassVar[str] = "fire_muon"
    title: ClassVar[str] = "FIRE with Muon"
    summary: ClassVar[str] = "FIRE at boundaries with Muon as the optimizer"
    source: ClassVar[str] = "combination of Han et al. 2026 (FIRE) and Jordan et al. 2024 (Muon)"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._fire = Fire(targets=self.projected, iterations=self.iterations)

    def check(self, state: State) -> None:
        super().check(state)
        self._fire.check(state)

    def treat(self, name: str, net: nn.Module, state: State) -> Report:
        return self._fire.treat(name, net, state)
