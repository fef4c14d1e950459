"""The dial: the gain over `none` against the width w of the interval [1 / w, w] that singular values are clipped to; the cap
that was chosen from it, on fresh seeds; and the controls. The rules are in docs/concepts/statistics.md."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis import claims, estimates, measures, names, plot
from analysis.rendering import difference_text, p_text, spread
from analysis.runs import RUN, SETTING, Results, merged
from analysis.stats import estimate

PANELS = ("fig2*", "fig3_60k", "fig4a_asterix", "random_label")  # of which those are drawn that have the runs
FRESH, CONTROLLED = range(16, 26), range(6, 16)  # seeds of the cap and of the controls
LEVELS = ("fire", "fire_exact", "keep_norm", "rescale", "singular_clip")
# what becomes of singular values: text of the legend, of the table (with 1 / w and w), colour, marker
SIDES = {
    "all": ("all moved to w", "exactly {1:g}", "#E69F00", "s"),
    "both": ("both sides: clipped to [1 / w, w]", "{:.3g} to {:g}", "#000000", "o"),
    "large": ("large ones lowered to w", "at most {1:g}", "#009E73", "v"),
    "small": ("small ones raised to 1 / w", "at least {:.3g}", "#0072B2", "^"),
}


def side(method: str, changed: Mapping[str, str]) -> tuple[str, float] | None:
    """Return which side of the dial a run turned, a key of SIDES, and its w; None for other runs."""
    low, high = (float(changed.get(f"method.{bound}", "nan")) for bound in ("low", "high"))
    if method == "cap" and set(changed) == {"method.high"}:
        return "large", high
    if method != "spectral_clip" or set(changed) != {"method.low", "method.high"} or low == 0:
        return None
    if low == high:
        return "all", high
    if math.isinf(high):
        return "small", round(1 / low, 2)
    return ("both", high) if math.isclose(low * high, 1, rel_tol=1e-3) else None


def turned(parts: Sequence[Results]) -> list[tuple[Results, pd.DataFrame]]:
    """Return (runs, their gains over `none` with columns side and w) of the dial and LEVELS, with the dial's seeds alone."""
    found = []
    for part in (part.select(seed=claims.EXPLORING) for part in parts):
        each = {label: side(method, part.overrides[label]) for label, method in part.methods.items()}
        sides = {label: known for label, known in each.items() if known}
        own = part.select(label=[*sides, *LEVELS, "none"], seed=part.select(label=sides).runs["seed"])
        rows = estimates.gains(estimates.against(estimates.frame(own), "none"))
        rows = rows.join(pd.DataFrame.from_dict(sides, "index", columns=["side", "w"]), on="label")
        if rows["side"].any():
            found.append((own, rows.sort_values(["side", "w"], kind="stable", na_position="first")))
    return found


def table(parts: Sequence[Results]) -> pd.DataFrame:
    """Return one row per panel and setting: the gain over `none`, paired by seed, and the number of seeds."""
    return pd.DataFrame(
        {"panel": names.panel(row["experiment"])}
        | {"setting": SIDES[row["side"]][1].format(1 / row["w"], row["w"]) if row["w"] > 0 else row["name"]}
        | {"gain over none [95 %]": difference_text(row), "seeds": row["pairs"]}
        for _, rows in turned(parts)
        for row in rows.to_dict("records")
    )


def confirmed(parts: Sequence[Results], results: Results) -> pd.DataFrame:
    """Return the verdicts on `cap` against `none` and FIRE on the fresh seeds. The tests of a panel are one family.

    results: those of the claims, with the exploring seeds that say whether the premise of a panel holds.
    """
    rows = []
    for part in parts:
        fresh = part.select(seed=FRESH).methods
        pairs = [(cap, other) for cap in fresh if fresh[cap] == "cap" for other in ("none", "fire")]
        rows += tested(part, pairs, FRESH, results)
    return pd.DataFrame(rows)


