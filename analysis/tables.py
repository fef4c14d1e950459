"""Every table of runs, built from the frame of estimates; `write_all` writes them as Markdown, CSV and LaTeX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import estimates, paper, plot
from analysis.benchmark_tables import benchmark_tables
from analysis.rendering import difference_text, digits, markdown, mean_text, number, p_text, short
from analysis.runs import SIZES, Results, settings
from analysis.stats import MOST_SEEDS, Estimate, seeds_to_decide

RIVALS = ("none", "shrink_perturb", "full_reset", "dash")
CONTROLS = ("none", "rescale", "keep_norm", "random_orthogonal", "fire_exact")


def status_matrix(results: Results) -> pd.DataFrame:
    """Return the methods, seeds and data that are finished: one row per panel of the paper, one column per size."""
    done = results.finished
    rows = []
    for figure, panel in paper.cells():
        row = {"figure": figure.removeprefix("fig"), "panel": panel.replace("_", " ")}
        for size in SIZES[:-1]:
            runs = done[(done["experiment"] == f"{figure}_{panel}") & (done["size"] == size)]
            row[size] = "not run" if runs.empty else _count(runs)
        rows.append(row)
    return pd.DataFrame(rows)


def _count(runs: pd.DataFrame) -> str:
    own = runs[runs["label"] == runs["method"]]
    seeds = (own if len(own) else runs).groupby("label")["seed"].nunique()
    most = f"{seeds.max()}" if seeds.nunique() == 1 else f"{seeds.min()}-{seeds.max()}"
    return f"{len(seeds)} methods x {most} seeds, {plot.data_name(runs['data'].iloc[0])}"


def claim_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per claim and setting in which both methods were run. Differences are oriented so that a positive
    gain is as claimed. For Holm's correction, the paper's claims at one size are one family and all other claims at
    that size another."""
    headline = frame[frame["headline"]]
    rows = []
    for claim in paper.claims().to_dict("records"):
        better, worse = claim["better"], claim["worse"]
        found = headline[headline["experiment"] == claim["experiment"]]
        as_told = found[(found["label"] == better) & (found["reference"] == worse)]
        turned = found[(found["label"] == worse) & (found["reference"] == better)]
        for row in [
            *as_told.to_dict("records"),
            *(turned if as_told.empty else turned[:0]).to_dict("records"),
        ]:
            sign = (1 if row["label"] == better else -1) * (1 if row["higher_is_better"] else -1)
            ends = sorted((sign * row["difference_low"], sign * row["difference_high"]))
            gain = {
                "difference": sign * row["difference"],
                "difference_low": ends[0],
                "difference_high": ends[1],
            }
            rows.append({**row, **claim, **gain, "higher_is_better": True})
    table = pd.DataFrame(rows, columns=[*estimates.COLUMNS, "better", "worse", "source"])
    of_paper = table["source"].str.startswith("the paper's")
    families = [estimates.decide(family) for _, family in table.groupby(["size", of_paper], sort=False)]
    return pd.concat(families, ignore_index=True) if families else table.assign(p_holm=None, word=None)


