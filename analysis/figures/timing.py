"""Two axes that the paper fixes: when a method acts, and how suddenly the data of the next phase come."""

from collections.abc import Sequence

import pandas as pd

from analysis import estimates, measures, names, plot
from analysis.rendering import column, difference_text, mean_text
from analysis.runs import Results, merged

STUDIES = {  # study -> (the setting that it changes, x axis)
    "mistiming": ("trigger.first", "the method acts this share of a phase after the boundary"),
    "gradual": ("gradual", "share of a phase over which the new data are mixed in"),
}
BASES = {"random_label": "random_label", "resnet18": "fig2a_cifar10_resnet18"}  # with the share 0
METHODS = ("none", "full_reset", "shrink_perturb", "fire")


def studied(parts: Sequence[Results]) -> list[tuple[Results, str, pd.DataFrame]]:
    """Return (runs, study, estimates with a column share) of each study and network, with differences from `none`.

    `none` has the same gradual shift; no trigger changes it. A phase is the second one of the experiment.
    """
    known, found = {part.first["experiment"]: part for part in parts}, []
    for name, part in known.items():
        study, _, rest = name.partition("_")
        if study not in STUDIES or (base := known.get(BASES.get(rest, ""))) is None:
            continue
        base = base.select(label=METHODS, seed=part.finished["seed"].unique())
        if base.metrics.empty:  # it has other seeds
            continue
        start, end = base.metrics.groupby("phase")["step"].max().iloc[:2]
        base = Results(*(frame.assign(experiment=name) for frame in base.frames))
        own = merged(part.select(method=METHODS), base, ["label", "seed"])
        first, length = (start, end - start) if study == "mistiming" else (0, 1)
        set_to = {label: float(x.get(STUDIES[study][0], first)) for label, x in own.overrides.items()}
        shares = {label: round((x - first) / length, 2) for label, x in set_to.items()}
        rows = estimates.minus(estimates.frame(own).query("headline"), "none")
        found.append((own, study, rows.assign(share=rows["label"].map(shares)).sort_values("share")))
    return found


def table(parts: Sequence[Results]) -> pd.DataFrame:
    """Return a row per study, network and method: what `none` ends with at each share, and how far others are from it."""
    rows = []
    for own, study, shown in studied(parts):
        for method in METHODS:
            of, text = shown[shown["method"] == method], mean_text if method == "none" else difference_text
            row = {"study": study, "panel": names.panel(BASES[own.first["experiment"].partition("_")[2]])}
            row |= {"method": names.look(method).name + (" minus none" if method != "none" else "")}
            rows.append(row | {"seeds": of["n"].min()} | dict(zip(of["share"], column(text, of))))
    found = pd.DataFrame(rows)
    return found[[*found.columns[:4], *sorted(found.columns[4:])]].astype(object).fillna("-")


def draw(parts: Sequence[Results]) -> plot.Figure | None:
    """Return the figure, one panel per study and network, or None without runs of them."""
    if not (found := studied(parts)):
        return None
    figure, axes = plot.panels(len(found), 2, 4.4, 3.0)
    for axis, (own, study, rows) in zip(axes, found):
        for place, method in enumerate(METHODS):
            line, look = rows[rows["method"] == method], names.look(method)
            x = line["share"] + 0.005 * (place - 1)  # so that intervals do not cover each other
            axis.plot(x, line["mean"], f"{look.marker}-", color=look.colour, markersize=4, label=look.name)
            axis.vlines(x, line["low"], line["high"], look.colour)
        for level in rows["mean"][rows["label"] == "none"] if study == "mistiming" else ():
            plot.draw_level(axis, level, "none")
        axis.set(xlabel=STUDIES[study][1], ylabel=measures.of(own)[0].axis, title=names.title(own))
    return plot.with_legend(figure, axes, h_pad=1.6)
