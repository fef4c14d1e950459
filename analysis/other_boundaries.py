"""Boundaries other than the paper's: class-incremental training without old data, language with other texts or
longer windows, other decoders. Returns their numbers and tables, and draws the figure of dormant units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis import estimates, measures, plot
from analysis.plot import Axes, Figure, plt
from analysis.rendering import mean_text, render
from analysis.runs import Results
from analysis.tables import compared

REPLAY, VARIANTS = "replay_class_incremental", "language_variants"
LANGUAGE = {
    "language_domain": "new domain alone",
    "language_context": "windows of 512 after 128 tokens",
    "language_questions": "answers to questions",
}
CAPTION = (
    "Dormant units while a decoder is trained on the encyclopaedic corpus and, after the thin line, on the technical one "
    "with a tenth of the first: share of the units of all layers whose mean |activation| is at most 0.025 of the mean of "
    "their layer, as the next layer reads them. Lines are means over the seeds; the title names their number."
)
PREFIXES = (VARIANTS,)
DRAWN = {"squared_relu": ("squared ReLU", "#117733"), "swiglu": ("SwiGLU", "#AA3377")}


def told(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the numbers of the items of REPRODUCED.md; those of a question without runs are empty."""
    return {
        "old_data": old_data_told(frame),
        "second_phases": second_phases_told(frame),
        "decoders": decoders_told(frame),
    }


def pages(frame: pd.DataFrame) -> dict[str, str]:
    """Return {name: text} of the page; empty where nothing was run."""
    tables = {
        "old_data": old_data_table(frame),
        "second_phases": second_phases_table(frame),
        "decoders": decoders_table(frame),
    }
    if not any(map(len, tables.values())):
        return {}
    return {"other_boundaries": render("other_boundaries", **tables, caption=CAPTION)}


