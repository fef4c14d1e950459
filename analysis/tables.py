"""Every table of runs, built from the frame of estimates; `write_all` writes them as Markdown, CSV and LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from analysis import claims, estimates, paper, plot
from analysis.benchmark_tables import benchmark_tables
from analysis.measures import digits
from analysis.rendering import (
    difference_text,
    markdown,
    mean_text,
    number,
    p_text,
    plain,
    short,
    spread,
)
from analysis.runs import SIZES, Results, settings
from fire_core.files import write_atomic

KINDS = ("claims", "controls", "rivals")  # of comparisons


def status_matrix(results: Results) -> pd.DataFrame:
    """Return the methods, seeds and data that are finished: one row per panel of the paper, one column per size."""
    done = results.finished
    rows = []
    for figure, panel in paper.cells():
        experiment, name = f"{figure}_{panel}", plot.panel_name(figure, panel)
        runs = done[done["experiment"] == experiment]
        row = {"panel": _link(name, experiment) if len(runs) else name}
        for size in SIZES[:-1]:
            row[size] = _count(runs[runs["size"] == size])
        rows.append(row)
    return pd.DataFrame(rows, dtype=object)  # columns of strings would make plain text of a Markup


def other_experiments(results: Results) -> pd.DataFrame:
    """Return the settings that are no panel of the paper: one row per experiment, size and data set."""
    cells = {"_".join(cell) for cell in paper.cells()}
    rows = []
    for part in settings(results):
        name = part.first["experiment"]
        if name not in cells:
            setting = plot.title(part).replace("\n", ", ")
            rows.append({"experiment": _link(name, name), "size": part.first["size"], "setting": setting})
    return pd.DataFrame(rows, dtype=object)


def _link(text: str, experiment: str) -> Markup:
    return Markup(f"[{plain(text)}](analysis/results/pages/{experiment}.md)")


def _count(runs: pd.DataFrame) -> str:
    if runs.empty:
        return "not run"
    own = runs[runs["label"] == runs["method"]]
    seeds = (own if len(own) else runs).groupby("label")["seed"].nunique()
    most = f"{seeds.max()}" if seeds.nunique() == 1 else f"{seeds.min()}-{seeds.max()}"
    return f"{len(seeds)} methods x {most} seeds, {plot.data_name(runs['data'].iloc[0])}"


def comparisons_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of `claims.verdicts` as text: the exploring estimate, that of the confirming seeds, and the verdict."""
    table = []
    for row in rows.to_dict("records"):
        decimals = row["decimals"]
        gap = paper.gain(row["figure"], row["panel"], row["better"], row["worse"])
        explored = (row[f"exploring_{name}"] for name in ("gain", "low", "high"))
        confirmed = (row[name] for name in ("gain", "low", "high"))
        # where no comparison was planned and none of seeds 1 to 5 ran, those from 6 on explore
        fresh = " from 6 on" if not row["planned"] and min(row["exploring_gains"], default=0) > 5 else ""
        many = f"({row['exploring_seeds']}{fresh})"
        table.append(
            {
                "panel": plot.panel_name(row["figure"], row["panel"]),
                "size": row["size"],
                "comparison": claim_text(row),
                "paper's gain": number(gap, decimals, sign=True),
                "exploring seeds: gain [95 %]": f"{spread(*explored, decimals, sign=True)} {many}",
                "confirming seeds: gain [95 %]": spread(*confirmed, decimals, sign=True),
                "done": f"{row['seeds']} of {row['planned']}" if row["planned"] else "not planned",
                "p, Holm": p_text(row["p_holm"]),
                "verdict": row["verdict"],
            }
        )
    return pd.DataFrame(table)


def fresh_premises(parts: Sequence[Results]) -> pd.DataFrame:
    """Return one row per panel of Figure 2 with fresh seeds: full reset minus none on both sets of seeds, and whether the
    premise is met by each. The rule asks the exploring seeds alone."""
    table = []
    for part in parts:
        early, fresh = (claims.premise(part, which) for which in ("confirming", "fresh"))
        if part.first["figure"].startswith("fig2") and early.measured and fresh.measured:
            row = {"panel": plot.panel_name(part.first["figure"], part.first["panel"])}
            for name, found in (("seeds 1 to 5", early), ("seeds from 6 on", fresh)):
                row[name] = spread(*found.measured[:3], sign=True)
                row[f"premise on {name}"] = "met" if found.holds else "not met"
            table.append(row)
    return pd.DataFrame(table)


def claim_text(claim: Mapping[str, Any]) -> str:
    """Return for example `FIRE > full reset`."""
    return f"{plot.look(claim['better']).name} > {plot.look(claim['worse']).name}"


