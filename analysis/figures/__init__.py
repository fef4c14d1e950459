"""The figures: what each shows, and the function that draws it from settings. Their captions are in captions.yaml."""

from collections import namedtuple
from functools import partial
from pathlib import Path

import yaml

from analysis import paper, trial_evidence
from analysis.figures import curves, dial, fig5, forest, studies, timing
from analysis.plot import BAND, PREMISE

TEXTS = yaml.safe_load(Path(__file__).with_name("captions.yaml").read_text(encoding="utf-8"))
SHARED = {"band": BAND, "premise": PREMISE, "forest": TEXTS.pop("forest").format(within=forest.WITHIN)}
CAPTIONS = {name: text.format(**SHARED) for name, text in TEXTS.items()}
FIG4 = tuple(panel for panel in paper.panels() if panel.startswith("fig4"))
AGENTS = ("fig4a_asterix_early", "fig4a_breakout", "fig4a_catch")
AGENTS += ("fig4b_hopper", "fig4b_balance_simple_long", "sac_plain_hopper")

# a figure of `python -m analysis figures`: the function that draws it from settings (None: nothing to draw), and names or
# patterns of experiments
Drawing = namedtuple("Drawing", "draw experiments")
FIGURES = {
    "fig2": Drawing(partial(curves.draw_paper, "fig2"), ("fig2*",)),
    "fig3": Drawing(partial(curves.draw_paper, "fig3"), ("fig3*",)),
    "fig4": Drawing(partial(curves.draw_paper, "fig4"), FIG4),
    "fig5": Drawing(fig5.draw, ("fig2a*", "fig5a*", "ablation_iterations")),
    "claims": Drawing(forest.draw, ("fig2*", "fig3*", *FIG4)),
    "rivals": Drawing(forest.draw_rivals, ("fig2*", "fig3*", *FIG4)),
    "gains": Drawing(studies.draw_gains, studies.GAINS),
    "costs": Drawing(studies.draw_costs, studies.COSTS),
    "probes": Drawing(curves.draw_probes, ("random_label*", "label_noise*", "permuted*", "pictures*")),
    "agents": Drawing(curves.draw_probes, AGENTS),
    "scaling": Drawing(studies.draw_scaling, ("scaling_warm_start*",)),
    "layers": Drawing(studies.draw_layers, ("sensitivity_*",)),
    "dial": Drawing(dial.draw, dial.PANELS),
    "timing": Drawing(timing.draw, ("mistiming*", "gradual*", *timing.BASES.values())),
    "trial": Drawing(trial_evidence.draw, trial_evidence.PATTERNS),
    "readme": Drawing(curves.draw_readme, ("random_label",)),
}
