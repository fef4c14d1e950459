"""Questions about FIRE beyond the paper's experiments: sections of REPRODUCED.md and the pages with their tables."""

from __future__ import annotations

import re

import pandas as pd

from analysis import estimates, plot, sensitivity, theory
from analysis.runs import RESULTS, Results, at_largest_size, settings
from analysis.text import difference_text, markdown, mean_text, p_text, short

PAGES = "analysis/results/pages"
SETTINGS = {"settings_random_label": "random labels", "settings_warm_start": "warm start"}
MUON = {"settings_random_label": "random labels", "muon_fig3_60k": "language, loss"}
VIT = "ablation_targets_vit"
TARGETS = {
    "qk": "queries and keys (the paper's choice)",
    "mlp": "MLPs",
    "attention": "attention",
    "all": "all",
}
FAILURES = (
    "- **Reported failures, reproduced** ([notebook](analysis/notebooks/failures.ipynb)): under Frobenius normalisation, "
    "DfI falls slowly and does not diverge; five steps on a 768 x 768 matrix do little more than rescale it; replacing "
    "`.data` under FSDP2 has no effect; a zero matrix gives NaN; steps in bfloat16 stop near a DfI of 1e-3. The notebook "
    "shows a remedy for each."
)
ABOUT_SETTINGS = """Each row changes one setting of FIRE as published (10 iterations, Frobenius normalisation, official
scale, optimizer state cleared). `DfI` (of the stored weights) and `residual` (DfI of the orthogonal factor before
scaling) are sums over the matrices at the last boundary. `seconds` are those of one boundary. Differences are from FIRE
and paired by seed; p-values are corrected over the table. `min_norm=1e-3` skips no matrix here, so that run equals FIRE
itself."""
ABOUT_THEORY = """The theorems are about feed-forward networks without biases. Here the weights are those of an MLP
after eight tasks of random labels, before and after each method; its biases are left out, and the data are 512 images
of the last task. Theorem 2 assumes whitened inputs; its bound is computed with the largest eigenvalue of the inputs'
covariance, which whitening would make 1. Theorems 3 and 4 do not depend on the scale of a matrix, so their premise is
checked at the best scale. Theorem 4 is about layers with at most as many units as inputs. In Theorem 3, eigenvalues
above 1e-6 of the largest count as positive."""


def sections(results: Results, frame: pd.DataFrame) -> list[str]:
    """Return the blocks of REPRODUCED.md; questions without runs are left out."""
    found = [*_settings(frame), *_muon(frame), *_theory(), *_where(results), *_vit(frame), FAILURES]
    return ["## Settings, optimizer, layers, theory, reported failures\n", *found, ""]


def pages(results: Results, frame: pd.DataFrame) -> dict[str, str]:
    """Return {name: Markdown text} of the pages "settings" and "theory", as far as their results exist."""
    found = {}
    rows = settings_rows(frame)
    if len(rows):
        found["settings"] = (
            f"# Settings of FIRE\n\n{{back}}\n\n{ABOUT_SETTINGS}\n\n{markdown(settings_table(rows, frame))}\n"
        )
    layers, nets = _theory_frames()
    if len(layers):
        blocks = [
            "# The theorems, measured",
            "{back}",
            "![Theorems](../figures/theory.png)",
            theory.CAPTION,
            ABOUT_THEORY,
        ]
        blocks += [markdown(theory.table(layers)), "## How often DfI is below 1"]
        blocks += [
            "Target matrices of trained networks, all seeds.",
            markdown(theory.premise_table(nets, layers)),
        ]
        commits, machines = (sorted(set(layers[column].str[:20])) for column in ("commit", "hardware"))
        blocks += [f"Commit: {', '.join(name[:10] for name in commits)}; machine: {', '.join(machines)}."]
        found["theory"] = "\n\n".join(blocks) + "\n"
    return found


