"""FIRE on one layer at a time, as a heat map of the gain over blocks and the layers inside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis import estimates, plot
from analysis.plot import Axes, Figure, plt
from analysis.rendering import number
from analysis.runs import Results
from fire_core.errors import UserError

PREFIXES = ("sensitivity_",)
PREFIX = "fire-targets="
CAPTION = (
    "FIRE on one layer at a time, minus no treatment, at the end of training (paired by seed, mean over the seeds); `all`: "
    "FIRE as published. Blue is better than no treatment; the colours end where 85 % of the layers lie. A star: the "
    "interval over the seeds excludes 0 (exploring seeds, not corrected)."
)


def differences(part: Results) -> pd.DataFrame:
    """Return one row per treated layer, with its block, its difference from `none` and its side (see `estimates.sides`).
    The row of block `all` is FIRE as published."""
    frame = estimates.frame(part)
    rows = frame[frame["headline"] & (frame["reference"] == "none")]
    rows = rows[rows["label"].str.startswith(PREFIX) | (rows["label"] == "fire")]
    rows = estimates.sides(rows)
    places = [place_of(label.removeprefix(PREFIX)) for label in rows["label"]]
    return rows.assign(block=[block for block, _ in places], layer=[layer for _, layer in places])


def place_of(layer: str) -> tuple[str, str]:
    """Return (block, layer inside the block): `layer1.0.conv1` is `conv1` of `layer1.0`, `h.0.mlp.c_fc` is `mlp.c_fc`
    of `h.0`. A name with fewer than three parts is in block `single`."""
    parts = layer.split(".")
    if layer == "fire":
        return "all", "all"
    return (".".join(parts[:2]), ".".join(parts[2:])) if len(parts) > 2 else ("single", layer)


def draw(parts: Sequence[Results]) -> Figure:
    """Return the figure, one heat map per network. Raises UserError if `none` was not run."""
    figure, grid = plt.subplots(1, len(parts), figsize=(5.4 * len(parts), 3.6), squeeze=False)
    for axis, part in zip(grid[0], parts):
        if differences(part).empty:
            raise UserError(f"{part.first['experiment']}: nothing to compare with; run method=none too")
        draw_map(axis, differences(part))
        axis.set_title(plot.title(part))
    figure.tight_layout()
    return figure


def draw_map(axis: Axes, rows: pd.DataFrame) -> None:
    """Draw one row per block and one column per layer inside it, with single layers and `all` in a last row."""
    single = rows["block"].isin(["single", "all"])
    inside, alone = rows[~single], list(rows["label"][single])
    columns, blocks = list(dict.fromkeys(inside["layer"])), sorted(inside["block"].unique())
    values, texts = np.full((len(blocks) + 1, max(len(columns), len(alone))), np.nan), {}
    for row in rows.to_dict("records"):
        if row["label"] in alone:
            place, name = (len(blocks), alone.index(row["label"])), f"{row['layer'].removeprefix('name__')}\n"
        else:
            place, name = (blocks.index(row["block"]), columns.index(row["layer"])), ""
        values[place] = row["difference"] if row["higher_is_better"] else -row["difference"]
        texts[place] = f"{name}{number(row['difference'], 3, sign=True)}{' *' if row['word'] else ''}"
    limit = float(
        np.nanquantile(np.abs(values), 0.85)
    )  # so that one layer, or all, does not drown the others
    image = axis.imshow(values, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    unit = rows["measure"].iloc[0].split(",")[0]
    axis.figure.colorbar(image, ax=axis, extend="both", label=f"gain over none in {unit}", pad=0.02)
    for (down, across), text in texts.items():
        colour = "white" if abs(values[down, across]) > 0.6 * limit else "#222222"
        axis.text(across, down, text, ha="center", va="center", fontsize=6.5, color=colour)
    axis.set_yticks(range(len(blocks) + 1), [*blocks, ""])
    axis.set_xticks(range(len(columns)), columns)
    axis.axhline(len(blocks) - 0.5, color="#222222", linewidth=0.8)
    axis.grid(False)
