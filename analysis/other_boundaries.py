"""Boundaries other than the paper's: class-incremental training without old data, language with other texts or
longer windows, other decoders. Returns their section of REPRODUCED.md and their page, and draws the figure of
dormant units."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis import estimates, measures, plot
from analysis.plot import Axes, Figure, plt
from analysis.runs import Results
from analysis.text import difference_text, markdown, mean_text, p_text

PAGE = "analysis/results/pages/other_boundaries.md"
REPLAY, VARIANTS = "replay_class_incremental", "language_variants"
LANGUAGE = {
    "language_domain": "new domain alone",
    "language_context": "windows of 512 after 128 tokens",
    "language_questions": "answers to questions",
}
OLD_DATA = """In this class-incremental training, only a share of the images of each earlier class is kept. The table shows
accuracy at the end over all classes, over those of earlier phases and over those of the last phase. Differences are from
`none` with the same share of old data, paired by seed; p-values are corrected over all of them. The paper keeps all old
images; CPR (arXiv 2607.24996) finds FIRE the worst of eight methods without old data, in reinforcement learning of a
language model."""
BOUNDARIES = """Phase 1 is pretraining on the encyclopaedic corpus. Phase 2 is one of three: the technical corpus
without any text of the first; windows of 512 tokens instead of 128, with a tenth of old text; or questions made from
encyclopaedic entries (What does "name" mean?), where only the tokens of the answers count. The table shows the losses at
the end in nats per token, on the texts of phase 2 and on the old corpus, with the loss right after the boundary in brackets.
Differences are from `none`, paired by seed; p-values are corrected over all of them."""
NETS = """Validation loss and dormant share at the end of training. No method acts on these decoders at the boundary."""
CAPTION = (
    "Dormant units while a decoder is trained on the encyclopaedic corpus and, after the thin line, on the technical one "
    "with a tenth of the first: share of the units of all layers whose mean |activation| is at most 0.025 of the mean of "
    f"their layer, as the next layer reads them. {plot.BAND}"
)
PREFIXES = (VARIANTS,)
DRAWN = {"squared_relu": ("squared ReLU", "#D55E00"), "swiglu": ("SwiGLU", "#0072B2")}


def sections(frame: pd.DataFrame) -> list[str]:
    """Return the section of REPRODUCED.md, or an empty list where nothing was run."""
    told = [*_old_data_told(frame), *_boundaries_told(frame), *_nets_told(frame)]
    return [f"## Other boundaries\n\nTables: [other boundaries]({PAGE}).\n", *told, ""] if told else []


def page(frame: pd.DataFrame) -> str:
    """Return the text of the page without its title; empty where nothing was run."""
    blocks = []
    for title, legend, table in (
        ("Old data gone", OLD_DATA, old_data_table(frame)),
        ("Language: other second phases", BOUNDARIES, boundaries_table(frame)),
        ("Language: other decoders", NETS, nets_table(frame)),
    ):
        if len(table):
            blocks += [f"## {title}", legend, markdown(table)]
    if len(nets_table(frame)):
        blocks += ["![Dormant units](../figures/dormancy-small.png)", CAPTION]
    return "\n\n".join(blocks)


# ------------------------------------------------------------------------------------------------ old data gone
def _replay(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the results of the experiment with a column `share`, the share of old images that is kept."""
    rows = frame[(frame["experiment"] == REPLAY) & (frame["kind"] == "result")]
    return rows.assign(share=rows["label"].str.extract(r"replay=([\d.]+)")[0].astype(float))


def _replay_compared(frame: pd.DataFrame) -> pd.DataFrame:
    rows = _replay(frame)
    return estimates.decide(rows[rows["headline"] & (rows["reference"] == "none")])


