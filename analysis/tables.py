"""Tables of results as Markdown, CSV and LaTeX, and REPRODUCED.md, whose numbers are never typed.

python -m analysis.tables --write REPRODUCED.md          from analysis/results
python -m analysis.tables --root runs --out runs/tables  every table in three formats
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import claims, curves, measures, paper, style
from analysis.benchmark_tables import RESULTS, tables_of
from analysis.figure import experiment_of, names_of, open_results, plain, with_finished_runs
from analysis.load import Results, write_frame
from analysis.stats import Estimate, estimate, paired_difference
from analysis.summary import digits_of, interval_text, number
from analysis.tabulate import latex, markdown
from fire_core.errors import UserError


def joined(values: pd.Series) -> str:
    """The distinct values; several are called mixed, and more than four are counted (runs.csv has them all)."""
    found = sorted(set(map(str, values)))
    if len(found) == 1:
        return found[0]
    shown = found if len(found) <= 4 else [*found[:3], f"{len(found) - 3} more"]
    return f"MIXED: {', '.join(shown)}"


def value_text(value: Estimate | None) -> str:
    if value is None:
        return "-"
    digits = digits_of([value.value])
    return f"{number(value.value, digits)} {interval_text(value.low, value.high, digits)}"


def gain_text(value: Estimate | None, digits: int | None = None) -> str:
    if value is None:
        return "-"
    digits = digits_of([value.value]) if digits is None else digits
    if value.low is None:
        return f"{number(value.value, digits, True)} (one seed)"
    return f"{number(value.value, digits, True)} {interval_text(value.low, value.high, digits, True)}"


def end_value_table(part: Results) -> pd.DataFrame:
    """One row a method and measure of one setting: the paper's end value (its data and size), ours with
    interval, the difference between them, ours and theirs relative to `none`."""
    experiment = experiment_of(part)
    theirs = paper.end_values(*names_of(part))
    rows = []
    for place, measure in enumerate(measures.measures_of(part, experiment)):
        ends = measures.end_values(part.metrics, measure)
        labels = style.ordered(ends["label"].unique())
        digits = digits_of(ends["value"])
        for label in labels:
            values = measures.by_seed(ends, label)
            value = estimate(list(values.values()))
            base = measures.baseline_of(label, labels)
            gap = (
                paired_difference(values, measures.by_seed(ends, base)) if base not in (None, label) else None
            )
            known = theirs.get(label) if place == 0 else None
            same_size = known is not None and part.finished["size"].iloc[0] == "paper"
            gap_to_paper = value.value - known if same_size else None
            no_base = known is None or label == "none" or "none" not in theirs
            rows.append(
                {
                    "measure": measure.title,
                    "method": style.look(label).name,
                    "ours": number(value.value, digits),
                    "95 % interval": interval_text(value.low, value.high, digits),
                    "seeds": value.n,
                    "minus none": gain_text(gap, digits),
                    "paper": number(known, digits) or "-",
                    "ours minus paper": number(gap_to_paper, digits, True)
                    or ("other data" if known else "-"),
                    "paper, minus none": "-" if no_base else number(known - theirs["none"], digits, True),
                }
            )
    return pd.DataFrame(rows)


def claim_table(results: Results) -> pd.DataFrame:
    """One row a claim (and data set, where a size was run on several): the paper's pair of end values, then ours at each
    size with the paired gain (positive = as claimed) and the verdict."""
    known_settings = claims.settings(results)
    rows = []
    for claim in claims.CLAIMS:
        first, second = claims.paper_values(claim)
        known = first is not None and second is not None
        paper_pair = f"{number(first)} : {number(second)}" if known else "-"
        (large, *_), small = (claims.judge(claim, known_settings, size) for size in ("paper", "small"))
        stand_in = claim.source in claims.STAND_INS
        shared = {"panel": claim.experiment, "better > worse": claim.text, "paper": paper_pair}
        shared["at size paper"] = "-" if stand_in else _verdict_text(large)
        rows += [shared | _small_cells(verdict) for verdict in small]
    return pd.DataFrame(rows)


def _small_cells(verdict: claims.Verdict) -> dict[str, str]:
    return {
        "at size small": verdict.word,
        "ours at small": f"{_short(verdict.better)} : {_short(verdict.worse)}" if verdict.gain else "-",
        "gain [95 %]": gain_text(verdict.gain),
        "seeds": str(verdict.gain.n) if verdict.gain else "-",
        "data at small": verdict.data or "-",
        "source": verdict.claim.source,
    }


def _verdict_text(verdict: claims.Verdict) -> str:
    if verdict.gain is None:
        return verdict.word
    numbers = f"{_short(verdict.better)} : {_short(verdict.worse)}"
    return (
        f"{verdict.word}: {numbers}, gain {gain_text(verdict.gain)}, {verdict.gain.n} seeds, {verdict.data}"
    )


def _short(value: Estimate | None) -> str:
    return number(value.value) if value else "-"


def contrast_table(part: Results) -> pd.DataFrame:
    """FIRE minus every other method of one setting in the headline measure, paired by seed, with the word
    for it."""
    measure = measures.measures_of(part, experiment_of(part))[0]
    ends = measures.end_values(part.metrics, measure)
    ours = measures.by_seed(ends, "fire")
    sign = 1.0 if measure.higher_is_better else -1.0
    rows = []
    for label in style.ordered(ends["label"].unique()):
        gap = paired_difference(ours, measures.by_seed(ends, label)) if label != "fire" else None
        if gap is None:
            continue
        if gap.low is None or gap.high is None:
            text = "one seed: nothing can be said"
        elif gap.excludes_zero:
            text = "FIRE is better" if sign * gap.value > 0 else "FIRE is worse"
        else:
            text = "cannot be told apart"
        cells = {"FIRE minus": style.look(label).name, "difference [95 %]": gain_text(gap), "seeds": gap.n}
        rows.append(cells | {"in words": text})
    return pd.DataFrame(rows, columns=["FIRE minus", "difference [95 %]", "seeds", "in words"])


def boundary_table(results: Results) -> pd.DataFrame:
    """Right after the last boundary, per setting and method: DfI before and after, distance moved (also as a share of what
    a full reset of the same weights would have moved), time; means over seeds of sums over the changed matrices."""
    frame = results.boundaries
    if frame.empty:
        return pd.DataFrame()
    last = frame.groupby(["experiment", "size", "data", "label", "seed"])["phase"].transform("max")
    frame = frame[frame["phase"] == last]
    rows = []
    for (experiment, size, data), setting in frame.groupby(["experiment", "size", "data"]):
        for label in style.ordered(setting["label"]):
            group = setting[setting["label"] == label]
            cells = {"experiment": experiment, "size": size, "data": data, "method": style.look(label).name}
            cells["matrices"] = int(group["matrices"].max())
            for title, key in (("DfI before", "dfi_before"), ("DfI stored after", "dfi_after"),
                               ("DfI of factor", "dfi_factor"), ("SFE", "sfe")):  # fmt: skip
                cells[title] = _compact(pd.to_numeric(group[key]).mean())
            cells["SFE / full reset"] = _compact(pd.to_numeric(group["sfe_share"]).mean())
            cells["seconds"] = _compact(pd.to_numeric(group["seconds"]).mean())
            cells["seeds"] = group["seed"].nunique()
            rows.append(cells)
    return pd.DataFrame(rows)


def _compact(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.3g}"


def cost_table(results: Results) -> pd.DataFrame:
    """Seconds of training (a first phase that several methods share apart), of the boundaries, their share of the training
    after it: means over seeds."""
    frame = results.costs
    rows = []
    for (experiment, size, data), setting in frame.groupby(["experiment", "size", "data"]):
        for label in style.ordered(setting["label"]):
            group = setting[setting["label"] == label]
            train, shared, boundary = (
                pd.to_numeric(group[key]).mean()
                for key in ("train_seconds", "shared_seconds", "boundary_seconds")
            )
            share = boundary / (train + boundary) if train and not pd.isna(train) else float("nan")
            rows.append(
                {
                    "experiment": experiment,
                    "size": size,
                    "data": data,
                    "method": style.look(label).name,
                    "training, s": _compact(train),
                    "shared first phase, s": _compact(shared),
                    "boundaries, s": _compact(boundary),
                    "share": "-" if pd.isna(share) else f"{100 * share:.2g} %",
                    "seeds": group["seed"].nunique(),
                    "machine": joined(group["machine"]),
                }
            )
    return pd.DataFrame(rows)


def learning_table(results: Results) -> pd.DataFrame:
    """Reinforcement learning in the half that all methods share: returns right before the boundary against those of
    random actions (where these were not played: of the untrained policy), paired by seed."""
    rows = []
    for part in curves.settings(results):
        logged = set(part.metrics["metric"])
        if "eval_return" not in logged:
            continue
        shared = part.metrics[part.metrics["label"] == style.ordered(part.metrics["label"].unique())[0]]
        played = "random_return" in logged
        level = measures.first_values(shared, "random_return" if played else "eval_return")
        first = part.finished.iloc[0]
        for metric, title in (("eval_return", "evaluation"), ("train_return", "training episodes")):
            reached = measures.before_boundary(shared, metric)
            if not reached:
                continue
            rows.append(
                {
                    "experiment": first["experiment"],
                    "size": first["size"],
                    "data": first["data"],
                    "return of": title,
                    "before the boundary": value_text(estimate(list(reached.values()))),
                    "level": value_text(estimate(list(level.values()))),
                    "level is": "random actions" if played else "untrained policy",
                    "gain": gain_text(paired_difference(reached, level)),
                    "seeds": len(reached),
                }
            )
    return pd.DataFrame(rows)


def ablation_table(results: Results) -> pd.DataFrame:
    """Runs with overrides against the plain run of the same method, headline measure, paired by seed."""
    rows = []
    for part in curves.settings(results):
        found = measures.measures_of(part, experiment_of(part))
        if not found:
            continue
        ends = measures.end_values(part.metrics, found[0])
        for label in style.ordered(ends["label"].unique()):
            method, overrides = style.split_label(label)
            if not overrides:
                continue
            values, plain = measures.by_seed(ends, label), measures.by_seed(ends, method)
            first = part.finished.iloc[0]
            rows.append(
                {
                    "experiment": first["experiment"],
                    "size": first["size"],
                    "data": first["data"],
                    "method": style.look(method).name,
                    "changed": overrides,
                    "value": value_text(estimate(list(values.values()))),
                    "minus unchanged": gain_text(paired_difference(values, plain)),
                    "seeds": len(values),
                }
            )
    return pd.DataFrame(rows)


def not_run(results: Results) -> pd.DataFrame:
    """The paper's panels without a finished run at the paper's size, with the command that makes them."""
    done = set(results.finished[results.finished["size"] == "paper"]["experiment"])
    scripts = {"fig2": "vision/train.py", "fig3": "language/train.py", "fig4a": "rl/dqn/train.py"}
    rows = []
    for figure, panel in paper.cells():
        name = f"{figure}_{panel}"
        if name not in done:
            script = next((s for head, s in scripts.items() if figure.startswith(head)), "rl/sac/train.py")
            methods = ",".join(style.ordered(paper.end_values(figure, panel)))
            command = f"python {script} -m experiment={name} size=paper method={methods} seed=1,2,3"
            rows.append({"panel": name, "status at size paper": "not run", "command": f"`{command}`"})
    return pd.DataFrame(rows)


def provenance_lines(part: Results) -> str:
    """Where a setting's numbers come from and how to make them again."""
    runs = part.finished
    seeds = ",".join(map(str, sorted(runs["seed"].astype(int).unique())))
    plain = [label for label in style.ordered(runs["label"]) if not style.split_label(label)[1]]
    command = str(runs[runs["label"] == (plain or list(runs["label"]))[0]]["command"].iloc[0])
    method = command.split("method=")[1].split()[0]
    again = command.replace(f"method={method}", f"method={','.join(plain or [method])}") + f" seed={seeds}"
    again = again.replace(".py ", ".py -m ", 1)
    dirty = " (some from a changed checkout)" if runs["dirty"].astype(str).eq("True").any() else ""
    return (
        f"Size {joined(runs['size'])}; data {joined(runs['data'])}; seeds {seeds}; machine {joined(runs['machine'])}; "
        f"commit {joined(runs['commit'])}{dirty}.\n\n`{again}`"
    )


