"""The picture of README.md: one probe and four methods, readable at 700 pixels."""

from __future__ import annotations

from collections.abc import Sequence

from analysis import plot, probes
from analysis.plot import Figure, plt
from analysis.runs import Results

PREFIXES = ("random_label",)
METHODS = ("none", "shrink_perturb", "full_reset", "fire")
CAPTION = (
    "A network memorises 20 sets of images with random labels, one after the other; each point is the training accuracy "
    f"at the end of a task. {plot.BAND}"
)


def draw(
    parts: Sequence[Results], paper_curves: bool = False, interest: Sequence[str] = plot.INTEREST
) -> Figure:
    """Return the figure of the random-label probe. The paper has no such panel, so `paper_curves` changes nothing."""
    figure, axis = plt.subplots(figsize=(5.2, 2.9))
    probes.draw_panel(axis, parts[0].select(label=METHODS), interest)
    axis.set_title(plot.title(parts[0]).replace("\n", ", "))
    axis.set_ylabel("training accuracy")
    axis.set_xlabel("task")
    plot.legend(figure, [axis])
    figure.tight_layout()
    return figure