def old_data_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per share of old data and method."""
    rows, table = _replay(frame), []
    gaps = _replay_compared(frame).set_index("label")
    for share, part in estimates.means(rows).groupby("share"):
        for method in plot.ordered(part["method"]):
            cells = part[part["method"] == method].set_index("metric")
            label = cells["label"].iloc[0]
            row = {"old images": f"{share:.0%}", "method": plot.look(method).name}
            for metric, title in (("test_accuracy", "all"), ("old_accuracy", "old"), ("new_accuracy", "new")):
                row[f"{title} classes [95 %]"] = (
                    mean_text(cells.loc[metric]) if metric in cells.index else "-"
                )
            row |= {"all, minus none [95 %]": "-", "p, corrected": "-", "seeds": cells["n"].iloc[0]}
            if label in gaps.index:
                row["all, minus none [95 %]"] = difference_text(gaps.loc[label])
                row["p, corrected"] = p_text(gaps.loc[label, "p_holm"])
            table.append(row)
    return pd.DataFrame(table)


def _old_data_told(frame: pd.DataFrame) -> list[str]:
    """Return the item that says what each share of old data shows."""
    gaps, told = _replay_compared(frame), []
    for share, part in gaps.groupby("share"):
        means = estimates.means(_replay(frame)).query("share == @share and metric == 'old_accuracy'")
        old = {row["method"]: row["mean"] for row in means.to_dict("records")}
        pair = ", ".join(
            f"{plot.look(name).name} {old[name]:.3f}" for name in ("fire", "none") if name in old
        )
        if max(old.values()) == 0:
            pair = "0 under every method, so accuracy over all classes cannot exceed the share of new classes"
        words = ", ".join(_named(row) for row in _in_order(part))
        told.append(f"{share:.0%} of the old images kept: {words}; old classes alone: {pair}")
    resets = gaps[gaps["method"] == "full_reset"]
    if len(resets) and not (resets["word"] == "better").any():
        told.append("A full reset is nowhere better than `none`, so these runs show no loss of plasticity")
    return (
        [
            f"- **Old data gone.** The numbers are accuracy over all classes minus that of `none`. {'. '.join(told)}."
        ]
        if told
        else []
    )


# ------------------------------------------------------------------------------------------------ language
def _language(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame[frame["experiment"].isin(LANGUAGE) & frame["headline"] & (frame["reference"] == "none")]
    return estimates.decide(rows)


def boundaries_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per second phase and method."""
    gaps, table = _language(frame), []
    for experiment, name in LANGUAGE.items():
        part = estimates.means(frame[(frame["experiment"] == experiment) & (frame["kind"] == "result")])
        compared = gaps[gaps["experiment"] == experiment].set_index("label")
        for label in plot.ordered(part["label"]):
            cells = part[part["label"] == label].set_index("metric")
            row = {"phase 2": name, "method": plot.look(label).name}
            for metric, title in (("val_loss_mix", "texts of phase 2"), ("val_loss_a", "old corpus")):
                row[f"{title} [95 %] (after the boundary)"] = (
                    f"{mean_text(cells.loc[metric])} ({cells.loc[f'{metric}_after', 'mean']:.2f})"
                )
            row |= {"phase 2, minus none [95 %]": "-", "p, corrected": "-", "seeds": cells["n"].iloc[0]}
            if label in compared.index:
                row["phase 2, minus none [95 %]"] = difference_text(compared.loc[label])
                row["p, corrected"] = p_text(compared.loc[label, "p_holm"])
            table.append(row)
    return pd.DataFrame(table)


def _boundaries_told(frame: pd.DataFrame) -> list[str]:
    gaps, told = _language(frame), []
    for experiment, name in LANGUAGE.items():
        part = gaps[gaps["experiment"] == experiment]
        if len(part):
            told.append(f"{name}: {', '.join(_named(row) for row in _in_order(part))}")
    return (
        [f"- **Language, other second phases**, loss minus `none` (negative is better): {'; '.join(told)}."]
        if told
        else []
    )


def _nets(frame: pd.DataFrame) -> pd.DataFrame:
    rows = estimates.means(frame[(frame["experiment"] == VARIANTS) & (frame["kind"] == "result")])
    names = rows["label"].str.replace("none-?(model[.])?", "", regex=True).str.replace("activation=", "")
    return rows.assign(net=names.where(names != "", "gelu"))


def nets_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per decoder."""
    table = []
    for net, part in _nets(frame).groupby("net"):
        cells = part.set_index("metric")
        row = {"decoder": net.replace("_", " ")}
        for metric, title in (("val_loss_mix", "loss, mixture"), ("dormant_share", "dormant share")):
            row[f"{title} [95 %]"] = mean_text(cells.loc[metric]) if metric in cells.index else "-"
        table.append(row | {"seeds": cells["n"].iloc[0]})
    return pd.DataFrame(table)


def _nets_told(frame: pd.DataFrame) -> list[str]:
    rows = _nets(frame)
    shares = rows[(rows["metric"] == "dormant_share") & rows["net"].isin(DRAWN)].set_index("net")
    if len(shares) < 2:
        return []
    text = ", ".join(f"{DRAWN[net][0]} {mean_text(shares.loc[net], 3)}" for net in DRAWN)
    few = " (one seed, no interval)" if shares["n"].max() == 1 else ""
    return [f"- **Dormant units of a decoder** at the end of training: {text}{few}."]


def _in_order(rows: pd.DataFrame) -> list[dict]:
    order = plot.ordered(rows["method"])
    return sorted(rows.to_dict("records"), key=lambda row: order.index(row["method"]))


def _named(row: dict) -> str:
    """Return for example `FIRE -0.1 [-0.2, 0.0] (worse)`, without the word where the corrected test does not decide."""
    word = f" ({row['word']})" if row["word"] else ""
    return f"{plot.look(row['method']).name} {difference_text(row, 3)}{word}"


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