HEAD = """# Reproduced

For each claim of the paper: its number, ours, at which size and on which data, how sure, and how to run it again.
Written by `python -m analysis.tables --write REPRODUCED.md` from `analysis/results/`; do not edit.

How to read it

- **Size** `paper` is the paper's own setting; `small` is a setting for a laptop on data that ships with the project.
  Only `paper` can reproduce a number of the paper. At `small` the question is whether the same method wins.
- **Paper** columns are read off the paper's figures (`analysis/paper/`), on the paper's data. The difference between
  a `small` result and the paper's number says nothing by itself.
- **Intervals** are 95 %: Student's t over seeds below 10 seeds, percentile bootstrap from 10 on; one seed has none.
  Differences are paired by seed: same data order, same first weights. With 3 seeds only large effects can be told
  from chance, and one in twenty of many intervals misses its truth.
- What differs from the paper or its code on purpose: `DEVIATIONS.md`.
"""


SAID = {
    "FIRE is better": "FIRE is better than",
    "FIRE is worse": "FIRE is worse than",
    "cannot be told apart": "FIRE cannot be told apart from",
    "one seed: nothing can be said": "one seed, nothing can be said against",
}
CLAIM_NOTE = """Each row: two methods, the one that is said to end better first. `paper` and `ours` give both end values; the
gain is positive when it falls as claimed. *holds* and *the opposite holds*: the interval of the gain excludes 0 at
size small, which speaks for or against the claim there and does not reproduce its number. *cannot be told apart*: it
includes 0.
"""


