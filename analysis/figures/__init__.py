"""The figures: each module has the experiments that it shows, its caption, and `draw`, which takes the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from analysis import trial_evidence
from analysis.figures import fig2, fig3, fig4, fig5, findings, forest, layers, probes, scaling
from analysis.plot import Figure


class Drawing(NamedTuple):
    """A figure of `python -m analysis figures`. `experiments` are the starts of their names, or whole names if `exact`.
    With `filled`, an experiment that was not run at a size is shown at the next smaller one. `once`: not for each size."""

    draw: Callable[..., Figure]
    experiments: tuple[str, ...]
    caption: str
    exact: bool = False
    filled: bool = False
    once: bool = False


ONCE = {"filled": True, "once": True}
FIGURES = {
    "fig2": Drawing(fig2.draw, fig2.PREFIXES, fig2.CAPTION),
    "fig3": Drawing(fig3.draw, fig3.PREFIXES, fig3.CAPTION),
    "fig4": Drawing(fig4.draw, fig4.PREFIXES, fig4.CAPTION, exact=True, filled=True),
    "fig5": Drawing(fig5.draw, fig5.PREFIXES, fig5.CAPTION, filled=True),
    "claims": Drawing(forest.draw, forest.PREFIXES, forest.CAPTION, **ONCE),
    "rivals": Drawing(forest.draw_rivals, forest.PREFIXES, forest.RIVALS_CAPTION, **ONCE),
    "gains": Drawing(findings.draw_gains, findings.GAINS, findings.GAINS_CAPTION, exact=True, once=True),
    "costs": Drawing(findings.draw_costs, findings.COSTS, findings.COSTS_CAPTION, exact=True, once=True),
    "probes": Drawing(probes.draw, probes.PREFIXES, probes.CAPTION, filled=True),
    "agents": Drawing(probes.draw, probes.AGENTS, probes.CAPTION, exact=True, **ONCE),
    "scaling": Drawing(scaling.draw, scaling.PREFIXES, scaling.CAPTION),
    "layers": Drawing(layers.draw, layers.PREFIXES, layers.CAPTION, **ONCE),
    "trial": Drawing(trial_evidence.draw, trial_evidence.PREFIXES, trial_evidence.CAPTION, **ONCE),
    "readme": Drawing(probes.draw_readme, ("random_label",), probes.README_CAPTION, exact=True, once=True),
}
