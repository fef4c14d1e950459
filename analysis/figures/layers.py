"""FIRE on one layer at a time, as a heat map of the gain over blocks and the layers inside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis import estimates, names
from analysis.plot import Axes, Figure, plt
from analysis.rendering import number
from analysis.runs import Results
from fire_core.errors import UserError

PREFIXES = ("sensitivity_",)
TARGETS = "method.targets"
CAPTION = (
    "Gain of FIRE on one layer at a time over no treatment, at the end of training (above 0 is better, for losses too; "
    "paired by seed, means over the seeds); `all`: FIRE as published. Grey: the 95 % interval includes 0 (exploratory, "
    "not corrected). One seed has no interval. The colours end where 85 % of the layers lie."
)


def differences(part: Results) -> pd.DataFrame:
    """Return one row per treated layer, with its block, its gain over `none` and its side (see `estimates.sides`).
    The row of block `all` is FIRE as published."""
    layers = {label: changed[TARGETS] for label, changed in part.overrides.items() if TARGETS in changed}
    frame = estimates.frame(part)
    rows = frame[frame["headline"] & (frame["reference"] == "none") & frame["label"].isin({*layers, "fire"})]
    rows = estimates.sides(rows)
    places = [place_of(layers.get(label, "all")) for label in rows["label"]]
    gain = rows["difference"] * rows["higher_is_better"].map({True: 1, False: -1})
    return rows.assign(block=[block for block, _ in places], layer=[layer for _, layer in places], gain=gain)


def place_of(layer: str) -> tuple[str, str]:
    """Return (block, layer inside the block): `layer1.0.conv1` is `conv1` of `layer1.0`, `h.0.mlp.c_fc` is `mlp.c_fc`
    of `h.0`. A name with fewer than three parts is in block `single`."""
    parts = layer.split(".")
    if len(parts) > 2:
        return ".".join(parts[:2]), ".".join(parts[2:])
    return "all" if layer == "all" else "single", layer.removeprefix("name:")


def draw(parts: Sequence[Results]) -> Figure:
    """Return the figure, one heat map per network. Raises UserError if `none` was not run."""
    figure, grid = plt.subplots(1, len(parts), figsize=(5.0 * len(parts), 3.6), squeeze=False)
    for axis, part in zip(grid[0], parts):
        if differences(part).empty:
            raise UserError(f"{part.first['experiment']}: nothing to compare with; run method=none too")
        draw_map(axis, differences(part))
        axis.set_title(names.title(part))
    figure.tight_layout()
    return figure


def draw_map(axis: Axes, rows: pd.DataFrame) -> None:
    """Draw one row per block and one column per layer inside it, with single layers and `all` in a last row."""
    single = rows["block"].isin(["single", "all"])
    inside, alone = rows[~single], list(rows["label"][single])
    columns, blocks = list(dict.fromkeys(inside["layer"])), sorted(inside["block"].unique())
    values, texts = np.full((len(blocks) + 1, max(len(columns), len(alone))), np.nan), {}
    unclear = np.zeros(values.shape, dtype=bool)
    for row in rows.to_dict("records"):
        place = len(blocks), alone.index(row["label"]) if row["label"] in alone else -1
        if place[1] < 0:
            place = blocks.index(row["block"]), columns.index(row["layer"])
        values[place], unclear[place] = row["gain"], row["pairs"] > 1 and not row["word"]
        texts[place] = f"{row['layer']}\n" * (row["label"] in alone) + number(row["gain"], 3, sign=True)
    limit = np.nanquantile(np.abs(values), 0.85)  # so that one layer, or all, does not drown the others
    axis.imshow(np.where(unclear, 1.0, np.nan), cmap="Greys", vmin=0, vmax=10, aspect="auto")
    shown = np.where(unclear, np.nan, values)
    image = axis.imshow(shown, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    unit = rows["measure"].iloc[0].split(",")[0]
    axis.figure.colorbar(image, ax=axis, extend="both", label=f"gain over none in {unit}", pad=0.02)
    for place, text in texts.items():
        white = not unclear[place] and abs(values[place]) > 0.6 * limit
        colour = "white" if white else "#8A8A8A" if unclear[place] else "#222222"
        axis.text(place[1], place[0], text, ha="center", va="center", fontsize=6.5, color=colour)
    axis.set_yticks(range(len(blocks) + 1), [*blocks, ""])
    axis.set_xticks(range(len(columns)), columns)
    axis.axhline(len(blocks) - 0.5, color="#222222", linewidth=0.8)
    axis.grid(False)