def is_waiting(table: pd.DataFrame) -> pd.Series:
    """Rows of `claim_table` without a run at any size."""
    return table[["at size paper", "at size small"]].isin(["not run", "-"]).all(axis=1)


def in_short(results: Results) -> list[str]:
    """One line a setting: what FIRE's paired differences to the other methods allow to say."""
    lines = []
    for part in curves.settings(results):
        if not measures.measures_of(part, experiment_of(part)):
            continue
        table = contrast_table(plain(part))
        words = {text: list(rows["FIRE minus"]) for text, rows in table.groupby("in words", sort=False)}
        said = "; ".join(f"{SAID[text]} {', '.join(names)}" for text, names in words.items())
        first = part.finished.iloc[0]
        headline = measures.measures_of(part, experiment_of(part))[0].title
        if not said:
            continue
        place = f"{first['experiment']} (size {first['size']}, {first['data']}, {curves.seeds_text(plain(part).finished)})"
        lines.append(f"- **{place}**, {headline}: {said}.")
    return lines


def reproduced(results: Results, benchmarks: Path = RESULTS) -> str:
    """The text of REPRODUCED.md: `results`, then the benchmarks whose CSV files lie in that folder."""
    finished = results.finished
    blocks = [HEAD]
    for size, group in finished.groupby("size"):
        blocks.append(f"Runs at size {size}: {len(group)} in {group['experiment'].nunique()} experiments.\n")
    blocks += ["## In short\n", *in_short(results), "\n## Claims\n", CLAIM_NOTE]
    table = claim_table(results)
    waiting = is_waiting(table)
    blocks += [markdown(table[~waiting]), "\nClaims of the paper that no run here speaks to:\n"]
    blocks.append(markdown(table[waiting][["panel", "better > worse", "paper", "at size paper", "source"]]))
    blocks.append("\n## End values\n")
    for part in curves.settings(results):
        if not measures.measures_of(part, experiment_of(part)):
            continue
        first = part.finished.iloc[0]
        blocks.append(f"### {first['experiment']}, size {first['size']}, data {first['data']}\n")
        blocks.append(provenance_lines(part) + "\n")
        table = end_value_table(part)
        for title, rows in table.groupby("measure", sort=False):
            blocks.append(f"{title}\n\n{markdown(rows.drop(columns='measure'))}\n")
        contrasts = contrast_table(part)
        if len(contrasts):
            blocks.append(f"FIRE against each other method, first measure above\n\n{markdown(contrasts)}\n")
    for title, table in (
        ("Right after the boundary: how orthogonal, how far moved", boundary_table(results)),
        ("Learning before the boundary", learning_table(results)),
        ("Cost", cost_table(results)),
        ("Ablations: one setting changed", ablation_table(results)),
        ("Not run at the paper's size", not_run(results)),
    ):
        blocks.append(f"\n## {title}\n")
        blocks.append(markdown(table) if len(table) else "Nothing run yet.")
    blocks.append("\n## Benchmarks\n")
    for benchmark, table, origin in tables_of(benchmarks):
        blocks.append(f"### {benchmark.title}\n\n{benchmark.legend} {origin}\n\n{markdown(table)}\n")
    return "\n".join(blocks) + "\n"


