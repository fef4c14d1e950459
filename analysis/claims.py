"""The verdict on every comparison, by the rule of docs/concepts/statistics.md; no other module gives one.

Exploring seeds decide whether the premise holds, confirming seeds decide the comparison. In the first round, seeds 1 to 5
explore; in a panel that has a second round, all seeds before it do. A positive gain agrees with the claim.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from scipy import stats as scipy_stats

from analysis import measures, paper
from analysis.measures import Measure, Values
from analysis.runs import Results, at_largest_size, settings
from analysis.stats import LEVEL, Estimate, estimate, holm, paired

EXPLORING = range(1, 6)
ROUNDS = 2  # of confirming seeds, in plan.yaml
DECIDED = ("holds", "contradicted", "FIRE ahead", "FIRE behind")
LEARNED = 1.2  # times the return of random actions
CONTROLS = ("rescale", "keep_norm", "random_orthogonal", "fire_exact")
GROUPS = ("none", "shrink_perturb", "full_reset", "dash")  # the rivals of the pooled question
COLUMNS = [
    "experiment", "figure", "panel", "size", "data", "kind", "better", "worse", "source", "premise",
    "measured", "planned", "seeds", "gain", "low", "high", "p", "p_holm", "verdict",
    "exploring_seeds", "exploring_gain", "exploring_low", "exploring_high", "gains", "exploring_gains", "decimals", "note",
]  # fmt: skip


@cache
def confirming_plan(rounds: int = ROUNDS) -> dict[tuple[str, str], range]:
    """Return {(experiment, method): seeds planned at size medium}, in the panel's last one of so many rounds."""
    entries = yaml.safe_load((Path(__file__).parent / "plan.yaml").read_text(encoding="utf-8"))
    return {
        (experiment, method): range(entry["seeds"][0], entry["seeds"][1] + 1)
        for entry in sorted(entries, key=lambda entry: entry.get("round", 1))
        if entry.get("round", 1) <= rounds
        for experiment in entry["experiments"]
        for method in entry["methods"]
    }


def planned_seeds(experiment: str, size: str, *methods: str, rounds: int = ROUNDS) -> list[int]:
    """Return the confirming seeds that were planned for all of the methods."""
    known = confirming_plan(rounds) if size == "medium" else {}
    return sorted(set.intersection(*(set(known.get((experiment, method), ())) for method in methods)))


def explored(values: dict[int, float], experiment: str, size: str, rounds: int = ROUNDS) -> dict[int, float]:
    """Return the values of the exploring seeds: those before the panel's second round or, without one, 1 to 5. At size
    paper, where nothing is planned, all seeds explore."""
    second = planned_seeds(experiment, size, "fire", "none", rounds=rounds)
    second = second if second != planned_seeds(experiment, size, "fire", "none", rounds=1) else []
    early = range(1, second[0]) if second else EXPLORING
    return {seed: value for seed, value in values.items() if seed in early or size == "paper"}


class Premise(NamedTuple):
    """Whether a claim about restoring plasticity can be judged in a setting (None: not measured), and the estimate that
    says so. In Figure 3 the premise holds by definition."""

    holds: bool | None
    measured: Estimate | None


def premise(part: Results, which: str = "confirming", rounds: int = ROUNDS) -> Premise:
    """Return the premise of one setting, measured without looking at FIRE, on the exploring seeds or, for "all", on all."""
    figure, measure = part.first["figure"], measures.of(part)[0]
    metrics = part.plain.metrics
    if figure == "fig3":
        return Premise(True, None)
    if figure.startswith("fig4"):
        before, random = measures.before_boundary(metrics, measure.metric), measures.random_returns(metrics)
        values, level = {s: before[s] / random[s] for s in before if random.get(s, 0.0) > 0}, LEARNED
    else:
        values, level = gains(measures.values(metrics, measure), "full_reset", "none", measure), 0.0
    if which != "all":
        values = explored(values, part.first["experiment"], part.first["size"], rounds)
    found = estimate(values)
    return Premise(None if found.n < 2 else bool(found.low > level), found if found.n else None)


def verdicts(parts: Results | list[Results], seeds: str = "confirming", rounds: int = ROUNDS) -> pd.DataFrame:
    """Return the frame of comparisons of all settings (columns COLUMNS). `gains` holds the paired differences by seed.

    With seeds="exploring" or "all", the same rule is applied to these seeds, as far as they were run, which gives no
    verdict on a panel. A sweep of one's own uses "all", for the premise too. With rounds=1, the second round is left out.
    """
    parts = settings(parts) if isinstance(parts, Results) else parts
    parts = [_compared(part, seeds, rounds) for part in parts if measures.of(part)]
    found = [part for part in parts if len(part)] or [pd.DataFrame(columns=COLUMNS)]
    return pd.concat(found, ignore_index=True)


