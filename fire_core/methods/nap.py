"""NaP, the projection of Normalize-and-Project: weights keep the norms that they had at the start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fire_core.errors import check_settings
from fire_core.methods.method import PORT, Method, Views, register, start_of
from fire_core.state import State
from fire_core.wrapped_models import unwrap


@torch.no_grad()
def project_norms(model: nn.Module, norms: Mapping[str, Tensor], weights: Views) -> None:
    """Scale each of the `weights` of `model` to its Frobenius norm in `norms`, in place.

    A stack of matrices has one norm for each, (..., 1, 1). A weight whose norm is 0, here or there, stays as it is.
    """
    for key, view in weights.items():
        weight = model.get_parameter(key)
        matrices = view.matrices(weight)
        now = torch.linalg.matrix_norm(matrices, keepdim=True)
        factor = torch.where((norms[key] > 0) & (now > 0), norms[key] / now, 1.0)
        weight.mul_(view.weight(factor.expand_as(matrices), weight))


@register
@dataclass
class NaP(Method):
    """Calls `project_norms` every `every_steps` optimizer steps, with the norms of the starting weights.

    Biases, gains of norm layers and the optimizer's state stay. The method adds no norm layers by itself: in a net without
    them, each projection changes the function that the net computes.

    No code of the authors is known; the rule is that of a port (RLE-Foundation/Plasticine), which projects every 10
    iterations of PPO and every 10,000 steps of DQN. It also brings pairs of gain and bias to the norm sqrt(2), whatever
    their width, which squeezes the gains; that is left out. Cost: one pass over the weights per projection.
    """

    every_steps: int = 1
    targets: str | list[str] = "all"

    name = "nap"
    title = "NaP"
    summary = "weights scaled back to their initial norm during training"
    source = "Lyle et al. 2024 (NaP, arXiv 2407.01800)"
    proven_by = PORT
    needs = frozenset({"initial"})
    off = {"every_steps": 2**62}
    takes_whole_weights = True
    remembers = ("steps",)

    def __post_init__(self) -> None:
        check_settings(self, every_steps="[1, inf)")
        self.steps = 0
        self._norms: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()

    def load_state_dict(self, saved: dict[str, Any], state: State) -> None:
        super().load_state_dict(saved, state)
        self._norms.clear()

    def after_step(self, state: State) -> None:
        self.steps += 1
        for name, net in state.nets.items() if self.steps % self.every_steps == 0 else ():
            inner = unwrap(net)
            views = self.weights(inner)
            if net not in self._norms or not views.keys() <= self._norms[net].keys():
                _, start = start_of(net, state.initial.get(name), views)
                matrices = {key: view.matrices(start[key]) for key, view in views.items()}
                norms = {key: torch.linalg.matrix_norm(each, keepdim=True) for key, each in matrices.items()}
                self._norms[net] = {key: norm.to(inner.get_parameter(key)) for key, norm in norms.items()}
            project_norms(inner, self._norms[net], views)
