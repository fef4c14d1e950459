"""Tables of verdicts, and of what they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis import claims, names, paper
from analysis.figures import fig5, forest
from analysis.rendering import number, p_text, spread
from analysis.runs import at_largest_size
from analysis.tables.material import Material


def comparisons(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of `claims.verdicts` as text: the exploring estimate, that of the confirming seeds, and the verdict."""
    table = []
    for row in rows.to_dict("records"):
        decimals = row["decimals"]
        explored, ours = (
            spread(*(row[f"{seeds}{name}"] for name in ("gain", "low", "high")), decimals, sign=True)
            for seeds in ("exploring_", "")
        )
        # where no comparison was planned and none of seeds 1 to 5 ran, those from 6 on explore
        fresh = " from 6 on" if not row["planned"] and min(row["exploring_gains"], default=0) > 5 else ""
        told = {
            "panel": names.panel(row["experiment"]),
            "size": row["size"],
            "comparison": claim_text(row),
            "paper's gain": number(paper_gain(row), decimals, sign=True),
            "exploratory: gain [95 %] (seeds)": f"{explored} ({row['exploring_seeds']}{fresh})",
            "confirmatory: gain [95 %]": ours,
            "done": f"{row['seeds']} of {row['planned']}" if row["planned"] else "not planned",
            "p, Holm": p_text(row["p_holm"]),
            "verdict": row["verdict"] + (f" ({row['note']})" if row["note"] else ""),
        }
        table.append(told)
    return pd.DataFrame(table)


def paper_gain(row: Mapping[str, Any]) -> float:
    """Return the paper's gain in a comparison."""
    return paper.gain(row["experiment"], row["better"], row["worse"])


def claim_text(claim: Mapping[str, Any]) -> str:
    """Return for example `FIRE > full reset`."""
    return f"{names.look(claim['better']).name} > {names.look(claim['worse']).name}"


def planned(material: Material, kind: str) -> pd.DataFrame:
    """Return the comparisons of one kind that have planned seeds."""
    rows = material.planned
    return comparisons(rows[rows["kind"] == kind]).drop(columns="size")


def premises(material: Material) -> pd.DataFrame:
    """Return what the rule asks in each panel of Figures 2 and 4: full reset minus none, or the return before the reset
    divided by that of random actions, on seeds 1 to 5 and on all seeds before the second round."""
    table, said = [], {True: "met", False: "not met", None: "-"}
    for part in material.parts("fig2*", "fig4*"):
        experiment = part.first["experiment"]
        first, last = claims.premise(part, rounds=1), claims.premise(part)
        second = first.measured and last.measured.n > first.measured.n
        everything = last if second else claims.premise(part, "all")
        if first.measured is None or experiment not in paper.panels():
            continue
        row = {"panel": names.panel(experiment), "size": part.first["size"], "round": 2 if second else 1}
        for seeds, found in (("seeds 1 to 5", first), ("all seeds before round 2", everything)):
            level = experiment.startswith("fig2")
            row[seeds] = f"{spread(*found.measured[:3], 4 if level else 2, sign=level)} ({found.measured.n})"
            row[f"{seeds}: premise"] = said[found.holds]
        table.append(row)
    return pd.DataFrame(table)


def counts(material: Material) -> pd.DataFrame:
    """Return the counts of verdicts on the paper's comparisons."""
    titles = {"all": "comparisons whose premise is met", "not planned": "no seeds planned"}
    titles["suite_wide"] = "hold, suite-wide correction"
    shown = {seeds: claims.largest(claims.of_paper(table)) for seeds, table in material.both.items()}
    rows = [{"seeds": seeds} | claims.counts(table) for seeds, table in shown.items()]
    return pd.DataFrame(rows).rename(columns=titles)


def pooled(material: Material) -> pd.DataFrame:
    """Return the pooled estimates, with the number of the paper's panels in which its FIRE ends ahead."""
    table = []
    for seeds, verdicts in material.both.items():
        for row in claims.pooled(verdicts).to_dict("records"):
            theirs = [paper.gain(panel, "fire", row["rival"]) for panel in paper.panels()]
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


def example(material: Material) -> pd.DataFrame:
    """Return the tests of the paper's claims about one panel, step by step, by p."""
    rows = material.planned.query("experiment == 'fig2a_cifar10_resnet18' and kind == 'claims'").sort_values(
        "p"
    )
    error = rows["gains"].map(lambda gains: pd.Series(gains).sem())
    columns = {
        "comparison": [claim_text(row) for row in rows.to_dict("records")],
        "mean difference": rows["gain"].map("{:+.4f}".format),
        "standard error": error.map("{:.4f}".format),
        "t": (rows["gain"] / error).map("{:+.2f}".format),
        "p": rows["p"].map("{:.2g}".format),
        "times": range(len(rows), 0, -1),
        "p, Holm": rows["p_holm"].map("{:.2g}".format),
        "verdict": rows["verdict"],
    }
    return pd.DataFrame(columns)


def grid(material: Material, rivals: Sequence[str]) -> pd.DataFrame:
    """Return one row per panel of the paper and one column per rival: where FIRE ends, by the verdict of the panel."""
    rows = claims.of_fire(material.planned)
    rows = rows.assign(side=[side(row) for row in rows.to_dict("records")])
    wide = rows.pivot(index="experiment", columns="worse", values="side").reindex(
        paper.panels(), columns=rivals
    )
    wide = wide.dropna(how="all").fillna("-").rename(index=names.panel).rename_axis("panel")
    return wide.rename(columns=lambda rival: f"against {forest.short(rival)}").reset_index()


def side(row: Mapping[str, Any]) -> str:
    """Return where FIRE ends by the verdict in a row of `claims.of_fire`: beats, loses to, or what else it says."""
    if row["verdict"] not in claims.DECIDED:
        return row["verdict"]
    return "beats" if row["gain"] > 0 else "loses to"


def contradictions(material: Material) -> pd.DataFrame:
    """Return the decided comparisons whose order is not the paper's, and the order of curvature in Figure 5b."""
    table = []
    for row in material.planned.to_dict("records"):
        theirs = paper_gain(row)
        if row["verdict"] in claims.DECIDED and theirs * row["gain"] < 0:
            ours = spread(row["gain"], row["low"], row["high"], row["decimals"], sign=True)
            told = {"panel": names.panel(row["experiment"]), "comparison": claim_text(row)}
            table.append(told | {"paper": number(theirs, row["decimals"], sign=True), "ours [95 %]": ours})
    theirs = paper.figure_5b("hessian_lambda_max")
    for row in fig5.hessians(at_largest_size(material.frame)).to_dict("records"):
        told = {"panel": f"5b, {names.panel(row['experiment'])}"}
        told["comparison"] = "largest Hessian eigenvalue: FIRE, S&P"
        told["paper"] = f"{theirs['fire']:.1f}, {theirs['shrink_perturb']:.1f} (network not named)"
        ours = f"{row['fire']:.0f}, {row['shrink_perturb']:.0f} ({row['n']} seeds)"
        table.append(told | {"ours [95 %]": ours})
    return pd.DataFrame(table)