def counts_table(counts: Mapping[str, Mapping[str, int]]) -> pd.DataFrame:
    """Return one row per set of seeds with the counts of `claims.counts`."""
    named = {
        "all": "comparisons whose premise is met",
        "not planned": "no fresh seeds planned",
        "suite_wide": "hold, suite-wide correction",
    }
    return pd.DataFrame(
        {"seeds": seeds} | {named.get(name, name): value for name, value in row.items()}
        for seeds, row in counts.items()
    )


def pooled_table(pooled: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of `claims.pooled` as text, with the number of the paper's panels in which its FIRE ends ahead."""
    table = []
    for seeds, rows in pooled.items():
        for row in rows.to_dict("records"):
            theirs = [paper.gain(*cell, "fire", row["rival"]) for cell in paper.cells()]
            known = [gap for gap in theirs if gap == gap]
            table.append(
                {
                    "FIRE against": plot.look(row["rival"]).name,
                    "seeds": seeds,
                    "panels": row["panels"],
                    "FIRE ahead": row["ahead"],
                    "standardised gain [95 %]": spread(row["mean"], row["low"], row["high"], 2, sign=True),
                    "I²": "-" if pd.isna(row["i2"]) else f"{row['i2']:.0%}",
                    "p, Holm": p_text(row["p_holm"]),
                    "in the paper, all panels": f"{sum(gap > 0 for gap in known)} of {len(known)}",
                }
            )
    return pd.DataFrame(table)


def compared(gaps: pd.DataFrame, label: Any, title: str, decimals: int | None = None) -> dict[str, str]:
    """Return the cell `title` of one label: a difference with its interval, from the comparisons `gaps`, which are
    indexed by label; "-" where there is none."""
    return {title: difference_text(gaps.loc[label], decimals) if label in gaps.index else "-"}


def end_table(part: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return one row per method of one setting and measure, over all seeds: mean and difference from `none` with their
    intervals and, at size paper, the paper's end value."""
    rows = part[part["metric"] == measure]
    first = estimates.means(rows).set_index("label")
    gaps = rows[rows["reference"] == "none"].set_index("label")
    about = first.iloc[0]
    shown = about["headline"] and about["size"] == "paper"
    theirs = paper.end_values(about["figure"], about["panel"]) if shown else {}
    decimals, table = digits(measure, rows["mean"]), []
    for label in plot.ordered(first.index):
        row = {"method": plot.look(label).name}
        row |= {
            "all seeds: mean [95 %]": mean_text(first.loc[label], decimals),
            "seeds": first.loc[label, "n"],
        }
        row |= compared(gaps, label, "all seeds: minus none [95 %]", decimals)
        table.append(row | ({"paper": number(theirs.get(label), decimals)} if theirs else {}))
    return pd.DataFrame(table)


def wide_table(part: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Return the means of all measures of a kind, as "boundary", one row per method."""
    rows = estimates.means(part[part["kind"] == kind])
    changed = rows.loc[(rows["metric"] == "matrices") & (rows["mean"] > 0), "mean"]
    if changed.nunique() < 2:  # all change the same ones
        rows = rows[~rows["metric"].str.startswith("common_")]
    if rows.empty:
        return pd.DataFrame()
    titles = rows.drop_duplicates("metric")["measure"]
    wide = rows.pivot_table(index="label", columns="measure", values="mean", sort=False)[titles]
    wide = wide.loc[plot.ordered(wide.index)].map(short)
    return wide.set_axis([plot.look(label).name for label in wide.index]).rename_axis("method").reset_index()


def learning_table(frame: pd.DataFrame, verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return one row per experiment of reinforcement learning: the return before the boundary, its difference from
    random actions under the same protocol, and for the headline measure of Figure 4 what the premise of the rule asks."""
    rows = frame[(frame["kind"] == "learning") & (frame["reference"] == "random_actions")]
    keys, said = ["experiment", "size"], {True: "met", False: "not met"}
    headline = frame[frame["headline"]].drop_duplicates(keys).set_index(keys)["metric"]
    premises = verdicts[verdicts["figure"].str.startswith("fig4")].drop_duplicates(keys).set_index(keys)
    table = []
    for row in rows.to_dict("records"):
        place = row["experiment"], row["size"]
        told = {
            "experiment": row["experiment"],
            "size": row["size"],
            "return of": row["measure"].split(" ")[0],
            "before the boundary [95 %]": mean_text(row, 1),
            "minus random actions [95 %]": difference_text(row, 1),
            "seeds": row["pairs"],
            "divided by random actions, seeds 1 to 5 [95 %]": "-",
            f"premise: above {claims.LEARNED}": "-",
        }
        if place in premises.index and headline[place].startswith(row["metric"].removesuffix("_learned")):
            holds, ratio = premises.loc[place, ["premise", "measured"]]
            told["divided by random actions, seeds 1 to 5 [95 %]"] = spread(*ratio[:3], 3) if ratio else "-"
            told[f"premise: above {claims.LEARNED}"] = said.get(holds, "unknown")
        table.append(told)
    return pd.DataFrame(table)


def ablation_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per label with overrides, in the headline measure, with the difference from the same method
    without overrides where that was run."""
    rows = frame[frame["headline"] & (frame["label"] != frame["method"])]
    keys = ["experiment", "size", "label"]
    gaps = rows[rows["reference"] == "unchanged"].set_index(keys)
    return pd.DataFrame(
        {
            "experiment": row["experiment"],
            "size": row["size"],
            "method": plot.look(row["method"]).name,
            "changed": row["label"].removeprefix(f"{row['method']}-"),
            "mean [95 %]": mean_text(row),
            **compared(gaps, tuple(row[key] for key in keys), "minus unchanged [95 %]"),
            "seeds": row["n"],
        }
        for row in estimates.means(rows).to_dict("records")
    )


def triggers_table(part: Results, rows: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, list[str]]]:
    """Return (table, {word: triggers}): FIRE under each trigger and the methods at boundaries in the headline measure,
    and which triggers are better and worse than FIRE at the boundaries or ("") cannot be told apart from it."""
    acted = part.boundaries[part.boundaries["matrices"] > 0]
    acts = acted.groupby("label").size() / part.finished.groupby("label").size()
    gaps = estimates.sides(rows[rows["reference"] == "fire"]).set_index("label")
    means = estimates.means(rows).set_index("label")
    table, words = [], {"better": [], "worse": [], "": []}
    for label in plot.ordered(means.index):
        row = {"method": plot.look(label).name.replace("[trigger=", "[")}
        row |= {"acts": short(float(acts.fillna(0)[label])), "mean [95 %]": mean_text(means.loc[label])}
        row |= compared(gaps, label, "minus FIRE [95 %]")
        table.append(row | {"seeds": means.loc[label, "n"]})
        if label in gaps.index and label.startswith("fire-trigger="):
            words[gaps.loc[label, "word"]].append(label.removeprefix("fire-trigger="))
    return pd.DataFrame(table), words


# experiments in README.md's table, each with the size that is shown
OVERVIEW = {
    "fig2a_cifar10_resnet18": "medium",
    "fig2a_tiny_imagenet_vgg16": "medium",
    "fig3_60k": "medium",
    "fig4b_walk": "medium",
    "random_label": "small",
}


def overview_table(results: Results, frame: pd.DataFrame, verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return the end values of the four best-known methods in the settings of OVERVIEW, and the verdict on FIRE against
    `none`, for README.md."""
    table = []
    for part in settings(results):
        first, rows = part.first, estimates.of(frame, part)
        rows = rows[rows["headline"]]
        if rows.empty or OVERVIEW.get(first["experiment"]) != first["size"]:
            continue
        ends = estimates.means(rows).set_index("label")["mean"]
        decimals = min(3, digits(rows["metric"].iloc[0]))
        row = {"experiment": _link(plot.title(part).splitlines()[0], first["experiment"])}
        for label in ("fire", "none", "full_reset", "shrink_perturb"):
            row[plot.look(label).name] = number(ends.get(label), decimals)
        said = estimates.of(verdicts, part).query("better == 'fire' and worse == 'none'")["verdict"]
        row |= {"FIRE > none": said.iloc[0] if len(said) else "-"}
        table.append(row | {"measure": rows["measure"].iloc[0].split(",")[0], "size": first["size"]})
    return pd.DataFrame(table, dtype=object)


def write_all(results: Results, out: Path) -> list[Path]:
    """Write every table that is not empty as .md, .csv and .tex, and the frame of estimates as estimates.csv. Return
    the paths."""
    frame, verdicts = estimates.frame(results), claims.verdicts(results)
    tables = {"status": status_matrix(results)}
    tables |= {kind: comparisons_table(verdicts[verdicts["kind"] == kind]) for kind in KINDS}
    tables |= {
        "overview": overview_table(results, frame, verdicts),
        "learning": learning_table(frame, verdicts),
    }
    tables |= {"ablations": ablation_table(frame)}
    tables |= {name: table for name, (table, _) in benchmark_tables().items()}
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