def write_all(results: Results, out: Path, benchmarks: Path = RESULTS) -> list[Path]:
    """Every table as .md, .csv and .tex, those of the benchmarks too."""
    ends = [end_value_table(p).assign(experiment=experiment_of(p), size=p.finished["size"].iloc[0],
            data=p.finished["data"].iloc[0]) for p in curves.settings(results) if len(p.metrics)]  # fmt: skip
    tables = {
        "claims": claim_table(results),
        "end_values": pd.concat(ends, ignore_index=True) if ends else pd.DataFrame(),
        "boundaries": boundary_table(results),
        "learning": learning_table(results),
        "costs": cost_table(results),
        "ablations": ablation_table(results),
        "not_run": not_run(results),
    }
    tables |= {benchmark.file: table for benchmark, table, _ in tables_of(benchmarks)}
    paths = []
    for name, table in tables.items():
        if len(table):
            paths.append(write_frame(table, out / f"{name}.csv"))
            tex = latex(table, name.replace("_", " "), f"tab:{name}")
            for ending, text in (("md", markdown(table) + "\n"), ("tex", tex)):
                path = out / f"{name}.{ending}"
                path.write_text(text, encoding="utf-8")
                paths.append(path)
    return paths


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.tables", description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="analysis/results", help="an export or a folder of runs")
    parser.add_argument("--write", default=None, metavar="FILE", help="write REPRODUCED.md to this file")
    parser.add_argument("--out", default=None, help="folder for every table as .md, .csv, .tex")
    options = parser.parse_args(given)
    try:
        results = with_finished_runs(open_results(options.root), options.root)
        if options.write:
            Path(options.write).write_text(reproduced(results), encoding="utf-8")
            print(options.write)
        for path in write_all(results, Path(options.out)) if options.out else []:
            print(path)
        if not options.write and not options.out:
            print(reproduced(results))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