# ------------------------------------------------------------------------------------------------ settings
def settings_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the headline comparisons of the runs in SETTINGS with FIRE as published, corrected as one family."""
    rows = frame[frame["headline"] & frame["experiment"].isin(SETTINGS) & (frame["reference"] == "fire")]
    rows = rows[~rows["method"].isin(["muon", "fire_muon"])]
    return estimates.decide(rows) if len(rows) else rows


def settings_table(rows: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per experiment and setting: DfI, residual and seconds of the boundary, and accuracy at the end."""
    table = []
    for experiment, name in SETTINGS.items():
        part = frame[(frame["experiment"] == experiment) & ~frame["method"].isin(["muon", "fire_muon"])]
        ends = estimates.means(part[part["headline"]]).set_index("label")
        measured = estimates.means(part[part["kind"] == "boundary"])
        measured = measured.pivot_table(index="label", columns="metric", values="mean")
        gaps = rows[rows["experiment"] == experiment].set_index("label")
        for label in plot.ordered(ends.index):
            cells = measured.loc[label] if label in measured.index else pd.Series(dtype=float)
            row = {"experiment": name, "setting": plot.look(label).name}
            for column, title in (("dfi_after", "DfI"), ("dfi_factor", "residual"), ("seconds", "seconds")):
                row[title] = short(float(cells.get(column, float("nan"))))
            row |= {
                "end accuracy [95 %]": mean_text(ends.loc[label]),
                "minus FIRE [95 %]": "-",
                "p, corrected": "-",
            }
            if label in gaps.index:
                row |= {
                    "minus FIRE [95 %]": difference_text(gaps.loc[label]),
                    "p, corrected": p_text(gaps.loc[label, "p_holm"]),
                }
            table.append(row | {"seeds": ends.loc[label, "n"]})
    return pd.DataFrame(table)


def _settings(frame: pd.DataFrame) -> list[str]:
    rows = settings_rows(frame)
    if rows.empty:
        return []
    told = []
    for experiment, name in SETTINGS.items():
        part = rows[
            (rows["experiment"] == experiment) & (rows["method"] != "none") & (rows["difference"] != 0)
        ]
        if part.empty:
            continue
        words = [
            f"{word} than FIRE as published: {', '.join(_named(row) for row in found)}"
            for word in ("better", "worse")
            if (found := part[part["word"] == word].to_dict("records"))
        ]
        told.append(
            f"{name}: {'; '.join(words) or 'none can be told apart from FIRE as published'} (of {len(part)} settings)"
        )
    return [
        f"- **Settings** ([table]({PAGES}/settings.md): DfI, residual, time and end accuracy of each). "
        f"{'. '.join(text[0].upper() + text[1:] for text in told)}."
    ]


def _named(row: dict) -> str:
    changed = re.sub(r"-(?=\w+=)", " ", row["label"].removeprefix("fire-"))  # one space before each setting
    return f"`{changed}` {difference_text(row)}"


# ------------------------------------------------------------------------------------------------ Muon
def _muon(frame: pd.DataFrame) -> list[str]:
    """Return the item of REPRODUCED.md on whether FIRE adds anything to Muon."""
    rows = frame[frame["headline"] & frame["experiment"].isin(MUON) & (frame["label"] == "fire_muon")]
    rows = rows[rows["reference"].isin(["muon", "fire"])]
    if rows.empty:
        return []
    rows = estimates.decide(rows)
    told = []
    for experiment, name in MUON.items():
        part = rows[rows["experiment"] == experiment].set_index("reference")
        if len(part) == 2:
            texts = []
            for reference, title in (("muon", "Muon"), ("fire", "FIRE")):
                row = part.loc[reference]
                sure = "one seed" if row["pairs"] == 1 else f"p {p_text(row['p_holm'])}, {row['pairs']} seeds"
                texts.append(f"{difference_text(row)} against {title} alone ({sure})")
            told.append(f"[{name}]({PAGES}/{experiment}.md): {', '.join(texts)}")
    return [
        "- **Is FIRE redundant under Muon?** FIRE acts at the boundaries, and Muon trains between them. The numbers are the "
        f"two together minus one alone, at the end of training: {'; '.join(told)}."
    ]


# ------------------------------------------------------------------------------------------------ theory
def _theory_frames() -> tuple[pd.DataFrame, pd.DataFrame]:
    paths = [RESULTS / "theory.csv", RESULTS / "theory_premise.csv"]
    return tuple(pd.read_csv(path) if path.exists() else pd.DataFrame() for path in paths)  # type: ignore[return-value]


