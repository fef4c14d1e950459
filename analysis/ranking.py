"""Where each method stands over all panels: mean ranks, and the difference that chance alone would rarely exceed.

A panel is one experiment at one size, and counts if all methods of a group ran there on the same two seeds or more. The
methods are ranked by their means over those seeds (1 is best). Panels, not seeds, are the sample: the interval of a
mean rank is Student's over the panels, and the critical difference is Nemenyi's (Demšar 2006, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from analysis import measures, plot
from analysis.plot import Figure, plt
from analysis.runs import Results, at_most, plain, settings
from analysis.stats import LEVEL, estimate

PREFIXES = ("fig2a", "fig2c_cifar100", "fig3_60k", "fig4a_catch", "random_label", "label_noise")
LATER = ("adamo", "spectral", "weight_clipping", "hare_tortoise", "upgd")
BASIC = ("none", "full_reset", "shrink_perturb", "fire")
GROUPS = {
    "the paper's rivals": (*BASIC, "dash", "parseval", "l2_init", "cbp", "redo", "snr", "muon"),
    "later rivals": ("none", "full_reset", "fire", *LATER),
}
CAPTION = (
    "Rank of each method over the panels in which all methods of a group ran; 1 is best. Small marks: one panel each, by "
    "the means over the seeds that all methods share. Large marks: means with 95 % intervals over the panels, cut at the "
    "first and the last rank. Two methods differ beyond chance (Nemenyi, .05) if their mean ranks are further apart than "
    "the bar. Changes of the network, such as LayerNorm, are not ranked."
)


def ranks(parts: Sequence[Results], methods: Sequence[str]) -> pd.DataFrame:
    """Return the rank of each method (columns) in each panel (rows, named `experiment size`) that has them all."""
    found = {}
    for part in map(plain, parts):
        measure = measures.of(part)[0]
        ends = measures.values(part.metrics, measure)
        seeds = set.intersection(*(set(ends.get(method, {})) for method in methods))
        if len(seeds) >= 2:
            means = [np.mean([ends[method][seed] for seed in sorted(seeds)]) for method in methods]
            order = -np.array(means) if measure.higher_is_better else np.array(means)
            found[f"{part.first['experiment']} {part.first['size']}"] = stats.rankdata(order)
    return pd.DataFrame.from_dict(found, orient="index", columns=list(methods))


def told(results: Results) -> list[dict[str, Any]]:
    """Return what REPRODUCED.md says of each group: panels, mean ranks of FIRE and of the best, critical difference."""
    parts = settings(at_most(results.starting(PREFIXES), "medium"))
    rows = []
    for title, methods in GROUPS.items():
        table = ranks(parts, methods)
        if len(table) >= 2:
            means = table.mean()
            row = {"title": title, "panels": len(table), "methods": len(methods), "fire": means["fire"]}
            row |= {"best": means.idxmin(), "lowest": means.min()}
            rows.append(row | {"difference": critical_difference(len(methods), len(table))})
    return rows


def critical_difference(methods: int, panels: int) -> float:
    """Return the difference of two mean ranks that the largest of all differences exceeds with probability LEVEL if all
    methods are equal: q sqrt(k (k + 1) / 6 n), with q of the studentized range over sqrt(2)."""
    quantile = stats.studentized_range.ppf(1 - LEVEL, methods, np.inf) / np.sqrt(2)
    return float(quantile * np.sqrt(methods * (methods + 1) / (6 * panels)))


def draw(parts: Sequence[Results]) -> Figure:
    """Return the figure, one column per group with two panels or more."""
    tables = {title: table for title, names in GROUPS.items() if len(table := ranks(parts, names)) >= 2}
    columns = max(1, len(tables))
    figure, grid = plt.subplots(1, columns, figsize=(4.6 * columns, 3.2), squeeze=False)
    for axis, (title, table) in zip(grid[0], tables.items()):
        names = table.mean().sort_values(kind="stable").index
        for place, name in enumerate(names):
            found, look = estimate(table[name].to_numpy()), plot.look(name)
            axis.plot(table[name], [-place] * len(table), "o", color=plot.pale(look.colour), markersize=3)
            low, high = np.clip([found.low, found.high], 1, len(names))
            axis.plot([low, high], [-place] * 2, color=look.colour, linewidth=1.3)
            axis.plot(found.mean, -place, look.marker, color=look.colour, markersize=6)
        bar = critical_difference(len(names), len(table))
        axis.plot([1, 1 + bar], [1.1, 1.1], color="#222222", linewidth=2.5, solid_capstyle="butt")
        axis.set_yticks(range(0, -len(names), -1), [plot.look(name).name for name in names])
        axis.set_xlim(0.5, len(names) + 0.5)
        axis.set_ylim(-len(names) + 0.4, 1.7)
        axis.set_xlabel("rank, 1 is best; bar: critical difference")
        axis.set_title(f"{title}, {len(table)} panels")
    figure.tight_layout()
    return figure
