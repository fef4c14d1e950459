"""The picture of README.md: one probe, four methods and the three best ones, readable at 700 pixels."""

from __future__ import annotations

from collections.abc import Sequence

from analysis import plot, probes
from analysis.plot import Figure, plt
from analysis.runs import Results

PREFIXES = ("random_label",)
METHODS = ("none", "shrink_perturb", "full_reset", "fire")
BEST = ("muon", "redo", "snr")  # they end above FIRE; to leave them out would look like selection
CAPTION = (
    "A network memorises 20 sets of images with random labels, one after the other; each point is the training accuracy "
    "at the end of a task. Lines are means over the seeds: five to ten for the thick ones, whose bands run from the lowest "
    "to the highest seed, and at least three for the thin ones, the methods that end highest."
)


def draw(parts: Sequence[Results]) -> Figure:
    """Return the figure of the random-label probe."""
    figure, axis = plt.subplots(figsize=(5.2, 2.9))
    probes.draw_panel(axis, parts[0].select(label=(*METHODS, *BEST)))
    axis.set_title(plot.title(parts[0].select(label=METHODS)).replace("\n", ", "))
    axis.set_ylabel("training accuracy")
    axis.set_xlabel("task")
    plot.legend(figure, [axis])
    figure.tight_layout()
    return figure
