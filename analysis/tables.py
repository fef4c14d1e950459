"""Every table of runs, built from the frames of estimates and verdicts; `write_all` writes them as Markdown, CSV and
LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import claims, estimates, names, paper
from analysis.measures import digits
from analysis.rendering import difference_text, markdown, mean_text, number, p_text, short, spread
from analysis.runs import SIZES, Results, settings
from fire_core.files import write_atomic

KINDS = ("claims", "controls", "rivals")  # of comparisons


# ------------------------------------------------------------------------------------------------ runs
def status_matrix(results: Results) -> pd.DataFrame:
    """Return the methods, seeds and data that are finished: one row per panel of the paper, one column per size."""
    done, rows = results.finished, []
    for figure, panel in paper.cells():
        runs = done[done["experiment"] == f"{figure}_{panel}"]
        row = {size: _count(runs[runs["size"] == size]) for size in SIZES[:-1]}
        rows.append({"panel": names.panel(figure, panel)} | row)
    return pd.DataFrame(rows)


def _count(runs: pd.DataFrame) -> str:
    if runs.empty:
        return "not run"
    own = runs[runs["label"] == runs["method"]]
    seeds = (own if len(own) else runs).groupby("label")["seed"].nunique()
    most = f"{seeds.max()}" if seeds.nunique() == 1 else f"{seeds.min()}-{seeds.max()}"
    return f"{len(seeds)} methods x {most} seeds, {names.data(runs['data'].iloc[0])}"


# ------------------------------------------------------------------------------------------------ verdicts
def comparisons_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of `claims.verdicts` as text: the exploring estimate, that of the confirming seeds, and the verdict."""
    table = []
    for row in rows.to_dict("records"):
        decimals = row["decimals"]
        gap = paper.gain(row["figure"], row["panel"], row["better"], row["worse"])
        # where no comparison was planned and none of seeds 1 to 5 ran, those from 6 on explore
        fresh = " from 6 on" if not row["planned"] and min(row["exploring_gains"], default=0) > 5 else ""
        early = (row[f"exploring_{name}"] for name in ("gain", "low", "high"))
        explored = spread(*early, decimals, sign=True)
        told = {
            "panel": names.panel(row["figure"], row["panel"]),
            "size": row["size"],
            "comparison": claim_text(row),
            "paper's gain": number(gap, decimals, sign=True),
            "exploratory: gain [95 %] (seeds)": f"{explored} ({row['exploring_seeds']}{fresh})",
            "confirmatory: gain [95 %]": spread(row["gain"], row["low"], row["high"], decimals, sign=True),
            "done": f"{row['seeds']} of {row['planned']}" if row["planned"] else "not planned",
            "p, Holm": p_text(row["p_holm"]),
            "verdict": row["verdict"] + (f" ({row['note']})" if row["note"] else ""),
        }
        table.append(told)
    return pd.DataFrame(table)


def claim_text(claim: Mapping[str, Any]) -> str:
    """Return for example `FIRE > full reset`."""
    return f"{names.look(claim['better']).name} > {names.look(claim['worse']).name}"


def premises_table(parts: Sequence[Results]) -> pd.DataFrame:
    """Return what the rule asks in each panel of Figures 2 and 4: full reset minus none, or the return before the reset
    divided by that of random actions, on seeds 1 to 5 and on all seeds before the second round."""
    table, said = [], {True: "met", False: "not met", None: "-"}
    for part in parts:
        figure, panel = part.first[["figure", "panel"]]
        first, last = claims.premise(part, rounds=1), claims.premise(part)
        second = first.measured and last.measured.n > first.measured.n
        everything = last if second else claims.premise(part, "all")
        if first.measured is None or (figure, panel) not in paper.cells():
            continue
        row = {"panel": names.panel(figure, panel), "size": part.first["size"], "round": 2 if second else 1}
        for seeds, found in (("seeds 1 to 5", first), ("all seeds before round 2", everything)):
            level = figure.startswith("fig2")
            row[seeds] = f"{spread(*found.measured[:3], 4 if level else 2, sign=level)} ({found.measured.n})"
            row[f"{seeds}: premise"] = said[found.holds]
        table.append(row)
    return pd.DataFrame(table)


