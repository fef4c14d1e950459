"""Would a short trial have found the right method? Asked of the committed runs: python -m analysis.trial_evidence

On a few seeds drawn at random, a trial reads the first value of the headline metric at or after a share of the training that
follows the first boundary (a panel without one within SLACK of it does not count), and chooses one of METHODS. Its loss is
the share of the range from the best to the worst final result of the other seeds that the choice leaves on the table.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats as distributions

from analysis import measures, plot
from analysis.measures import Measure
from analysis.plot import Figure, plt
from analysis.rendering import markdown, say
from analysis.runs import SIZES, Results, at_most, load, load_exported, settings
from analysis.stats import Estimate, estimate
from fire_core import TrialResult
from fire_core.errors import clean_exit

PATTERNS = ("fig2*", "fig3*", "fig4*")
METHODS = ("none", "full_reset", "shrink_perturb", "fire")
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
SLACK = 0.1
DRAWS = 300
DOMAINS = {"vision": "images", "language": "language", "dqn": "RL", "sac": "RL"}
GROUPS = ("all", *dict.fromkeys(DOMAINS.values()))
Rule = Callable[[np.ndarray], int]  # early values (methods, repeats) -> the method


@dataclass
class Panel:
    """One setting; higher is better."""

    domain: str
    early: dict[float, np.ndarray]  # share -> (methods, seeds)
    final: np.ndarray  # (methods, seeds)
    read: dict[float, float]  # share -> the share at which the values were logged


def panels(parts: Sequence[Results]) -> list[Panel]:
    """Return the panels at the largest size of `parts` whose four methods share four seeds or more."""
    found = []
    largest = min((part.first["size"] for part in parts), key=SIZES.index, default="")
    for part in (part.plain for part in parts if part.first["size"] == largest):
        measure = measures.of(part)[0]
        ends = full_runs(part, measure).dropna().sort_index()
        if len(ends) < 4:
            continue
        rows = measures.ordered_rows(part.metrics, measure.metric)
        run = ["label", "seed"]  # each has a first and a last step of its own after the boundary
        steps = pd.DataFrame({"first": rows[rows["phase"] == 0].groupby(run)["step"].max()})
        rows = rows.join(steps.assign(last=part.metrics.groupby(run)["step"].max()), on=run)
        share = (rows["step"] - rows["first"]) / (rows["last"] - rows["first"])
        rows = rows.assign(share=share, value=measure.sign * rows["value"])
        rows = rows[rows["seed"].isin(ends.index) & (rows["phase"] > 0) & (rows["share"] > 0)]
        panel = Panel(DOMAINS[part.first["domain"]], {}, ends.to_numpy().T, {})
        for share in SHARES:
            late = rows[rows["share"].between(share - 1e-9, share + SLACK + 1e-9)]
            table = late.groupby(["label", "seed"])[["share", "value"]].first()
            table = table.reindex(pd.MultiIndex.from_product([METHODS, ends.index]))
            if table.notna().all(axis=None):
                panel.early[share] = table["value"].to_numpy().reshape(len(METHODS), -1)
                panel.read[share] = float(table["share"].mean())
        found.append(panel)
    return found


def full_runs(part: Results, measure: Measure) -> pd.DataFrame:
    """Return what METHODS (columns) end with for each seed (rows), so that higher is better."""
    return measure.sign * pd.DataFrame(measures.values(part.metrics, measure)).reindex(columns=METHODS)


def leader(early: np.ndarray) -> int:
    return int(early.mean(1).argmax())


def cautious(early: np.ndarray) -> int:
    """Choose what `TrialResult.best` names, and `none` if nothing is decided."""
    scores = {name: [[value] for value in row] for name, row in zip(METHODS, early)}
    return METHODS.index(TrialResult(scores, {}, 1, True).best or "none")


RULES: dict[str, Rule] = {"trial": leader, "cautious trial": cautious}
ALWAYS: dict[str, Rule] = {name: lambda _, place=place: place for place, name in enumerate(METHODS)}


def lost(panel: Panel, choose: Rule, share: float, repeats: int = 3) -> float:
    """Return the mean loss over DRAWS draws of the seeds of the trial."""
    draw, total = np.random.default_rng(0), 0.0
    for _ in range(DRAWS):
        order = draw.permutation(panel.final.shape[1])
        judged = panel.final[:, order[repeats:]].mean(1)
        chosen = choose(panel.early[share][:, order[:repeats]])
        total += (judged.max() - judged[chosen]) / np.ptp(judged)
    return total / DRAWS


def losses(found: list[Panel], choose: Rule, share: float, repeats: int = 3) -> dict[str, list[float]]:
    """Return the losses in each of GROUPS, of the panels that count at this share and have seeds left to judge by."""
    counted = [panel for panel in found if share in panel.early and panel.final.shape[1] > repeats]
    told = [(panel.domain, lost(panel, choose, share, repeats)) for panel in counted]
    return {name: [loss for domain, loss in told if name in ("all", domain)] for name in GROUPS}


def cell(values: Sequence[float]) -> str:
    """Return a mean with its interval over panels and, after a semicolon, its range when any one panel is left out."""
    if len(values) < 3:
        return f"{np.mean(values):.2f} ({len(values)})" if len(values) else ""
    found, array = estimate(values), np.asarray(values)
    fewer = [np.delete(array, out).mean() for out in range(len(array))]
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}; {min(fewer):.2f} to {max(fewer):.2f}] ({len(array)})"


def tables(found: Sequence[Panel]) -> dict[str, pd.DataFrame]:
    """Return the tables of the evidence by title."""
    # at the last share, all panels count
    by_share = {f"always {name}": (rule, SHARES[-1], 3) for name, rule in ALWAYS.items()}
    by_share |= {f"{name} of {s:.0%}": (rule, s, 3) for name, rule in RULES.items() for s in SHARES}
    by_repeats = {f"trial of 20%, repeats: {n}": (leader, 0.2, n) for n in (1, 2, 3, 5)}
    by_repeats |= {f"cautious trial of 20%, repeats: {n}": (cautious, 0.2, n) for n in (2, 3, 5)}
    made = {}
    for title, choices in (("by share", by_share), ("by repeats", by_repeats)):
        cells = {name: losses(found, *choice) for name, choice in choices.items()}
        table = pd.DataFrame.from_dict(cells, orient="index").map(cell).rename(columns={"all": "all panels"})
        made[title] = table.rename_axis("choice").reset_index()
    return made | {"agreement": agreement(found)}


def agreement(found: Sequence[Panel]) -> pd.DataFrame:
    """Return, for each share, how the order and the signs of all seeds early on agree with those at the end."""
    rows = []
    for share in SHARES:
        known = [panel for panel in found if share in panel.early]
        ranks = [distributions.spearmanr(p.early[share].mean(1), p.final.mean(1)).statistic for p in known]
        right = [
            np.sign(gap.mean) == np.sign((p.early[share][i] - p.early[share][0]).mean())
            for p in known
            for i in range(1, len(METHODS))
            if (gap := estimate(p.final[i] - p.final[0])).low * gap.high > 0
        ]
        read = np.mean([p.read[share] for p in known])
        row = {"share": f"{share:.0%}", "read at": f"{read:.0%}", "panels": len(known)}
        row |= {"rank correlation": f"{np.mean(ranks):.2f}", "signs right": f"{np.mean(right):.0%}"}
        rows.append(row | {"of decided differences": len(right)})
    return pd.DataFrame(rows)


def draw(parts: Sequence[Results]) -> Figure:
    found = panels(parts)
    looks = (("the leader", leader, "#0072B2", "o"), ("cautious", cautious, "#7A7A7A", "s"))
    tried = {(rule, share): losses(found, rule, share) for rule in RULES.values() for share in SHARES}
    always = losses(found, ALWAYS["fire"], SHARES[-1])
    figure, grid = plt.subplots(1, 4, figsize=(9, 2.6), sharey=True)
    for axis, domain in zip(grid, GROUPS):
        for place, (title, rule, colour, marker) in enumerate(looks):
            cells = {100 * share + place: tried[rule, share][domain] for share in SHARES}
            known = {x: estimate(each) for x, each in cells.items() if len(each) > 2}
            known = pd.DataFrame(known, Estimate._fields).T
            axis.plot(known.index, known["mean"], color=colour, marker=marker, markersize=4, label=title)
            axis.vlines(known.index, known["low"], known["high"], color=colour, linewidth=1)
        if always[domain]:
            plot.draw_level(axis, float(np.mean(always[domain])), "fire")
        axis.set_title(f"{domain} ({sum(domain in ('all', panel.domain) for panel in found)} panels)")
        axis.set(xlabel="trial, % of the training", xlim=(0, 53), ylim=(-0.1, 1.1))
    grid[0].set_ylabel("share of the range lost")
    return plot.with_legend(figure, grid)


def fresh(results: Results) -> pd.DataFrame:
    """Return one row per panel and seed with full runs of all METHODS and as many trials of each, of a share of .2.

    The loss of each choice is that of the full runs of the same seed, in which a run that failed counts as the worst.
    """
    rows = []
    for part in filter(measures.of, settings(results)):
        measure = measures.of(part)[0]
        logged = measures.ordered_rows(part.metrics, measure.metric)
        if measure.reduce == "late_phases":  # the last task may have been cut short
            logged = logged[logged["phase"] < logged.groupby(["label", "seed"])["phase"].transform("max")]
        ends = measure.sign * logged.groupby(["seed", "label"])["value"].last()
        failed = part.runs[(part.runs["label"] == part.runs["method"]) & (part.runs["status"] == "failed")]
        full = full_runs(part.plain, measure)
        known = {"trial.share", "trial.repeat"}
        changed = {label: each for label, each in part.overrides.items() if each.keys() <= known}
        trials = [label for label, each in changed.items() if float(each.get("trial.share", 1)) == 0.2]
        for seed, own in part.finished[part.finished["label"].isin(trials)].groupby("seed"):
            tried = [own["label"][own["method"] == method] for method in METHODS]
            final = full.reindex([seed]).iloc[0]
            lost = final.index.isin(failed["method"][failed["seed"] == seed])
            counts = {*map(len, tried)}
            if len(counts) > 1 or 0 in counts or (final.isna() != lost).any() or lost.all():
                continue
            early = np.array([ends[seed][labels] for labels in tried])
            final = final.fillna(final.min())
            loss = (final.max() - final) / np.ptp(final)
            row = {"experiment": part.first["experiment"], "seed": seed, "repeats": max(counts)}
            for title, chosen in (("leader", METHODS[leader(early)]), ("cautious", METHODS[cautious(early)])):
                row |= {title: chosen, f"loss of the {title}": loss[chosen]}
            rows.append(row | {f"loss of {method}": loss[method] for method in ("none", "fire")})
    return pd.DataFrame(rows)


def verdict(table: pd.DataFrame) -> str:
    """Return whether trials hold up on fresh seeds, by the rule of docs/concepts/statistics.md: 25 seeds in five panels."""
    table = table[table["seed"].between(26, 30) & (table["repeats"] == 3)]
    losses_of = table.groupby("experiment")[["loss of the leader", "loss of none", "loss of fire"]].mean()
    if len(table) < 25 or len(losses_of) < 5:
        return f"Open: {len(table)} of 25 seeds, in {len(losses_of)} of 5 panels."
    gain, mean = estimate(losses_of["loss of none"] - losses_of["loss of the leader"]), losses_of.mean()
    behind = mean["loss of the leader"] > mean["loss of fire"]
    said = "does not hold up" if behind else "holds up" if gain.low > 0 else "is not decided"
    numbers = ", ".join(f"{name} {value:.2f}" for name, value in mean.items())
    return f"The trial {said}: {numbers}; none minus trial {gain.mean:.2f} [{gain.low:.2f}, {gain.high:.2f}]."


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m analysis.trial_evidence", description=__doc__)
    parser.add_argument("--root", help="folder of runs: compare its trials with full runs of the same seeds")
    with clean_exit():
        if root := parser.parse_args().root:
            results = load(root)
            say(results.problems)
            table = fresh(results)
            print(f"{markdown(table.round(2))}\n\n{verdict(table) if len(table) else ''}")
        else:
            parts = settings(at_most(load_exported().matching(PATTERNS), "medium"))
            for title, table in tables(panels(parts)).items():
                print(f"{title}\n\n{markdown(table)}\n")
