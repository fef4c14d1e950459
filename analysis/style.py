"""One colour, marker and name per method, the same in every figure; a method that is not listed gets a
stable look from its name. Colours: Okabe and Ito's palette and Tol's muted one; the marker repeats what the
colour says."""

from __future__ import annotations

import hashlib
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

if "ipykernel" not in sys.modules:  # a notebook shows figures through its own backend
    matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

CHARACTERS_PER_INCH = 18  # of the footnote
FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Look:
    name: str
    colour: str
    marker: str
    dash: str = "-"


METHODS = {
    "fire": Look("FIRE", "#D55E00", "o"),
    "none": Look("none (continue)", "#000000", "s"),
    "full_reset": Look("full reset", "#7F7F7F", "D"),
    "shrink_perturb": Look("shrink & perturb", "#0072B2", "^"),
    "dash": Look("DASH", "#009E73", "v"),
    "parseval": Look("Parseval", "#CC79A7", "P"),
    "cbp": Look("CBP", "#E69F00", "X"),
    "redo": Look("ReDo", "#56B4E9", "<"),
    "l2_init": Look("L2 init", "#882255", ">"),
    "snr": Look("SNR", "#999933", "p"),
    "muon": Look("Muon", "#332288", "h"),
    "plasticity_injection": Look("plasticity injection", "#117733", "d"),
    "fire_exact": Look("FIRE exact", "#A63603", "*", "--"),
    "rescale": Look("rescale (control)", "#AA4499", "8", "--"),
    "random_orthogonal": Look("random orthogonal (control)", "#44AA99", "H", "--"),
    "interpolate": Look("interpolate", "#FDAE6B", "o", "--"),
    "fire_all": Look("FIRE all layers", "#F0803C", "s", "--"),
    "fire_no_head": Look("FIRE without head", "#E6A57E", "^", "--"),
    "fire_attention": Look("FIRE attention only", "#8C510A", "v", "--"),
    "random_actions": Look("random actions", "#9A9A9A", "_", "--"),  # a level, no method
}
FALLBACK_COLOURS = [
    "#6699CC", "#994455", "#997700", "#004488", "#EE99AA",
    "#EECC66", "#225522", "#663333", "#77AADD", "#AAAA00",
]  # fmt: skip
FALLBACK_MARKERS = [(5, 0, 36), (6, 1, 0), (4, 1, 45), "$\\bigstar$", "|", "_", "1", "2", "3", "4"]
VARIANT_DASHES = [(0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1))]

plt.rcParams.update(
    {
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.labelsize": 9,
        "legend.fontsize": 8,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#E4E4E4",
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "lines.linewidth": 1.4,
        "lines.markersize": 4.5,
        "figure.dpi": 110,
        "savefig.dpi": 150,
        "savefig.bbox": "tight",
        "svg.hashsalt": "fire",
        "figure.max_open_warning": 0,
    }
)


def split_label(label: str) -> tuple[str, str]:
    """`fire-iterations=20` -> ("fire", "iterations=20")."""
    method, _, overrides = label.partition("-")
    return method, overrides


def look(label: str) -> Look:
    """The look of a run label: the method's own colour and marker; overrides change the line, not the
    colour."""
    method, overrides = split_label(label)
    base = METHODS.get(method)
    if base is None:
        number = _number(method)
        colour = FALLBACK_COLOURS[number % len(FALLBACK_COLOURS)]
        marker = FALLBACK_MARKERS[number // len(FALLBACK_COLOURS) % len(FALLBACK_MARKERS)]
        base = Look(method.replace("_", " "), colour, marker, "-.")
    if not overrides:
        return base
    dash = VARIANT_DASHES[_number(overrides) % len(VARIANT_DASHES)]
    return Look(f"{base.name} [{overrides}]", base.colour, base.marker, dash)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def ordered(labels: Iterable[str]) -> list[str]:
    """FIRE first, then the listed order, then unknown methods by name; overrides after their method."""
    known = list(METHODS)

    def rank(label: str) -> tuple[int, str, str]:
        method, overrides = split_label(label)
        return (known.index(method) if method in known else len(known), method, overrides)

    return sorted(set(labels), key=rank)


def grid(
    panels: int, width: float = 3.5, height: float = 2.75, columns: int = 3
) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` axes, at most `columns` a row; surplus axes are removed."""
    columns = min(columns, panels)
    rows = -(-panels // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    flat = list(axes.ravel())
    for axis in flat[panels:]:
        axis.remove()
    for axis in flat[:panels]:
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    return figure, flat[:panels]


def shared_legend(figure: Figure, axes: Iterable[Axes], columns: int = 4) -> float:
    """One legend below all panels, in the order of `ordered`, each label once; returns the bottom it needs
    in inches."""
    found: dict[str, object] = {}
    for axis in axes:
        for handle, text in zip(*axis.get_legend_handles_labels()):
            found.setdefault(text, handle)
    if not found:
        return 0.0
    names = [known.name for known in METHODS.values()]
    found = dict(
        sorted(found.items(), key=lambda pair: names.index(pair[0]) if pair[0] in names else len(names))
    )
    columns = max(1, min(columns, int(figure.get_figwidth() // 1.9), len(found)))
    columns = -(-len(found) // -(-len(found) // columns))  # rows of equal length
    figure.legend(
        list(found.values()),
        list(found),
        loc="upper center",
        ncol=columns,
        frameon=False,
        bbox_to_anchor=(0.5, 0.0),
    )
    return 0.17 * -(-len(found) // columns)


def footnote(figure: Figure, text: str, below: float = 0.0) -> None:
    """Small grey text under the figure: what data, size, seeds and commits it shows. `below`: inches already taken."""
    wide = int(figure.get_figwidth() * CHARACTERS_PER_INCH)
    wrapped = "\n".join(part for line in text.splitlines() for part in textwrap.wrap(line, wide))
    place = -(below + 0.08) / figure.get_figheight()
    figure.text(0.01, place, wrapped, fontsize=7, color="#555555", va="top", linespacing=1.4)


def save(figure: Figure, stem: Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """Write `stem`.png and so on without dates or versions inside, so the same data gives the same bytes."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    emptied = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    }
    paths = []
    for ending in formats:
        path = stem.with_name(f"{stem.name}.{ending}")
        figure.savefig(path, metadata=emptied.get(ending))
        paths.append(path)
    plt.close(figure)
    return paths