def claims_table(claims: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `claim_rows` as text, with the paper's difference beside ours."""
    rows = []
    for row in claims.to_dict("records"):
        gap = _gap_of_paper(row)
        rows.append(
            {
                "experiment": row["experiment"],
                "size": row["size"],
                "data": plot.data_name(row["data"]),
                "claim": claim_text(row),
                "paper's gain": number(gap, sign=True),
                "our gain [95 %]": difference_text(row),
                "seeds (needed)": _seeds(row),
                "p, corrected": p_text(row["p_holm"]),
                "verdict": {"better": "holds", "worse": "the opposite holds"}.get(row["word"], "not decided"),
                "source": row["source"],
            }
        )
    return pd.DataFrame(rows)


def claim_text(claim: Mapping[str, Any]) -> str:
    """Return for example `FIRE > full reset`."""
    return f"{plot.look(claim['better']).name} > {plot.look(claim['worse']).name}"


def compared(gaps: pd.DataFrame, label: str, title: str, decimals: int | None = None) -> dict[str, str]:
    """Return the cells `title` (a difference with its interval) and `p, corrected` of one label, from the decided
    comparisons `gaps`, which are indexed by label; "-" where there is none."""
    if label not in gaps.index:
        return {title: "-", "p, corrected": "-"}
    gap = gaps.loc[label]
    return {title: difference_text(gap, decimals), "p, corrected": p_text(gap["p_holm"])}


def _seeds(row: dict[str, Any]) -> str:
    """Return the number of seeds, and in brackets how many would decide the difference before correction."""
    found = Estimate(row["difference"], row["difference_low"], row["difference_high"], row["p"], row["pairs"])
    return f"{found.n} ({seeds_to_decide(found) or f'over {MOST_SEEDS}'})" if found.n > 1 else "1"


def _gap_of_paper(claim: dict[str, object]) -> float | None:
    """Return the paper's difference between the end values of a claim's two methods, positive if it is as claimed;
    None if one of them is not known."""
    theirs = paper.end_values(claim["figure"], claim["panel"])
    if claim["better"] not in theirs or claim["worse"] not in theirs:
        return None
    sign = -1 if claim["figure"] == "fig3" else 1  # of losses
    return sign * (theirs[claim["better"]] - theirs[claim["worse"]])


def wins_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Count the panels of the paper in which FIRE ends ahead of each rival, per size, with the paper's own count over
    the same panels beside it. All comparisons of one size are one family for Holm's correction."""
    panels = {f"{figure}_{panel}": (figure, panel) for figure, panel in paper.cells()}
    rows = frame[frame["headline"] & (frame["reference"] == "fire") & frame["label"].isin(RIVALS)]
    rows = rows[rows["experiment"].isin(panels)]
    table = []
    for size in (size for size in SIZES if size in set(rows["size"])):
        decided = estimates.decide(rows[rows["size"] == size])
        ahead = (decided["difference"] < 0) == decided["higher_is_better"].astype(bool)
        for rival in RIVALS:
            ours = decided["label"] == rival
            if not ours.any():
                continue
            theirs = [_gap_of_paper({"figure": f, "panel": p, "better": "fire", "worse": rival})
                      for f, p in map(panels.get, decided[ours]["experiment"])]  # fmt: skip
            known = [gap for gap in theirs if gap is not None]
            words = decided[ours]["word"]  # of the rival against FIRE
            table.append(
                {
                    "size": size,
                    "FIRE against": plot.look(rival).name,
                    "panels": int(ours.sum()),
                    "ends ahead": int(ahead[ours].sum()),
                    "beyond chance": int((words == "worse").sum()),
                    "behind beyond chance": int((words == "better").sum()),
                    "in the paper": f"{sum(gap > 0 for gap in known)} of {len(known)}",
                }
            )
    return pd.DataFrame(table)


def against(part: pd.DataFrame, labels: Iterable[str] | None = None) -> pd.DataFrame:
    """Return the comparisons of the other methods of one setting with FIRE in the headline measure, corrected as one
    family. Differences are method minus FIRE."""
    rows = part[part["headline"] & (part["reference"] == "fire")]
    rows = rows[rows["label"].isin(labels)] if labels is not None else rows
    return estimates.decide(rows)


def against_table(part: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `against` as text, with the sign reversed to FIRE minus method."""
    rows = against(part).set_index("label")
    table = []
    for label in plot.ordered(rows.index):
        row = rows.loc[label]
        words = {"better": "FIRE is worse", "worse": "FIRE is better"}
        table.append(
            {
                "FIRE minus": plot.look(label).name,
                "difference [95 %]": difference_text(row, digits(rows["mean"]), negate=True),
                "seeds": row["pairs"],
                "p, corrected": p_text(row["p_holm"]),
                "verdict": words.get(row["word"], "not decided"),
            }
        )
    return pd.DataFrame(table)


def controls_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of `against_controls` as text: FIRE minus each method, with a star where the test is significant."""
    table = []
    for (experiment, size), group in rows.groupby(["experiment", "size"]):
        cells = {row["label"]: row for row in group.to_dict("records")}
        row = {"experiment": experiment, "size": size}
        for label in CONTROLS:
            found = cells.get(label)
            star = " *" if found and found["word"] else ""
            row[plot.look(label).name] = "-" if found is None else difference_text(found, negate=True) + star
        table.append(row)
    return pd.DataFrame(table)


def against_controls(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the comparisons of `none` and the controls with FIRE in all settings in which a control was run.

    Those at one size are one family for Holm's correction, as the claims are.
    """
    rows = frame[frame["headline"] & (frame["reference"] == "fire") & frame["label"].isin(CONTROLS)]
    # these experiments have tables of their own, and repeat FIRE and `none` of another one
    rows = rows[~rows["experiment"].str.startswith(("settings_", "ablation_"))]
    keys = ["experiment", "size", "data"]
    ran = rows[rows["label"].isin(CONTROLS[1:])].drop_duplicates(keys)[keys]
    rows = rows.merge(ran, on=keys)
    families = [estimates.decide(family) for _, family in rows.groupby("size", sort=False)]
    return pd.concat(families) if families else estimates.decide(rows)


def end_table(part: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return one row per method of one setting and measure: mean with interval, difference from `none` with the
    p-value corrected over the table, and the paper's end value."""
    rows = part[part["metric"] == measure]
    first = estimates.means(rows).set_index("label")
    gaps = estimates.decide(rows[rows["reference"] == "none"]).set_index("label")
    theirs = (
        paper.end_values(first["figure"].iloc[0], first["panel"].iloc[0]) if first["headline"].iloc[0] else {}
    )
    decimals = digits(first["mean"])
    table = []
    for label in plot.ordered(first.index):
        row = {"method": plot.look(label).name, "mean [95 %]": mean_text(first.loc[label], decimals)}
        row |= {"seeds": first.loc[label, "n"]} | compared(gaps, label, "minus none [95 %]", decimals)
        table.append(row | ({"paper": number(theirs.get(label), decimals)} if theirs else {}))
    return pd.DataFrame(table)


def wide_table(part: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Return the means of all measures of a kind ("boundary" or "cost"), one row per method."""
    rows = estimates.means(part[part["kind"] == kind])
    if rows.empty:
        return pd.DataFrame()
    titles = rows.drop_duplicates("metric")["measure"]
    wide = rows.pivot_table(index="label", columns="measure", values="mean", sort=False)[titles]
    wide = wide.loc[[label for label in plot.ordered(wide.index) if label in wide.index]]
    return (
        wide.map(short)
        .set_axis([plot.look(label).name for label in wide.index])
        .rename_axis("method")
        .reset_index()
    )


def learning_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per experiment of reinforcement learning: the return before the boundary and its difference from
    random actions under the same protocol. All rows are one family for Holm's correction."""
    rows = estimates.decide(frame[(frame["kind"] == "learning") & (frame["reference"] == "random_actions")])
    return pd.DataFrame(
        {
            "experiment": row["experiment"],
            "size": row["size"],
            "return of": row["measure"].split(" ")[0],
            "before the boundary [95 %]": mean_text(row),
            "minus random actions [95 %]": difference_text(row),
            "seeds": row["pairs"],
            "p, corrected": p_text(row["p_holm"]),
        }
        for row in rows.to_dict("records")
    )


def ablation_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per label with overrides, in the headline measure, with the difference from the same method
    without overrides where that was run."""
    rows = frame[frame["headline"] & (frame["label"] != frame["method"])]
    table = []
    for row in estimates.means(rows).to_dict("records"):
        key = (
            (rows["experiment"] == row["experiment"])
            & (rows["label"] == row["label"])
            & (rows["size"] == row["size"])
        )
        gap = rows[key & (rows["reference"] == "unchanged")].to_dict("records")
        table.append(
            {
                "experiment": row["experiment"],
                "size": row["size"],
                "method": plot.look(row["method"]).name,
                "changed": row["label"].removeprefix(f"{row['method']}-"),
                "mean [95 %]": mean_text(row),
                "minus unchanged [95 %]": difference_text(gap[0]) if gap else "-",
                "seeds": row["n"],
            }
        )
    return pd.DataFrame(table)


def triggers_table(part: Results, rows: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, list[str]]]:
    """Return (table, {word: triggers}): FIRE under each trigger and the methods at boundaries in the headline measure,
    and which triggers are better and worse than FIRE at the boundaries or ("") cannot be told apart from it."""
    acted = part.boundaries[part.boundaries["matrices"] > 0]
    acts = acted.groupby(["label", "seed"]).size().groupby("label").mean()
    gaps = estimates.decide(rows[rows["reference"] == "fire"]).set_index("label")
    means = estimates.means(rows).set_index("label")
    table, words = [], {"better": [], "worse": [], "": []}
    for label in plot.ordered(means.index):
        row = {"method": plot.look(label).name.replace("[trigger=", "[")}
        row |= {"acts": short(float(acts.get(label, 0))), "mean [95 %]": mean_text(means.loc[label])}
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
    "fig4b_balance_simple": "small",
    "random_label": "small",
}


def overview_table(results: Results, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the end values of the four best-known methods in the settings of OVERVIEW, for README.md."""
    table = []
    for part in sorted(settings(results), key=lambda part: part.first["experiment"]):
        first, rows = part.first, estimates.of(frame, part)
        rows = rows[rows["headline"]]
        if rows.empty or OVERVIEW.get(first["experiment"]) != first["size"]:
            continue
        ends = estimates.means(rows).set_index("label")["mean"]
        decimals = min(3, digits(ends))
        page = f"[{plot.title(part).splitlines()[0]}](analysis/results/pages/{first['experiment']}.md)"
        row = {"experiment": page, "size": first["size"], "measure": rows["measure"].iloc[0].split(",")[0]}
        for label in ("none", "shrink_perturb", "full_reset", "fire"):
            row[plot.look(label).name] = number(ends.get(label), decimals)
        table.append(row)
    return pd.DataFrame(table)


def write_all(results: Results, out: Path) -> list[Path]:
    """Write every table that is not empty as .md, .csv and .tex, and the frame of estimates as estimates.csv. Return
    the paths."""
    frame = estimates.frame(results)
    tables = {
        "status": status_matrix(results),
        "claims": claims_table(claim_rows(frame)),
        "controls": controls_table(against_controls(frame)),
        "overview": overview_table(results, frame),
        "learning": learning_table(frame),
        "ablations": ablation_table(frame),
    }
    tables |= {name: table for name, (table, _) in benchmark_tables().items()}
    out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(out / "estimates.csv", index=False, float_format="%.6g", lineterminator="\n")
    paths = [out / "estimates.csv"]
    for name, table in tables.items():
        if len(table):
            latex = table.to_latex(
                index=False, escape=True, caption=name.replace("_", " "), label=f"tab:{name}"
            )
            csv = table.to_csv(index=False, lineterminator="\n")
            for ending, text in (("md", markdown(table) + "\n"), ("csv", csv), ("tex", latex)):
                paths.append(out / f"{name}.{ending}")
                paths[-1].write_text(text, encoding="utf-8")
    return paths
