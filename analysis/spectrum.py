"""Singular values of a trained layer before and after each treatment: python -m analysis.spectrum CHECKPOINT

CHECKPOINT is that of an MLP, as in runs/random_label/small/none/seed_1/checkpoint/final.pt. Draws docs/figures/spectrum.png.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from analysis import plot
from analysis.plot import look, plt
from fire_core import fire
from fire_core.methods.full_reset import full_reset
from fire_core.methods.shrink_perturb import shrink_perturb

OUT = Path(__file__).parents[1] / "docs" / "figures" / "spectrum.png"


def draw(weight: Tensor) -> None:
    """Draw the singular values of a trained `weight` (out, in). Shrink & perturb (0.8) and the full reset use newly drawn
    weights of a Linear layer of that shape."""
    torch.manual_seed(0)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    initial = copy.deepcopy(layer.state_dict())
    lines = {  # name: (method whose colour it gets, line style, what is done)
        "trained": ("none", "-", lambda: None),
        "full reset": ("full_reset", "-", lambda: full_reset(layer, initial)),
        "shrink & perturb": ("shrink_perturb", "-", lambda: shrink_perturb(layer, initial, 0.8)),
        "FIRE, N = 5": ("fire", ":", lambda: fire(layer, iterations=5)),
        "FIRE, N = 10": ("fire", "--", lambda: fire(layer, iterations=10)),
        "FIRE, exact": ("fire_exact", "-", lambda: fire(layer, solver="exact")),
    }
    figure, axis = plt.subplots(figsize=(5.4, 3.0))
    for name, (method, style, treat) in lines.items():
        layer.load_state_dict({"weight": weight})
        treat()
        values = torch.linalg.svdvals(layer.weight.detach().double())
        place = range(1, len(values) + 1)
        axis.plot(place, values, style, color=look(method).colour, label=name, linewidth=1.6)
    axis.set(yscale="log", ylim=(1e-3, None), xlabel="singular value, largest first", ylabel="size")
    axis.set_title("Second hidden layer of an MLP, trained on 20 sets of random labels")
    axis.legend(frameon=False, loc="lower left", ncols=2)
    figure.tight_layout()
    figure.savefig(OUT)
    OUT.write_bytes(plot.small_png(OUT.read_bytes()))


if __name__ == "__main__":
    draw(torch.load(sys.argv[1], weights_only=True)["net"]["hidden.2.weight"])
