"""Muon as the authors' FIRE code runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.methods.method import register
from fire_core.methods.muon import CombinedOptimizer, ConvMuon, Muon

HEAD = ("hidden", "head")  # children of a net that are its head in the official code
EPSILON = 1e-10


class OwnShapeMuon(ConvMuon):
    """Muon whose factor sqrt(max(1, rows / columns)) is that of the last two dimensions of the parameter itself.

    The factor is therefore 1 for every square kernel, whatever its channels.
    """

    def factor(self, parameter: Tensor, matrices: Tensor) -> float:
        return super().factor(parameter, parameter)


@register
@dataclass
class OfficialMuon(Muon):
    """Muon for everything of two or more dimensions before the head, positions and class token too; else Adam.

    Parameters of three dimensions are stacks of matrices. Adam's epsilon is 1e-10.
    """

    variant: ClassVar[str] = "official"
    fixed: ClassVar[tuple[str, ...]] = ("targets",)

    def build(self, net: nn.Module, default: Optimizer) -> Optimizer:
        named = dict(net.named_parameters())
        matrices = [p for key, p in named.items() if muon_matrix(key, p)]
        rest = [p for key, p in named.items() if not muon_matrix(key, p)]
        rate = default.param_groups[0]["lr"]
        groups = [
            {"params": params, "stacked": stacked, "rate_factor": self.rate_factor}
            for stacked in (False, True)
            if (params := [p for p in matrices if (p.ndim == 3) == stacked])
        ]
        muon = OwnShapeMuon(groups, lr=rate * self.rate_factor, momentum=self.momentum)
        betas = self.adam_betas[0], self.adam_betas[1]
        return CombinedOptimizer([muon, torch.optim.Adam(rest, lr=rate, betas=betas, eps=EPSILON)])


def muon_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether the official code trains this parameter with Muon."""
    return parameter.ndim > 1 and name.split(".")[0] not in HEAD
