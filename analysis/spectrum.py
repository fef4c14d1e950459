"""Singular values of one trained layer before and after each treatment: python -m analysis.spectrum CHECKPOINT."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from analysis.plot import Figure, look, plt
from fire_core import UserError, fire
from fire_core.checkpoints.files import open_checkpoint
from fire_core.errors import print_error
from fire_core.methods.full_reset import full_reset
from fire_core.methods.shrink_perturb import shrink_perturb

OUT = Path(__file__).parents[1] / "docs" / "figures" / "spectrum.png"
LOOKS = {  # treatment -> (method whose colour it gets, line style)
    "trained": ("none", "-"),
    "full reset": ("full_reset", "-"),
    "shrink & perturb": ("shrink_perturb", "-"),
    "FIRE, N = 5": ("fire", ":"),
    "FIRE, N = 10": ("fire", "--"),
    "FIRE, exact": ("fire_exact", "-"),
}


def spectra(weight: Tensor) -> dict[str, Tensor]:
    """Return {treatment: singular values, largest first} of a trained `weight` (out, in), in float64.

    Shrink & perturb (0.8) and the full reset use newly drawn weights of a Linear layer of that shape.
    """
    torch.manual_seed(0)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    initial = copy.deepcopy(layer.state_dict())
    treatments = (
        lambda: None,
        lambda: full_reset(layer, initial),
        lambda: shrink_perturb(layer, initial, 0.8),
        lambda: fire(layer, iterations=5),
        lambda: fire(layer, iterations=10),
        lambda: fire(layer, solver="exact"),
    )
    found = {}
    for name, treat in zip(LOOKS, treatments, strict=True):
        layer.load_state_dict({"weight": weight})
        treat()
        found[name] = torch.linalg.svdvals(layer.weight.detach().double())
    return found


def draw(found: dict[str, Tensor]) -> Figure:
    """Return a figure with one curve per treatment, on a logarithmic axis."""
    figure, axis = plt.subplots(figsize=(5.4, 3.0))
    for name, values in found.items():
        method, style = LOOKS[name]
        place = range(1, len(values) + 1)
        axis.plot(place, values, style, color=look(method).colour, label=name, linewidth=1.6)
    axis.set_yscale("log")
    axis.set_ylim(1e-3, None)
    axis.set_xlabel("singular value, largest first")
    axis.set_ylabel("size")
    axis.set_title("Second hidden layer of an MLP, trained on 20 sets of random labels")
    axis.legend(frameon=False, loc="lower left", ncols=2)
    figure.tight_layout()
    return figure


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.spectrum", description=__doc__)
    parser.add_argument("checkpoint", help="as in runs/random_label/small/none/seed_1/checkpoint/final.pt")
    parser.add_argument("--parameter", default="hidden.2.weight", help="a matrix (default hidden.2.weight)")
    parser.add_argument("--out", default=str(OUT), help="default docs/figures/spectrum.png")
    options = parser.parse_args(given)
    try:
        tensors = open_checkpoint(options.checkpoint, "net").tensors
        if options.parameter not in tensors:
            raise UserError(
                f"no {options.parameter!r} in {options.checkpoint}; it holds {', '.join(tensors)}"
            )
        found = spectra(tensors[options.parameter])
    except UserError as error:
        print_error(error)
        return 2
    draw(found).savefig(options.out)
    for name, values in found.items():
        print(f"{name:<18} largest {values[0]:.3g}, median {values.median():.3g}, smallest {values[-1]:.3g}")
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