def _theory() -> list[str]:
    layers, nets = _theory_frames()
    if layers.empty:
        return []
    layers = layers.assign(theorem=layers["theorem"].astype(str))
    moved = layers[(layers["theorem"] == "1") & (layers["method"] != "none")]
    told = layers[layers["bound"].notna() & ~((layers["theorem"] == "1") & (layers["method"] == "none"))]
    hessian = layers[layers["theorem"] == "2"]
    mlp = layers[layers["theorem"] == "3"]
    shares = []
    for method, name in (
        ("none", "before FIRE"),
        ("fire", "after FIRE as published"),
        ("fire_exact", "after the exact projection"),
    ):
        part, other = mlp[mlp["method"] == method], nets[nets["method"] == method]
        below = int((part["dfi"] < 1).sum() + other["below_1"].sum())
        scaled = int((part["dfi_scaled"] < 1).sum() + other["below_1_scaled"].sum())
        total = len(part) + int(other["matrices"].sum())
        shares.append(f"{name} in {below} of {total} matrices ({scaled} if each matrix may be rescaled)")
    held, empty = (told["holds"].astype(str) == "True").sum(), (moved["bound"] >= 2).sum()
    return [
        f"- **Theory against measurement** ([figure and table]({PAGES}/theory.md)). The premise of Theorems 3 and 4, DfI < "
        f"1, holds {', '.join(shares)}. FIRE as published multiplies the orthogonal factor by a constant, which alone can "
        f"put DfI above 1. Of {len(told)} bounds that are defined, {held} hold. However, Theorem 1's bound says nothing "
        f"in {empty} of {len(moved)} layers, because it is above 2, which no shift exceeds. Theorem 2's bound is "
        f"{(hessian['bound'] / hessian['measured']).median():.2g} times the measured norm of the Hessian (median)."
    ]


# ------------------------------------------------------------------------------------------------ where
def _where(results: Results) -> list[str]:
    """Return the item on which layer of each network gains most, and which least, from FIRE."""
    told = []
    names = [name for name in results.runs["experiment"].unique() if name.startswith(sensitivity.PREFIXES)]
    for part in settings(results.select(experiment=names)):
        rows = sensitivity.differences(part)
        whole, rows = rows[rows["block"] == "all"], rows[rows["block"] != "all"]
        if rows.empty:
            continue
        together = "".join(
            f", all layers together {difference_text(row)}" for row in whole.to_dict("records")
        )
        better = rows["difference"] * rows["higher_is_better"].map({True: 1, False: -1})
        best, worst = (rows.loc[place].to_dict() for place in (better.idxmax(), better.idxmin()))
        size, seeds = part.first["size"], best["pairs"]
        decided = f"{(rows['word'] != '').sum()} of {len(rows)} differ from no treatment after correction"
        told.append(
            f"[{plot.title(part).splitlines()[0]}](analysis/results/figures/sensitivity-{size}.png), {size}, {seeds} "
            f"seed{'s' if seeds > 1 else ''}: best {_layer(best)}, worst {_layer(worst)}, "
            f"{decided if seeds > 1 else 'one seed allows no test'}{together}"
        )
    return (
        [f"- **Where?** FIRE on one layer at a time, minus no treatment: {'; '.join(told)}."] if told else []
    )


def _vit(frame: pd.DataFrame) -> list[str]:
    """Return the item on FIRE for single kinds of matrices of a ViT, each against no treatment."""
    rows = frame[frame["headline"] & (frame["experiment"] == VIT) & (frame["reference"] == "none")]
    if rows.empty:
        return []
    rows, told = at_largest_size(rows), []
    for row in estimates.decide(rows).to_dict("records"):
        word = f" ({row['word']})" if row["word"] else ""
        name = TARGETS.get(row["label"].removeprefix(sensitivity.PREFIX), row["label"])
        told.append(f"{name} {difference_text(row)}{word}")
    first = rows.iloc[0]
    data = f"{plot.data_name(first['data'])}, {first['size']}, {first['pairs']} seeds"
    return [
        f"- **Which matrices of a ViT?** FIRE on some of them, minus no treatment, in the [warm start]({PAGES}/{VIT}.md) "
        f"({data}): {', '.join(told)}."
    ]


def _layer(row: dict) -> str:
    return f"`{row['label'].removeprefix(sensitivity.PREFIX)}` {difference_text(row)}"