def controlled(parts: Sequence[Results], results: Results) -> pd.DataFrame:
    """Return one row per panel and control: FIRE and the control against no treatment, and FIRE against the control. The
    tests of a panel are one family. No treatment is `none`, or on random labels `none` with kept moments."""
    rows, heads = [], ("FIRE > untreated", "control > untreated", "FIRE > control")
    for part in parts:
        controls = part.select(method=["clear", "rewarm"]).methods
        untreated = part.select(method="none").overrides
        base = next((c for c in untreated if untreated[c] == {"optimizer_state": "keep"}), "none")
        pairs = [("fire", base), *(pair for c in controls for pair in ((c, base), ("fire", c)))]
        found = tested(part, pairs, CONTROLLED, results, ask_premise=False)
        told = {pair: f"{row['gain [95 %]']}, {row['verdict']}" for pair, row in zip(pairs, found)}
        for c, method in controls.items():
            row = {"panel": names.panel(part.first["experiment"]), "control": method}
            rows.append(row | dict(zip(heads, (told["fire", base], told[c, base], told["fire", c]))))
    return pd.DataFrame(rows)


def tested(
    part: Results, pairs: Sequence[tuple[str, str]], seeds: range, results: Results, ask_premise: bool = True
) -> list[dict[str, Any]]:
    """Return a row with the verdict on `better` > `worse` for each pair of labels, on these seeds, corrected together.
    The cap is judged only where the premise of the panel is met; the rule of the controls does not ask for it."""
    known = results.select(**part.first[SETTING])
    part = merged(part, known, RUN)
    measure, labels = measures.of(part)[0], part.overrides
    ends = measures.values(part.select(seed=seeds).metrics, measure)
    found = [estimate(claims.gains(ends, *pair, measure)) for pair in pairs]
    about = {"kind": "claims", "premise": not ask_premise or claims.premise(known).holds}
    done, rows = [each.n == len(seeds) for each in found], []
    corrected = claims.corrected([each.p for each in found], done)
    for pair, (gain, low, high, _, n), p, p_least in zip(pairs, found, *corrected):
        told = about | {"complete": n == len(seeds), "gain": gain, "p_holm": p, "p_least": p_least}
        claim = " > ".join(names.look(part.methods.get(m, m), labels.get(m)).name for m in pair)
        row = {"panel": names.panel(part.first["experiment"]), "claim": claim}
        row["gain [95 %]"] = spread(gain, low, high, measures.digits(measure.metric), sign=True)
        rows.append(row | {"seeds": n, "p, Holm": p_text(p), "verdict": claims.verdict(told)})
    return rows


def draw(parts: Sequence[Results]) -> plot.Figure | None:
    """Return the figure, one panel per experiment, or None if the dial was turned in none."""
    if not (found := turned(parts)):
        return None
    figure, axes = plot.panels(len(found), 2, 4.4, 3.2)
    for axis, (own, rows) in zip(axes, found):
        exact, turns = rows[rows["label"] == "fire_exact"], {"all", "both"} & set(rows["side"])
        lines = pd.concat([rows, *(exact.assign(side=turn, w=1.0) for turn in turns)]).sort_values("w")
        for place, (name, line) in enumerate(lines.groupby("side")):
            text, _, colour, marker = SIDES[name]
            beside = line["w"] * 1.03 ** (place - 1)  # so that intervals do not cover each other
            axis.plot(beside, line["difference"], f"{marker}-", color=colour, markersize=4, label=text)
            axis.vlines(beside, line["difference_low"], line["difference_high"], colour)
        axis.axhline(0, color="#8A8A8A", linewidth=0.8)
        for label, value in rows[rows["side"].isna()].set_index("label")["difference"].items():
            plot.draw_level(axis, value, label)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set(xlabel="w, in units of FIRE's scale", title=names.title(own))
        axis.set_ylabel(f"gain over none in {measures.of(own)[0].axis.partition(' on ')[0]}")
    return plot.with_legend(figure, axes, h_pad=1.6)
