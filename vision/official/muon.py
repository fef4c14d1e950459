"""Muon as the authors' FIRE code runs it."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.methods.method import MatrixView, register
from fire_core.methods.muon import Muon, MuonAdam

HEAD = ("hidden", "head")  # children of a net that are its head in the official code


class OwnShapeMuon(MuonAdam):
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
        body = {key: p for key, p in net.named_parameters() if key.split(".")[0] not in HEAD}
        views = {key: MatrixView(stacked=p.ndim == 3) for key, p in body.items() if p.ndim > 1}
        return self.optimizer(net, views, default, 1e-10, OwnShapeMuon)
