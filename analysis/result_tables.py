"""Tables of what the runs gave, as data frames of text: end values, claims, differences, boundaries, cost."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import yaml

from analysis import claims, curves, measures, paper, style
from analysis.figure import experiment_of, names_of
from analysis.load import Results
from analysis.stats import Estimate, estimate, paired_difference
from analysis.summary import digits_of, interval_text, number

EXPERIMENTS = Path(__file__).resolve().parents[1] / "conf" / "experiment"
SETTING = (
    "protocol", "data", "model", "batch_size", "learning_rate", "shape", "context", "phases", "total_steps", "midpoint",
    "steps", "actor", "critic", "network", "corpora", "train_tokens", "eval_epsilon", "eval_episodes", "eval_max_steps",
)  # fmt: skip
"""The lines of an experiment that say what was trained on what, and for how long."""


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
    theirs = paper.end_values(*claims.SAME_CELL.get(experiment_of(part), names_of(part)))
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
                    or ("other size" if known else "-"),
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


def is_waiting(table: pd.DataFrame) -> pd.Series:
    """Rows of `claim_table` without a run at any size."""
    return table[["at size paper", "at size small"]].isin(["not run", "-"]).all(axis=1)


def provenance_lines(part: Results) -> str:
    """Where a setting's numbers come from and how to make them again."""
    runs = part.finished
    seeds = ",".join(map(str, sorted(runs["seed"].astype(int).unique())))
    others = ", ".join(curves.trunk_commits(runs))
    dirty = f"; shared first phases of commit {others}" if others else ""
    dirty += " (some from a changed checkout)" if runs["dirty"].astype(str).eq("True").any() else ""
    commands = runs.drop_duplicates("label").set_index("label")["command"]
    again = together([str(commands[label]) for label in style.ordered(runs["label"])])
    about = setting_text(experiment_of(part), str(runs["size"].iloc[0]))
    return about + (
        f"Size {joined(runs['size'])}; data {joined(runs['data'])}; seeds {seeds}; machine {joined(runs['machine'])}; "
        f"commit {joined(runs['commit'])}{dirty}.\n\n`{again} seed={seeds}`"
    )


def setting_text(experiment: str, size: str) -> str:
    """What an experiment's file says of data, model and length at a size, on a line of its own; "" without a file."""
    path = EXPERIMENTS / f"{experiment}.yaml"
    if not path.exists():
        return ""
    content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    here = (content.get("at") or {}).get(size) or {}
    told = {key: here[key] for key in SETTING if key in here}
    flow = yaml.safe_dump(told, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return f"`{flow}`\n\n" if told else ""


def together(commands: list[str]) -> str:
    """One sweep that holds every one of `commands`: settings with several values, or absent from some, become lists.

    An absent setting stands for a value that is not written, so such settings are left to the label's own command.
    """
    words = [dict(word.partition("=")[::2] for word in command.split()[2:]) for command in commands]
    shared = [key for key in words[0] if all(key in settings for settings in words)]
    values = {key: ",".join(dict.fromkeys(settings[key] for settings in words)) for key in shared}
    program = " ".join(commands[0].split()[:2])
    return " ".join([f"{program} -m", *(f"{key}={value}" for key, value in values.items())])
