"""Figure 5: accuracy against Newton-Schulz iterations (a); curvature, DfI and SFE right after the reset (b)."""

from collections.abc import Sequence

import pandas as pd

from analysis import estimates, names, paper, plot
from analysis.measures import CURVATURE, OLD_CURVATURE
from analysis.plot import Axes, Figure, plt
from analysis.runs import Results

INSTEAD = {"fig2a_cifar10_resnet18": "ablation_iterations"}  # where the panel's own experiments have no scan
ITERATIONS = 10  # of `fire` without overrides in the vision experiments
BARS = {
    CURVATURE.metric: "Hessian eigenvalue, data to come",
    OLD_CURVATURE.metric: "Hessian eigenvalue, images seen before",
    "common_dfi_after": "DfI of the stored weights",
    "common_sfe_share": "SFE / SFE of a full reset",
}
SHOWN = ("fire", "fire_exact", "shrink_perturb", "dash", "none", "full_reset")


def draw(parts: Sequence[Results], interest: Sequence[str] = SHOWN) -> Figure:
    """Return the figure: the panels of (a) that were run above those of (b). Panel (a) of a data set and network shows the
    first experiment that has FIRE with more than one number of iterations."""
    frame, scans = pd.concat(map(estimates.frame, parts), ignore_index=True), []
    known = {part.first["experiment"]: part for part in parts}
    for panel in (name for name in paper.panels() if name.startswith("fig2a")):
        found = [known.get(name) for name in (panel.replace("fig2a", "fig5a"), panel, INSTEAD.get(panel))]
        found = [part for part in found if part and len(iterations(frame, part)) > 1][:1]
        scans += [(part, known.get(panel, part)) for part in found]
    seeds_of = hessians(frame).groupby("experiment")["n"].max()
    shown = known[max(known, key=lambda name: (seeds_of.get(name, 0), len(bars(frame, known[name]))))]
    table = bars(frame, shown)
    metrics = [metric for metric in BARS if metric in set(table["metric"])]
    columns, count = max(1, len(scans), len(metrics)), max(1, bool(scans) + bool(metrics))
    figure, grid = plt.subplots(count, columns, figsize=(3.1 * columns + 0.2, 2.8 * count), squeeze=False)
    for axis in [*grid[0, len(scans or metrics) :], *grid[-1, len(metrics or scans) :]]:
        axis.set_visible(False)
    for axis, (part, others) in zip(grid[0], scans):
        draw_iterations(axis, part, frame, others)
    for axis, metric in zip(grid[-1], metrics):
        part = table[(table["metric"] == metric) & table["label"].isin(interest) & (table["mean"] > 0)]
        draw_bars(axis, part)
        seeds = names.seeds_text(part["n"])
        axis.set_title(f"{BARS[metric]}\n{names.title(shown).splitlines()[0]}\n{seeds}")
    if scans:
        plot.row_heading(grid[0, 0], "a  Number of iterations")
    if metrics:
        plot.row_heading(grid[-1, 0], "b  Right after the reset", up=38)
    return plot.with_legend(figure, grid[0], h_pad=1.6)


def bars(frame: pd.DataFrame, part: Results) -> pd.DataFrame:
    """Return what panel (b) shows of one setting. The weights that `none` trains on are those that FIRE finds."""
    rows = estimates.means(estimates.of(frame, part))
    found = rows[rows["metric"].isin(BARS) & rows["label"].isin(SHOWN)]
    before = rows[(rows["metric"] == "common_dfi_before") & (rows["label"] == "fire")]
    untreated = before.assign(metric="common_dfi_after", label="none", method="none")
    return pd.concat([found, untreated]) if "none" in set(rows["label"]) else found


def hessians(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the largest Hessian eigenvalue right after the reset, one row per setting and measure, of FIRE and S&P."""
    rows = frame[frame["metric"].isin([CURVATURE.metric, OLD_CURVATURE.metric]) & frame["figure"].eq("fig2a")]
    rows = estimates.means(rows[rows["label"].isin(["fire", "shrink_perturb"])])
    setting = ["experiment", "size", "metric"]
    wide = rows.pivot(index=setting, columns="label", values="mean")
    wide = wide.reindex(columns=["fire", "shrink_perturb"]).dropna()
    return wide.join(rows.groupby(setting)["n"].min()).reset_index()


def iterations(frame: pd.DataFrame, part: Results) -> pd.DataFrame:
    """Return the headline estimates of `fire`, one row per number of iterations, in ascending order."""
    scan = {label: c for label, c in part.overrides.items() if set(c) <= {"method.iterations"}}
    numbers = {label: int(changed.get("method.iterations", ITERATIONS)) for label, changed in scan.items()}
    rows = estimates.means(estimates.of(frame, part)).query("headline and method == 'fire'")
    rows = rows.assign(iterations=rows["label"].map(numbers)).dropna(subset="iterations")
    return rows.drop_duplicates("iterations").sort_values("iterations")


def draw_iterations(axis: Axes, part: Results, frame: pd.DataFrame, others: Results) -> None:
    """Draw accuracy against iterations for `part`, with other methods as levels, if need be from `others`."""
    table, look = iterations(frame, part), names.look("fire")
    x, style = table["iterations"], {"color": look.colour, "marker": look.marker, "markersize": 4}
    axis.plot(x, table["mean"], label=look.name, **style)
    axis.fill_between(x, table["low"], table["high"], color=look.colour, alpha=0.13, linewidth=0)
    shown = estimates.of(frame, part if "none" in set(part.runs["label"]) else others)
    levels = estimates.means(shown).query("headline").set_index("label")["mean"]
    for label in ("none", "full_reset", "fire_exact"):
        if label in levels:
            plot.draw_level(axis, levels[label], label)
    axis.set_xscale("log")
    axis.set_xticks(x, [f"{number:.0f}" for number in x])
    axis.minorticks_off()
    axis.set_title(names.title(part))
    axis.set(xlabel="Newton-Schulz iterations", ylabel=table["measure"].iloc[0].split(",")[0])


def draw_bars(axis: Axes, rows: pd.DataFrame) -> None:
    """Draw one bar per method with its value above. The axis is logarithmic where the means span more than a factor of
    20; an interval that reaches 0 ends at a tenth of the mean there."""
    rows = rows.set_index("label").loc[names.ordered(rows["label"])]
    looks, mean = [names.look(label) for label in rows.index], rows["mean"]
    wide = mean.max() / mean.min() > 20
    low, high = rows["low"].fillna(mean).clip(lower=mean / 10 if wide else 0), rows["high"].fillna(mean)
    axis.bar(range(len(rows)), mean, color=[look.colour for look in looks], width=0.65)
    reach = [mean - low, high - mean]
    axis.errorbar(range(len(rows)), mean, reach, fmt="none", ecolor="#222222", elinewidth=1)
    for place, (value, top) in enumerate(zip(mean, high)):
        above = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
        axis.annotate(above, (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=6.5)
    axis.set_xticks(range(len(looks)), [look.name for look in looks], rotation=30, ha="right")
    axis.grid(False, axis="x")
    axis.set_yscale("log" if wide else "linear")
    axis.set_ylim(low.min() / 3 if wide else 0, high.max() * (4 if wide else 1.15))