def counts_table(counts: Mapping[str, Mapping[str, int]]) -> pd.DataFrame:
    """Return one row per set of seeds with the counts of `claims.counts`."""
    titles = {"all": "comparisons whose premise is met", "not planned": "no seeds planned"}
    titles["suite_wide"] = "hold, suite-wide correction"
    rows = [{"seeds": seeds} | row for seeds, row in counts.items()]
    return pd.DataFrame(rows).rename(columns=titles)


def pooled_table(pooled: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of `claims.pooled` as text, with the number of the paper's panels in which its FIRE ends ahead."""
    table = []
    for seeds, rows in pooled.items():
        for row in rows.to_dict("records"):
            theirs = [paper.gain(*cell, "fire", row["rival"]) for cell in paper.cells()]
            known = [gap for gap in theirs if gap == gap]
            told = {
                "FIRE against": names.look(row["rival"]).name,
                "seeds": seeds,
                "panels": row["panels"],
                "FIRE ahead": row["ahead"],
                "standardised gain [95 %]": spread(row["mean"], row["low"], row["high"], 2, sign=True),
                "I²": "-" if pd.isna(row["i2"]) else f"{row['i2']:.0%}",
                "p, Holm": p_text(row["p_holm"]),
                "in the paper, all panels": f"{sum(gap > 0 for gap in known)} of {len(known)}",
            }
            table.append(told)
    return pd.DataFrame(table)


# ------------------------------------------------------------------------------------------------ one setting
def compared(gaps: pd.DataFrame, label: Any, title: str, decimals: int | None = None) -> dict[str, str]:
    """Return the cell `title` of one label: a difference with its interval, from the comparisons `gaps`, which are
    indexed by label; "-" where there is none."""
    return {title: difference_text(gaps.loc[label], decimals) if label in gaps.index else "-"}


def end_table(part: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return one row per method of one setting and measure, over all seeds: mean and difference from `none` with their
    intervals and, at size paper, the paper's end value."""
    rows = part[part["metric"] == measure]
    gaps = rows[rows["reference"] == "none"].set_index("label")
    about = rows.iloc[0]
    shown = about["headline"] and about["size"] == "paper"
    theirs = paper.end_values(about["figure"], about["panel"]) if shown else {}
    decimals, table = digits(measure, rows["mean"]), []
    for _, mean in estimates.means(rows).iterrows():
        row = {
            "method": mean["name"],
            "all seeds: mean [95 %]": mean_text(mean, decimals),
            "seeds": mean["n"],
        }
        row |= compared(gaps, mean["label"], "all seeds: minus none [95 %]", decimals)
        table.append(row | ({"paper": number(theirs.get(mean["label"]), decimals)} if theirs else {}))
    return pd.DataFrame(table)


def wide_table(part: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Return the means of all measures of a kind, as "boundary", one row per method."""
    rows = estimates.means(part[part["kind"] == kind])
    changed = rows.loc[(rows["metric"] == "matrices") & (rows["mean"] > 0), "mean"]
    if changed.nunique() < 2:  # all change the same ones
        rows = rows[~rows["metric"].str.startswith("common_")]
    if rows.empty:
        return pd.DataFrame()
    wide = rows.pivot_table(index="name", columns="measure", values="mean", sort=False)
    wide = wide.loc[part["name"].drop_duplicates()[lambda kept: kept.isin(wide.index)]]
    return wide[rows["measure"].unique()].map(short).rename_axis("method").reset_index()


def ablation_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per label with overrides, in the headline measure, with the difference from the same method
    without overrides where that was run."""
    rows = frame[frame["headline"] & (frame["changed"] != "")]
    keys = ["experiment", "size", "label"]
    gaps = rows[rows["reference"] == "unchanged"].set_index(keys)
    return pd.DataFrame(
        {"experiment": row["experiment"], "size": row["size"], "method": names.look(row["method"]).name}
        | {"changed": row["changed"], "mean [95 %]": mean_text(row)}
        | compared(gaps, tuple(row[key] for key in keys), "minus unchanged [95 %]")
        | {"seeds": row["n"]}
        for row in estimates.means(rows).to_dict("records")
    )


def triggers_table(part: Results, rows: pd.DataFrame) -> pd.DataFrame:
    """Return FIRE under each trigger and the methods at boundaries, in the headline measure: how often they acted in a run
    and their differences from FIRE at the boundaries."""
    acted = part.boundaries[part.boundaries["matrices"] > 0]
    acts = acted.groupby("label").size() / part.finished.groupby("label").size()
    gaps = rows[rows["reference"] == "fire"].set_index("label")
    table = []
    for _, mean in estimates.means(rows).iterrows():
        row = {"method": mean["name"], "acts": short(float(acts.fillna(0)[mean["label"]]))}
        row |= {"mean [95 %]": mean_text(mean)} | compared(gaps, mean["label"], "minus FIRE [95 %]")
        table.append(row | {"seeds": mean["n"]})
    return pd.DataFrame(table)


# ------------------------------------------------------------------------------------------------ several settings
def against(
    frame: pd.DataFrame, reference: str, rows: Sequence[tuple[str, str, str]], methods: Sequence[str]
) -> pd.DataFrame:
    """Return the headline differences from `reference`, all seeds: one row per (title, experiment, size), one column per
    method."""
    gaps = frame[frame["headline"] & (frame["reference"] == reference)]
    gaps = gaps.set_index(["experiment", "size", "label"])
    table = []
    for title, experiment, size in rows:
        row = {"panel": title}
        for method in methods:
            row |= compared(gaps, (experiment, size, method), names.look(method).name)
        table.append(row)
    return pd.DataFrame(table)


# experiments in README.md's table, each with the size that is shown
OVERVIEW = dict.fromkeys(
    ("fig2a_cifar10_resnet18", "fig2a_tiny_imagenet_vgg16", "fig3_60k", "fig4b_walk"), "medium"
)
OVERVIEW["random_label"] = "small"


def overview_table(results: Results, frame: pd.DataFrame, verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return the ends of `none`, a full reset and FIRE in the settings of OVERVIEW, FIRE's difference from `none` over all
    seeds, and the verdict on it, for README.md."""
    table = []
    for part in settings(results):
        first, rows = part.first, estimates.of(frame, part)
        rows = rows[rows["headline"]]
        if rows.empty or OVERVIEW.get(first["experiment"]) != first["size"]:
            continue
        ends = estimates.means(rows).set_index("label")["mean"]
        decimals = min(3, digits(rows["metric"].iloc[0]))
        row = {
            "experiment": names.title(part).splitlines()[0],
            "measure": rows["measure"].iloc[0].split(",")[0],
        }
        for label in ("none", "full_reset", "fire"):
            row[names.look(label).name] = number(ends.get(label), decimals)
        for gap in rows[(rows["label"] == "fire") & (rows["reference"] == "none")].to_dict("records"):
            row |= {"FIRE minus none [95 %]": difference_text(gap, decimals), "seeds": gap["pairs"]}
        said = estimates.of(verdicts, part).query("better == 'fire' and worse == 'none'")["verdict"]
        table.append(row | {"FIRE > none": said.iloc[0] if len(said) else "-"})
    return pd.DataFrame(table)


def write_all(results: Results, out: Path) -> list[Path]:
    """Write every table that is not empty as .md, .csv and .tex, and the frame of estimates as estimates.csv. Return
    the paths."""
    frame, verdicts = estimates.frame(results), claims.verdicts(results)
    tables = {kind: comparisons_table(verdicts[verdicts["kind"] == kind]) for kind in KINDS}
    tables |= {"status": status_matrix(results), "ablations": ablation_table(frame)}
    tables["overview"] = overview_table(results, frame, verdicts)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "estimates.csv", frame.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    paths = [out / "estimates.csv"]
    for name, table in tables.items():
        if len(table):
            about = {"caption": name.replace("_", " "), "label": f"tab:{name}"}
            latex = table.to_latex(index=False, escape=True, **about)
            csv = table.to_csv(index=False, lineterminator="\n")
            for ending, text in (("md", markdown(table) + "\n"), ("csv", csv), ("tex", latex)):
                paths.append(out / f"{name}.{ending}")
                write_atomic(paths[-1], text)
    return paths