def _compared(part: Results, which: str, rounds: int) -> pd.DataFrame:
    first, measure = part.first, measures.of(part)[0]
    experiment, size = first["experiment"], first["size"]
    metrics = part.metrics[part.metrics["label"] == part.metrics["method"]]
    ends, (holds, measured) = measures.values(metrics, measure), premise(part, which, rounds)
    decimals = measures.digits(measure.metric, chain.from_iterable(each.values() for each in ends.values()))
    rows, ran, note = [], set(ends), ""
    if which == "confirming" and size == "medium" and ran:  # what was planned is open until it has run
        ran |= {method for planned, method in confirming_plan(rounds) if planned == experiment}
    if which == "confirming" and holds and (later := premise(part, "all")).holds is False:
        note = f"premise not met on all {later.measured.n} seeds"
    for pair in _pairs(experiment, ran):
        both = pair["better"], pair["worse"]
        found, planned = gains(ends, *both, measure), planned_seeds(experiment, size, *both, rounds=rounds)
        early = explored(found, experiment, size, rounds)
        seeds = {"exploring": sorted(early), "all": sorted(found)}.get(which, planned)
        exploring = early or ({} if planned else found)  # shown; no verdict of any kind uses the others
        used = {seed: found[seed] for seed in seeds if seed in found}
        complete = 0 < len(seeds) == len(used) if which == "confirming" else len(used) > 1
        row = first[["experiment", "figure", "panel", "size", "data"]].to_dict() | pair
        row |= {"premise": holds, "measured": measured, "planned": len(seeds), "complete": complete}
        row |= {"decimals": decimals, "note": note if planned else "", "gains": used}
        row["exploring_gains"] = exploring
        for prefix, each in (("", used), ("exploring_", exploring)):
            told = zip(("gain", "low", "high", "p", "seeds"), estimate(each))
            row |= {f"{prefix}{name}": number for name, number in told}
        rows.append(row)
    table = pd.DataFrame(rows, columns=[*COLUMNS, "complete", "p_least"])
    together = table["planned"] * (which == "confirming")  # what was planned later has a family of its own
    for _, family in table[table["planned"] > 0].groupby(["kind", together]):
        both = corrected(family["p"], family["complete"])
        table.loc[family.index, ["p_holm", "p_least"]] = np.transpose(both)
    table.loc[~table["complete"].astype(bool), ["gain", "low", "high", "p", "p_holm"]] = np.nan
    table["verdict"] = [verdict(row) for row in table.to_dict("records")]
    return table[COLUMNS]


