"""Figures of single questions: what the gain is made of, what a boundary costs, the number of images, single layers."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pandas as pd

from analysis import estimates, measures, names, paper, plot
from analysis.measures import Values
from analysis.plot import Axes, Figure, plt
from analysis.rendering import number
from analysis.runs import RESULTS, Results, load_exported
from analysis.stats import Estimate, estimate, paired

GAINS = ("fig2a_cifar10_resnet18", "fig2a_tiny_imagenet_vgg16", "fig3_best", "fig3_30k", "fig3_60k")
PARTS = ("fire", "rescale", "fire_exact", "full_reset")
COSTS = ("fig2a_cifar10_resnet18", "fig2a_cifar100_vit_tiny", "fig3_60k", "fig4b_walk")
TREATED = ("none", "fire", "shrink_perturb", "full_reset")
MOMENTS = ("before", "right after", "end")
# an export of runs whose row after the first boundary has both test accuracies
RENEWED = RESULTS / "batch_norm"
# the figure shows the first two
PAIRS = (("fire", "full_reset"), ("full_reset", "none"), ("fire", "shrink_perturb"))
CLASSES = 10  # of CIFAR-10
IMAGES = "data.train_per_class"
ALL_IMAGES = 50_000  # the paper's
TARGETS = "method.targets"


def draw_gains(parts: Sequence[Results]) -> Figure:
    rows = estimates.gains(estimates.against(pd.concat(map(estimates.frame, parts)), "none"))
    rows = rows.set_index(["experiment", "label"])
    figure, grid = plt.subplots(1, 2, figsize=(7.4, 2.4), width_ratios=(2, 3))
    for axis, start, unit in zip(grid, ("fig2", "fig3"), ("test accuracy", "validation loss")):
        shown = [name for name in GAINS if name.startswith(start) and name in rows.index]
        for (place, experiment), (beside, label) in product(enumerate(shown), enumerate(PARTS)):
            if (experiment, label) in rows.index:
                row, look, x = rows.loc[(experiment, label)], names.look(label), place + 0.17 * (beside - 1.5)
                axis.plot([x, x], row[["difference_low", "difference_high"]], color=look.colour, lw=1.5)
                axis.plot(x, row["difference"], look.marker, color=look.colour, markersize=5, label=look.name)
        axis.axhline(0, color="#8A8A8A", linewidth=0.8)
        axis.set_xticks(range(len(shown)), map(names.panel, shown))
        axis.set_ylabel(f"gain over none in {unit}")
        axis.grid(False, axis="x")
    return plot.with_legend(figure, grid)


def renewed() -> dict[str, tuple[Values, Values]]:
    """Return {experiment: (with old, with new statistics of batch norm)}: accuracies right after the first boundary."""
    rows = load_exported(RENEWED).metrics.assign(label=lambda rows: rows["method"])
    return {
        str(name): (measures.values(part, measures.TEST_AFTER), measures.values(part, measures.TEST_RENEWED))
        for name, part in rows.groupby("experiment")
    }


def costs(part: Results) -> pd.DataFrame:
    """Return an estimate for each label of TREATED (rows) at each of MOMENTS, by the last boundary."""
    values = [measures.values(part.metrics, each) for each in measures.AT_BOUNDARY[part.first["figure"][:4]]]
    ran = [label for label in TREATED if label in values[-1]]
    cells = {moment: [estimate(of.get(m, {})) for m in ran] for moment, of in zip(MOMENTS, values)}
    return pd.DataFrame(cells, index=ran)


def draw_costs(parts: Sequence[Results]) -> Figure:
    """Return the figure of what a boundary costs, one panel per setting of COSTS."""
    figure, grid = plt.subplots(1, len(parts), figsize=(2.3 * len(parts), 2.5), squeeze=False)
    for axis, part in zip(grid[0], (part.plain for part in parts)):
        for label, moments in costs(part).iterrows():
            look, x = names.look(label), np.arange(3) + 0.08 * (TREATED.index(label) - 1.5)
            means, low, high, *_ = zip(*moments)
            axis.vlines(x, low, high, look.colour, linewidth=1.2)
            axis.plot(x, means, f"{look.marker}-", label=look.name, color=look.colour, markersize=4, lw=0.8)
        axis.set_xticks(range(len(MOMENTS)), MOMENTS)
        axis.set_title(names.title(part).replace(" on ", "\non ", 1).rsplit("\n", 1)[0])
    return plot.with_legend(figure, grid[0])


def scaling(parts: Sequence[Results]) -> pd.DataFrame:
    """Return one row per study (with further changed settings in its name), number of images and pair of PAIRS."""
    rows = []
    for part in parts:
        ends, changed = measures.values(part.metrics, measures.of(part)[0]), part.overrides
        name = names.NAMES["scaling"].get(part.first["experiment"], part.first["experiment"])
        for ours, theirs in product(ends, repeat=2):
            pair, images = (part.methods[ours], part.methods[theirs]), changed[ours].get(IMAGES)
            if pair not in PAIRS or not (images or "").isdecimal() or changed[ours] != changed[theirs]:
                continue
            others = names.changes({key: value for key, value in changed[ours].items() if key != IMAGES})
            study, gain = ", ".join(filter(None, [name, others])), estimate(paired(ends[ours], ends[theirs]))
            rows.append({"study": study, "images": CLASSES * int(images), "pair": pair} | gain._asdict())
    table = pd.DataFrame(rows, columns=["study", "images", "pair", *Estimate._fields])
    return table.sort_values(["study", "images"], kind="stable", ignore_index=True)


def pair_title(pair: tuple[str, str]) -> str:
    return " minus ".join(names.look(method).name for method in pair)


def draw_scaling(parts: Sequence[Results]) -> Figure | None:
    if (table := scaling(parts)).empty:
        return None
    figure, grid = plt.subplots(1, 2, figsize=(7.0, 3.0))
    for axis, pair in zip(grid, PAIRS):
        for place, (study, line) in enumerate(table[table["pair"] == pair].groupby("study", sort=False)):
            beside = line["images"] * 1.03**place  # so that intervals do not cover each other
            (drawn,) = axis.plot(beside, line["mean"], "o-", markersize=4, linewidth=1.2, label=study)
            axis.vlines(beside, line["low"], line["high"], drawn.get_color(), linewidth=1.2)
        theirs = paper.gain("fig2a_cifar10_resnet18", *pair)
        axis.plot(ALL_IMAGES, theirs, "k_", markersize=12, markeredgewidth=2, label="the paper")
        axis.axhline(0, color="#8A8A8A", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xticks(ticks := sorted({*table["images"], ALL_IMAGES}), [f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("images")
        axis.set_title(pair_title(pair))
    grid[0].set_ylabel("difference of test accuracy")
    return plot.with_legend(figure, grid)


def layers(part: Results) -> pd.DataFrame:
    """Return the difference from `none` of each treated layer, its gain, and its block: `layer1.0.conv1` is `conv1` of
    `layer1.0`. A name with fewer than three parts is in block `single`, and FIRE as published is block `all`."""
    treated = {label: changed[TARGETS] for label, changed in part.overrides.items() if TARGETS in changed}
    rows = estimates.against(estimates.frame(part), "none")
    rows = estimates.sides(rows[rows["label"].isin({*treated, "fire"})])
    name = rows["label"].map(treated | {"fire": "all"})
    inside = name.str.extract(r"^(?P<block>[^.]+\.[^.]+)\.(?P<layer>.+)$")
    block, layer = name.where(name == "all", "single"), name.str.removeprefix("name:")
    alone = pd.DataFrame({"block": block, "layer": layer})
    return rows.join(inside.fillna(alone)).assign(gain=estimates.gains(rows)["difference"])


def draw_layers(parts: Sequence[Results]) -> Figure | None:
    """Return the figure, one heat map per network of which `none` was run too, or None if there is none."""
    if not (found := [(part, rows) for part in parts if len(rows := layers(part))]):
        return None
    figure, grid = plt.subplots(1, len(found), figsize=(5.0 * len(found), 3.6), squeeze=False)
    for axis, (part, rows) in zip(grid[0], found):
        draw_map(axis, rows)
        axis.set_title(names.title(part))
    figure.tight_layout()
    return figure


def draw_map(axis: Axes, rows: pd.DataFrame) -> None:
    """Draw one row per block and one column per layer inside it, with single layers and `all` in a last row."""
    single = rows["block"].isin(["single", "all"])
    columns, blocks = list(rows["layer"][~single].unique()), sorted(rows["block"][~single].unique())
    alone = list(rows["label"][single])
    values, texts = np.full((len(blocks) + 1, max(len(columns), len(alone))), np.nan), {}
    unclear = np.zeros(values.shape, dtype=bool)
    for row in rows.to_dict("records"):
        if row["label"] in alone:
            place, name = (len(blocks), alone.index(row["label"])), f"{row['layer']}\n"
        else:
            place, name = (blocks.index(row["block"]), columns.index(row["layer"])), ""
        values[place], unclear[place] = row["gain"], row["pairs"] > 1 and not row["word"]
        texts[place] = name + number(row["gain"], 3, sign=True)
    limit = np.nanquantile(np.abs(values), 0.85)  # so that one layer, or all, does not drown the others
    axis.imshow(np.where(unclear, 1.0, np.nan), cmap="Greys", vmin=0, vmax=10, aspect="auto")
    shown = np.where(unclear, np.nan, values)
    image = axis.imshow(shown, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    unit = rows["measure"].iloc[0].split(",")[0]
    axis.figure.colorbar(image, ax=axis, extend="both", label=f"gain over none in {unit}", pad=0.02)
    for (y, x), text in texts.items():
        dark = not unclear[y, x] and abs(values[y, x]) > 0.6 * limit
        colour = "#8A8A8A" if unclear[y, x] else "white" if dark else "#222222"
        axis.text(x, y, text, ha="center", va="center", fontsize=6.5, color=colour)
    axis.set_yticks(range(len(blocks) + 1), [*blocks, ""])
    axis.set_xticks(range(len(columns)), columns)
    axis.axhline(len(blocks) - 0.5, color="#222222", linewidth=0.8)
    axis.grid(False)