# ------------------------------------------------------------------------------------------------ old data gone
def _replay(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the results of the experiment with a column `share`, the share of old images that is kept."""
    rows = frame[(frame["experiment"] == REPLAY) & (frame["kind"] == "result")]
    return rows.assign(share=rows["label"].str.extract(r"replay=([\d.]+)")[0].astype(float))


def _replay_compared(frame: pd.DataFrame) -> pd.DataFrame:
    rows = _replay(frame)
    return estimates.sides(rows[rows["headline"] & (rows["reference"] == "none")])


def old_data_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per share of old data and method."""
    rows, table = _replay(frame), []
    gaps = _replay_compared(frame).set_index("label")
    for share, part in estimates.means(rows).groupby("share"):
        for method in plot.ordered(part["method"]):
            cells = part[part["method"] == method].set_index("metric")
            row = {"old images": f"{share:.0%}", "method": plot.look(method).name}
            for metric, title in (("test_accuracy", "all"), ("old_accuracy", "old"), ("new_accuracy", "new")):
                known = metric in cells.index
                row[f"{title} classes [95 %]"] = mean_text(cells.loc[metric]) if known else "-"
            row |= compared(gaps, cells["label"].iloc[0], "all, minus none [95 %]")
            table.append(row | {"seeds": cells["n"].iloc[0]})
    return pd.DataFrame(table)


def old_data_told(frame: pd.DataFrame) -> dict[str, Any]:
    """Return what each share of old data shows, and whether a full reset is nowhere better than `none`."""
    gaps, shares = _replay_compared(frame), []
    for share, part in gaps.groupby("share"):
        means = estimates.means(_replay(frame)).query("share == @share and metric == 'old_accuracy'")
        old = dict(zip(means["method"], means["mean"]))
        pair = [(name, old[name]) for name in ("fire", "none") if name in old]
        row = {"share": f"{share:.0%}", "rows": _in_order(part), "pair": pair}
        shares.append(row | {"nothing": max(old.values()) == 0})
    resets = gaps[gaps["method"] == "full_reset"]
    no_loss = len(resets) > 0 and not (resets["word"] == "better").any()
    return {"shares": shares, "no_loss": no_loss} if shares else {}


# ------------------------------------------------------------------------------------------------ language
def _language(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame[frame["experiment"].isin(LANGUAGE) & frame["headline"] & (frame["reference"] == "none")]
    return estimates.sides(rows)


def second_phases_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per second phase and method."""
    gaps, table = _language(frame), []
    for experiment, name in LANGUAGE.items():
        part = estimates.means(frame[(frame["experiment"] == experiment) & (frame["kind"] == "result")])
        decided = gaps[gaps["experiment"] == experiment].set_index("label")
        for label in plot.ordered(part["label"]):
            cells = part[part["label"] == label].set_index("metric")
            row = {"phase 2": name, "method": plot.look(label).name}
            for metric, title in (("val_loss_mix", "texts of phase 2"), ("val_loss_a", "old corpus")):
                after = cells.loc[f"{metric}_after", "mean"]
                row[f"{title} [95 %] (after the boundary)"] = f"{mean_text(cells.loc[metric])} ({after:.2f})"
            row |= compared(decided, label, "phase 2, minus none [95 %]")
            table.append(row | {"seeds": cells["n"].iloc[0]})
    return pd.DataFrame(table)


def second_phases_told(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the comparisons with `none` of each second phase."""
    parts = _language(frame).groupby("experiment")
    return [
        {"name": name, "rows": _in_order(parts.get_group(experiment))}
        for experiment, name in LANGUAGE.items()
        if experiment in parts.groups
    ]


def _decoders(frame: pd.DataFrame) -> pd.DataFrame:
    rows = estimates.means(frame[(frame["experiment"] == VARIANTS) & (frame["kind"] == "result")])
    names = rows["label"].str.replace("none-?(model[.])?", "", regex=True).str.replace("activation=", "")
    return rows.assign(net=names.where(names != "", "gelu"))


def decoders_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per decoder."""
    table = []
    for net, part in _decoders(frame).groupby("net"):
        cells = part.set_index("metric")
        row = {"decoder": net.replace("_", " ")}
        for metric, title in (("val_loss_mix", "loss, mixture"), ("dormant_share", "dormant share")):
            row[f"{title} [95 %]"] = mean_text(cells.loc[metric]) if metric in cells.index else "-"
        table.append(row | {"seeds": cells["n"].iloc[0]})
    return pd.DataFrame(table)


def decoders_told(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the dormant shares of the decoders that the figure shows."""
    rows = _decoders(frame)
    shares = rows[(rows["metric"] == "dormant_share") & rows["net"].isin(DRAWN)].set_index("net")
    if len(shares) < 2:
        return {}
    named = [(name, shares.loc[net]) for net, (name, _) in DRAWN.items()]
    return {"rows": named, "one_seed": shares["n"].max() == 1}


def _in_order(rows: pd.DataFrame) -> list[dict]:
    order = plot.ordered(rows["method"])
    return sorted(rows.to_dict("records"), key=lambda row: order.index(row["method"]))


# ------------------------------------------------------------------------------------------------ figure
def draw(parts: Sequence[Results], paper_curves: bool = False) -> Figure:
    """Return the figure: dormant share over training, squared ReLU against SwiGLU. The paper has no such figure, so
    `paper_curves` changes nothing."""
    figure, axis = plt.subplots(figsize=(4.6, 2.9))
    for part in parts:
        draw_panel(axis, part)
    figure.tight_layout()
    return figure


def draw_panel(axis: Axes, part: Results) -> None:
    """Draw the curves of one setting."""
    rows = measures.ordered_rows(part.metrics, "dormant_share").assign(x=lambda table: table["step"])
    for activation, (name, colour) in DRAWN.items():
        table = plot.band(rows[rows["label"].str.endswith(f"activation={activation}")])
        axis.plot(table["x"], table["mean"], color=colour, linewidth=1.5, label=name)
        axis.fill_between(table["x"], table["low"], table["high"], color=colour, alpha=0.11, linewidth=0)
    plot.draw_boundaries(axis, plot.boundaries(rows))
    axis.set_title(plot.title(part))
    axis.set_xlabel("iteration")
    axis.set_ylabel("dormant share")
    axis.legend(frameon=False)
