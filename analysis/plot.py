"""Parts that the figures share: curves, marks, levels, boundaries, legend, and files with captions.

A band and an error bar have one meaning everywhere: the 95 % interval of the mean over the seeds, Student's t, as in
the tables. A dashed line is always a level, never a curve.
"""

import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib

if "ipykernel" not in sys.modules:  # a notebook shows figures through its own backend
    matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image, PngImagePlugin
from scipy import stats as scipy_stats

from analysis import claims
from analysis.measures import Values
from analysis.names import INTEREST as INTEREST
from analysis.names import METHODS, Look, look
from analysis.runs import Results
from analysis.stats import CONFIDENCE, estimate
from fire_core.files import write_atomic, written_aside

BAND = "Lines and marks are means over the seeds, bands and bars 95 % intervals."
PREMISE = "Grey text: the premise of the paper's claims is not met in a panel (docs/concepts/statistics.md)."
plt.style.use(Path(__file__).with_name("figures.mplstyle"))
plt.rcParams["figure.max_open_warning"] = 0
DASHED = (0, (4, 2))


def premise_text(part: Results) -> str:
    """Return what a panel says about the premise of the paper's claims, or "" where there is nothing to say."""
    holds, measured = claims.premise(part)
    if holds is not False or not part.first["figure"].startswith("fig4"):
        return "premise not met" if holds is False else ""
    told = "little learned" if measured.low > 1 else "learning not shown"
    return f"{told}: {measured.mean:.2f} × random (at least {measured.low:.2f})"


def pale(colour: str) -> tuple[float, ...]:
    return tuple(0.7 * part + 0.3 for part in to_rgb(colour))


