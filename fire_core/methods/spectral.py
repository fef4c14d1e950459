"""Spectral regularisation: keep the largest singular value of every weight near 1 during training."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fire_core.errors import check_settings
from fire_core.methods.method import PORT, Method, register
from fire_core.seeding import derive
from fire_core.state import State
from fire_core.wrapped_models import unwrap


@register
@dataclass
class Spectral(Method):
    """Adds coefficient * sum ((sigma^k - 1)^2 + |b|^2k) over the layers to the loss, with k = `power`.

    sigma is the largest singular value of a layer's weight and |b| the norm of its bias. A weight is taken as one matrix
    (out, everything else), and a stack of matrices as these matrices. sigma comes from one step of the power iteration
    for each call, started at the left vector of the call before; the vectors count as constants in the gradient.

    No code of the authors is known. Penalty and gradient are those of an independent implementation of the paper,
    computed exactly; another one takes |b|^2 for the bias, adds (gain - 1)^2 for norm layers, which are left alone here,
    and pulls sigma^2 to 2. The default coefficient is ours: the others lie between 1e-2 and 1e-4. Cost: two products with a
    vector per weight and step, and one vector per weight.

    Args:
        warm_up: steps of the power iteration before the first call, without which the first penalties are far too small.
            The first left vectors, which the paper leaves open, are drawn by the name of the weight.
    """

    coefficient: float = 1e-4
    power: int = 2
    targets: str | list[str] = "all"
    warm_up: int = 100

    name = "spectral"
    title = "spectral regularisation"
    summary = "penalty that keeps the largest singular value of every layer near 1"
    source = "Lewandowski et al. 2025 (arXiv 2406.06811)"
    proven_by = PORT
    takes_whole_weights = True
    off = {"coefficient": 0.0}
    remembers = ("vectors",)  # the left vector of each weight

    def __post_init__(self) -> None:
        check_settings(self, coefficient="[0, inf)", power="[1, inf)", warm_up="[0, inf)")
        self.vectors: dict[str, dict[str, Tensor]] = {}

    def penalty(self, state: State) -> Tensor | float:
        """Return the penalty over all nets, after one step of the power iteration."""
        sigmas: list[Tensor] = []
        biases: list[Tensor] = []
        for name, net in state.nets.items():
            vectors, parameters = self.vectors.setdefault(name, {}), dict(unwrap(net).named_parameters())
            for key, view in self.weights(unwrap(net)).items():
                matrices = view.matrices(parameters[key]).float()
                if key not in vectors or vectors[key].shape != matrices.shape[:-1]:
                    vectors[key] = first_vector(key, matrices.detach(), self.warm_up)
                sigma, vectors[key] = largest_singular_value(matrices, vectors[key])
                sigmas.append(sigma.flatten())
                if view.bias in parameters:
                    biases.append(parameters[view.bias].float().square().sum(dim=-1).flatten())
        total = (torch.cat(sigmas) ** self.power - 1).square().sum()
        return self.coefficient * (total + (torch.cat(biases) ** self.power).sum() if biases else total)


def largest_singular_value(matrices: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sigma, left) of matrices (..., out, in) after one step of the power iteration from `left` (..., out).

    sigma (...) is u^T W v with u and v as constants. It is never above the largest singular value.
    """
    with torch.no_grad():
        right = normalize((matrices.mT @ left.unsqueeze(-1)).squeeze(-1), dim=-1)
    image = (matrices @ right.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        moved = image.norm(dim=-1, keepdim=True) > 0  # a vector of zeros would stay one
        left = torch.where(moved, normalize(image, dim=-1), left)
    return (left * image).sum(dim=-1), left


def first_vector(name: str, matrices: Tensor, steps: int) -> Tensor:
    """Return unit vectors (..., out): drawn by the name of the weight, then moved by `steps` of the power iteration."""
    stream = torch.Generator().manual_seed(derive(0, "spectral", name))
    drawn = torch.randn(matrices.shape[:-1], generator=stream, dtype=torch.float32, device="cpu")
    left = normalize(drawn, dim=-1).to(matrices.device)
    for _ in range(steps):
        _, left = largest_singular_value(matrices, left)
    return left