def corrected(p: Sequence[float], complete: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    """Return the p-values of a family after Holm's correction, the largest and the smallest that they can be.

    An open test may end with any p: at 1 those of the others are largest, and at 0 smallest, as if it were not there.
    """
    p, complete = np.array(p, dtype=float), np.array(complete, dtype=bool)
    return holm(np.where(complete, p, 1.0)), holm(np.where(complete, p, np.nan))


def verdict(row: Mapping[str, Any]) -> str:
    """Return "holds", "contradicted", "not decided", "open" (not all planned seeds are done, none were planned, or the
    verdict depends on a test of the same family that is not done), or "premise not met". Controls and rivals, of which
    nothing is claimed, have "FIRE ahead" and "FIRE behind"."""
    if row["premise"] is False:
        return "premise not met"
    if row["premise"] is None or not row["complete"]:
        return "open"
    if row["p_holm"] < LEVEL:
        words = ("holds", "contradicted") if row["kind"] == "claims" else ("FIRE ahead", "FIRE behind")
        return words[0 if row["gain"] > 0 else 1]
    return "open" if row["p_least"] < LEVEL else "not decided"


def _pairs(experiment: str, ran: set[str]) -> Iterator[dict[str, str]]:
    """Yield the claims about this panel between the methods `ran`, then FIRE against the controls and against all others."""
    told = paper.claims()
    told = told[(told["experiment"] == experiment) & told["better"].isin(ran) & told["worse"].isin(ran)]
    for claim in told.to_dict("records"):
        yield {"kind": "claims"} | {name: claim[name] for name in ("better", "worse", "source")}
    if "fire" not in ran:
        return
    known = {"fire", *told["better"][told["worse"] == "fire"], *told["worse"][told["better"] == "fire"]}
    for method in sorted(ran - known):
        kind = "controls" if method in CONTROLS else "rivals"
        yield {"kind": kind, "better": "fire", "worse": method, "source": ""}


def gains(ends: Values, better: str, worse: str, measure: Measure) -> dict[int, float]:
    """Return {seed: how far `better` ends ahead of `worse`} for the seeds that both have."""
    first, second = (better, worse) if measure.higher_is_better else (worse, better)
    return paired(ends.get(first, {}), ends.get(second, {}))


def of_fire(table: pd.DataFrame) -> pd.DataFrame:
    """Return the comparisons of FIRE with another method, `worse`, all turned so that a positive gain has FIRE ahead."""
    rows = table[table["better"].eq("fire") | table["worse"].eq("fire")].copy()
    turned = rows["worse"].eq("fire")
    rows.loc[turned, ["better", "worse"]] = rows.loc[turned, ["worse", "better"]].to_numpy()
    for prefix in ("", "exploring_"):
        ends = [f"{prefix}{name}" for name in ("gain", "low", "high")]
        rows.loc[turned, ends] = -rows.loc[turned, [ends[0], ends[2], ends[1]]].to_numpy()
        column = f"{prefix}gains"
        opposite = rows[column].map(lambda gains: {s: -g for s, g in gains.items()})
        rows[column] = rows[column].where(~turned, opposite)
    return rows


def of_paper(table: pd.DataFrame) -> pd.DataFrame:
    """Return the claims of the paper about its own panels."""
    theirs = table["source"].str.startswith("the paper's") & (table["figure"] != "")
    return table[(table["kind"] == "claims") & theirs]


def largest(table: pd.DataFrame) -> pd.DataFrame:
    """Return each comparison at the largest size with planned seeds or, if none were planned, at its largest size."""
    keys = ["experiment", "better", "worse"]
    planned = table["planned"].astype(int).groupby([table[key] for key in keys]).transform("max") > 0
    return at_largest_size(table[~planned | (table["planned"] > 0)], keys)


def counts(table: pd.DataFrame) -> dict[str, int]:
    """Return how many comparisons have each verdict, those without planned seeds apart, and `suite_wide`: how many would
    still hold if all planned tests of the table were corrected as one family, in which an open test counts as p = 1.
    Comparisons whose premise is not met count if they were run."""
    ran = table["seeds"].astype(int) + table["exploring_seeds"].astype(int) > 0
    table = table[ran | table["verdict"].ne("premise not met")]
    words = ("holds", "contradicted", "not decided", "open", "not planned", "premise not met")
    told = table["verdict"].mask(table["verdict"].eq("open") & table["planned"].eq(0), "not planned")
    tests = table[~told.isin(words[-2:])]
    ahead = (tests["gain"].astype(float) > 0) & (holm(tests["p"].astype(float).fillna(1.0)) < LEVEL)
    found = told.value_counts().reindex(words, fill_value=0).to_dict()
    return {"all": int((told != words[-1]).sum())} | found | {"suite_wide": int(ahead.sum())}


def effect(gains: Mapping[int, float]) -> tuple[float, float]:
    """Return the standardised mean of paired differences with Hedges' correction, and its variance."""
    values = np.array(list(gains.values()))
    n = len(values)
    d = float((1 - 3 / (4 * (n - 1) - 1)) * values.mean() / values.std(ddof=1))
    return d, 1 / n + d**2 / (2 * n)


def effects(table: pd.DataFrame, rival: str) -> pd.DataFrame:
    """Return one effect of FIRE against `rival` (columns panel, d, variance) per panel of the paper that counts, is complete
    and has three seeds that differ. The starts of Figure 3 share a first phase, so each seed gives a mean."""
    rows = of_fire(table[table["premise"].eq(True) & table["gain"].notna()])
    rows = at_largest_size(rows[rows["worse"].eq(rival)])
    rows = rows[rows["experiment"].isin(paper.panels())]
    of_figure_3 = rows["figure"].eq("fig3")
    found = rows[~of_figure_3].set_index("experiment")["gains"].to_dict()
    starts = pd.DataFrame(list(rows["gains"][of_figure_3]))  # one row per start, one column per seed
    if len(starts) == 3:
        found["fig3"] = starts.dropna(axis=1).mean().to_dict()
    known = {panel: gains for panel, gains in found.items() if len(gains) > 2 and len({*gains.values()}) > 1}
    effects_of = [(panel, *effect(gains)) for panel, gains in known.items()]
    return pd.DataFrame(effects_of, columns=["panel", "d", "variance"])


def pooled(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row per rival of GROUPS: the number of panels, in how many FIRE ends ahead, the random-effects mean of
    the standardised differences with its Hartung-Knapp interval, I² and the p-values, corrected together."""
    rows = []
    for rival in GROUPS:
        found = effects(table, rival)
        row = {"rival": rival, "panels": len(found), "ahead": int((found["d"] > 0).sum())}
        rows.append(row | (pool(found) if len(found) > 1 else {}))
    made = pd.DataFrame(rows, columns=["rival", "panels", "ahead", "mean", "low", "high", "i2", "p"])
    return made.assign(p_holm=holm(made["p"].astype(float)))


def pool(found: pd.DataFrame) -> dict[str, float]:
    """Return the random-effects mean (DerSimonian-Laird) of effects with its Hartung-Knapp interval and p-value, and I²."""
    # not by statsmodels 0.15, whose tau² of panels that agree is negative, and so are then its weights
    d, variance, freedom = found["d"].to_numpy(), found["variance"].to_numpy(), len(found) - 1
    weight = 1 / variance
    q = float(weight @ (d - np.average(d, weights=weight)) ** 2)
    between = max(0.0, (q - freedom) / (weight.sum() - weight @ weight / weight.sum()))
    weight = 1 / (variance + between)
    mean = float(np.average(d, weights=weight))
    error = float((weight @ (d - mean) ** 2 / freedom / weight.sum()) ** 0.5) or sys.float_info.min
    half, p = error * scipy_stats.t.ppf(0.975, freedom), 2 * scipy_stats.t.sf(abs(mean) / error, freedom)
    i2 = 1 - freedom / max(q, freedom)
    return {"mean": mean, "low": mean - half, "high": mean + half, "i2": i2, "p": float(p)}