def with_progress(rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return (rows with a column `x`, its unit): the epoch over all phases, if every row has one, else the step."""
    if rows["epoch"].isna().any():
        return rows.assign(x=rows["step"]), "step"
    offsets = rows.groupby("phase")["epoch"].max().sort_index().cumsum().shift(fill_value=0.0)
    return rows.assign(x=rows["epoch"] + rows["phase"].map(offsets)), "epoch"


def boundaries(rows: pd.DataFrame) -> list[float]:
    """Return the position of each boundary on `x`: the end of the phase before it."""
    return [float(x) for x in rows.groupby("phase")["x"].max().sort_index().iloc[:-1]]


def band(rows: pd.DataFrame) -> pd.DataFrame:
    """Return mean, low and high (the 95 % interval) and seeds for each `x`, from the rows of one label."""
    per_seed = rows.groupby(["seed", "x"], as_index=False)["value"].last()
    table = per_seed.groupby("x")["value"].agg(["mean", "sem", "count"]).reset_index()
    reach = table["sem"] * scipy_stats.t.ppf((1 + CONFIDENCE) / 2, (table["count"] - 1).clip(lower=1))
    low, high = table["mean"] - reach.fillna(0), table["mean"] + reach.fillna(0)
    return table[["x", "mean"]].assign(low=low, high=high, seeds=table["count"])


def draw_curves(
    axis: Axes, rows: pd.DataFrame, looks: Mapping[str, Look], interest: Sequence[str], bands: Sequence[str]
) -> pd.DataFrame:
    """Draw every label of `rows` (columns label, seed, x, value): those of interest thick, the others thin and paler,
    and those of `bands` with a band. Return what was drawn (columns x, mean, low, high, seeds, label)."""
    drawn = []
    for label in filter(set(rows["label"]).__contains__, looks):
        (name, colour, marker), table = looks[label], band(rows[rows["label"] == label])
        bright = {"color": colour, "linewidth": 1.5, "markersize": 4, "zorder": 4 + (label == "fire")}
        thin = {"color": pale(colour), "linewidth": 0.9, "markersize": 3, "zorder": 2}
        style = {"marker": marker, "markevery": None if len(table) <= 10 else [len(table) - 1], "label": name}
        axis.plot(table["x"], table["mean"], **style, **(bright if label in interest else thin))
        if label in bands and (table["seeds"] > 1).any():
            axis.fill_between(table["x"], table["low"], table["high"], color=colour, alpha=0.13, linewidth=0)
        drawn.append(table.assign(label=label))
    return pd.concat(drawn, ignore_index=True)


def draw_ends(axis: Axes, ends: Values, looks: Mapping[str, Look], last: float) -> list[float]:
    """Draw the values at the end of training of each label side by side to the right of x = `last`. Return the means."""
    means = []
    for place, label in enumerate(label for label in looks if label in ends):
        found, known, x = estimate(ends[label]), looks[label], last * (1.05 + 0.045 * place)
        if found.n > 1:
            axis.plot([x, x], [found.low, found.high], color=pale(known.colour), linewidth=1.0, zorder=2)
        axis.plot(x, found.mean, known.marker, color=known.colour, markersize=3.5, label=known.name, zorder=3)
        means.append(found.mean)
    return means


def draw_level(axis: Axes, value: float, method: str) -> None:
    known = look(method)
    axis.axhline(value, color=known.colour, linestyle=DASHED, linewidth=1.2, label=known.name, zorder=3)


def fit_limits(axis: Axes, drawn: pd.DataFrame, after: float, levels: Sequence[float] = ()) -> None:
    """Set the vertical limits to the levels and the part of the curves from x = `after` on. A dip right after a
    boundary would otherwise flatten the rest of the panel."""
    late = drawn[drawn["x"] >= after]
    low, high = (pick([*column, *levels]) for pick, column in ((min, late["low"]), (max, late["high"])))
    reach = 0.08 * (high - low) + 1e-4
    axis.set_ylim(low - reach, high + reach)


def draw_empty(axis: Axes, text: str) -> None:
    """Draw a panel of the paper that was not run as an empty frame with the text "not run"."""
    grey = {"color": "#8A8A8A"}
    axis.set_title(f"{text}\n", **grey)
    axis.text(0.5, 0.5, "not run", ha="center", va="center", fontsize=10, transform=axis.transAxes, **grey)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set(visible=True, color="#D8D8D8")


def panels(count: int, most: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels of this size in inches, in rows of at most `most`."""
    columns = min(most, count)
    rows = -(-count // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(width * columns + 0.3, height * rows), squeeze=False)
    for axis in grid.ravel()[count:]:
        axis.axis("off")
    return figure, list(grid.ravel()[:count])


def row_heading(axis: Axes, text: str, up: int = 27) -> None:
    """Write the heading of a row of panels above its first one, `up` points above the frame."""
    offset = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axis.annotate(text, (0, 1), (-30, up), weight="bold", fontsize=9.5, **offset)


def with_legend(figure: Figure, axes: Iterable[Axes], where: Axes | None = None, **layout: float) -> Figure:
    """Return the figure with each method once in its legend, in the order of METHODS, before all else: in place of the axes
    `where`, else below all panels. A method that is a curve in one panel and a level in another looks like the curve."""
    found: dict[str, Line2D] = {}
    for axis in axes:
        for handle, text in zip(*axis.get_legend_handles_labels()):
            if text not in found or found[text].get_marker() == "None":
                found[text] = handle
    names = [known.name for known in METHODS.values()]
    texts = sorted(found, key=lambda text: names.index(text) if text in names else len(names))
    handles = [found[text] for text in texts]
    if where is not None:
        where.axis("off")
        close = {"frameon": False, "columnspacing": 0.8, "handlelength": 1.4, "handletextpad": 0.6}
        close |= {"loc": "center left", "ncol": 1 if len(texts) < 10 else 2, "bbox_to_anchor": (-0.18, 0.5)}
        where.legend(handles, texts, **close).set_in_layout(False)
    elif texts:
        columns = max(1, min(len(texts), int(figure.get_figwidth() // 1.5)))
        below = {"loc": "upper center", "ncol": columns, "frameon": False, "bbox_to_anchor": (0.5, 0.0)}
        figure.legend(handles, texts, **below)
    figure.tight_layout(**layout)
    return figure


def provenance(runs: pd.DataFrame) -> str:
    """Return size, data, commits and machines of the drawn runs, and how many had uncommitted changes."""
    done, words = runs[runs["status"] == "done"].astype(str), []
    for column in ("size", "data", "commit", "trunk_commit", "machine"):
        cells = done[column].str.split(" ").explode() if "commit" in column else done[column]
        if values := sorted({*cells} - {""}):
            words.append(f"{column.replace('trunk_', 'shared first phase, ')}: {', '.join(values)}")
    changed = (done["dirty"] == "True").sum()
    return "; ".join(words) + (f"; {changed} of {len(done)} runs from a changed checkout" if changed else "")


def save(figure: Figure, stem: Path, formats: Sequence[str], caption: str, runs: list[Results]) -> list[Path]:
    """Write `stem`.png and so on with caption and provenance inside, but no dates, and `stem`.md; return the paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    source = provenance(pd.concat([part.runs for part in runs]))
    title, about = {"Title": stem.name}, f"{caption} {source}"
    told = {"svg": title | {"Description": about, "Date": None, "Creator": None}}
    told["pdf"] = title | {"Subject": about, "CreationDate": None, "Producer": None}
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in [*formats, "md"]]
    for ending, path in zip(formats, paths):
        with written_aside(path) as aside:  # which replaces a link and writes nothing through it
            figure.savefig(aside, format=ending, metadata=told.get(ending))
            if ending == "png":
                aside.write_bytes(small_png(aside.read_bytes(), title | {"Description": about}))
    plt.close(figure)
    write_atomic(paths[-1], f"{caption}\n\nRuns: {source}.\n")
    return paths


def small_png(picture: bytes, about: Mapping[str, str] | None = None) -> bytes:
    """Return a PNG with 256 colours, a third of the size of one with all, and texts about it in its metadata."""
    written, info = io.BytesIO(), PngImagePlugin.PngInfo()
    for key, text in (about or {}).items():
        info.add_text(key, text)
    few = {"method": Image.Quantize.MAXCOVERAGE, "kmeans": 2, "dither": Image.Dither.NONE}
    small = Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, **few)
    small.save(written, format="png", pnginfo=info, optimize=True)
    return written.getvalue()
