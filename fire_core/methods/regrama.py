"""ReGraMa: replace hidden units whose weights get little gradient."""

from dataclasses import dataclass

from torch import Tensor, nn

from fire_core.errors import check_settings
from fire_core.methods._units import ForgetfulUnitMethod, gradient_scores
from fire_core.methods.method import PORT, register
from fire_core.state import State
from fire_core.units import UnitLayer


@register
@dataclass
class ReGraMa(ForgetfulUnitMethod):
    """Gives units with little gradient new incoming weights, bias 0 and outgoing weights 0, every `every_steps` steps.

    The score of a unit is the mean |gradient| of its incoming weights in one step, before clipping, over the mean of its
    layer. The first replacement comes after step `every_steps` + 1. The output layer and layers of mixed units stay.

    No code of the authors is known; the rule is that of a port (LucMc/continual-learning). It means to clear Adam's
    moments, but does not, where gradients are clipped (`reset_moments=false`). It has no norm layers; here, the channels
    of a replaced unit start again. Cost: nothing between replacements; one pass over the gradients for each.

    Args:
        threshold: largest score of a unit that is replaced; 0.25 in the port, 0.1 for incremental CIFAR.
        most: largest share of a layer that is replaced at once; those of the lowest scores come first.
    """

    threshold: float = 0.1
    every_steps: int = 100
    most: float = 1.0
    fresh: str = "he_uniform"

    name = "regrama"
    title = "ReGraMa"
    summary = "replace units with little gradient"
    source = "2025 (ReGraMa, arXiv 2505.24061)"
    proven_by = PORT
    needs = frozenset({"gradients", "batches"})
    off = {"most": 0.0}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, threshold="[0, inf)", every_steps="[1, inf)", most="[0, 1]")

    def before_step(self, state: State) -> None:
        if self.counts["steps"] and self.counts["steps"] % self.every_steps == 0:
            for name, net in state.nets.items():
                self.pending += [(name, each, self.due(net, each)) for each in self.find_layers(state, name)]

    def due(self, net: nn.Module, layer: UnitLayer) -> Tensor:
        """Return the indices of the units to replace (on the CPU)."""
        scores = gradient_scores(net, layer).cpu()
        count = min(int((scores <= self.threshold).sum()), int(self.most * layer.units))
        return scores.argsort(stable=True)[:count]

    def after_step(self, state: State) -> None:
        for name, layer, chosen in self.pending:
            if len(chosen):
                self.recycle(state, name, layer, chosen)
        self.pending = []
        self.counts["steps"] += 1
