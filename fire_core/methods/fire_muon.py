"""FIRE at boundaries, Muon between them: is the projection redundant where the optimizer orthogonalises its updates?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fire_core.methods import register
from fire_core.methods.fire import Fire
from fire_core.methods.muon import Muon
from fire_core.phases import State
from fire_core.report import Report


@register
@dataclass
class FireMuon(Muon):
    """`muon`, and at each boundary `fire` with `iterations` on the matrices that `projected` names.

    `targets` says which matrices Muon trains, as in `muon`. Cost: that of both.
    """

    iterations: int = Fire.iterations
    projected: str | list[str] = "all"

    name: ClassVar[str] = "fire_muon"
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
