"""Table and figure of one sweep, with a list of the runs that are missing."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import claims, estimates, names, plot, tables
from analysis.figures import CAPTIONS, curves
from analysis.rendering import gain_text, markdown, p_text
from analysis.runs import Results, settings
from analysis.tables import claim_text
from fire_core.files import write_atomic
from harness.status import with_missing

NOTE = (
    "Intervals are 95 %, Student's t over seeds; differences are paired by seed (same data order, same first weights). The "
    "p-values are corrected over the comparisons of a panel after Holm (docs/concepts/statistics.md)."
)
NO_VERDICT = "no verdict: no comparison that is judged is between two of these methods at their own settings"


def show(results: Results, experiments: Sequence[str], root: Path, size: str) -> list[str]:
    """Print and write, below `root`, tables and figure of experiments. Return what failed, is missing or logs no measure."""
    frame = estimates.frame(results)
    ends = frame[frame["kind"] == "result"]
    shown = [(part, rows) for part in settings(results) if len(rows := estimates.of(ends, part))]
    wrong = []
    for name in experiments:
        rows = with_missing(results.select(experiment=name).runs.to_dict("records"))
        told = "{experiment} {label} seed {seed}: {status}"
        wrong += [told.format(**row) for row in rows if row["status"] != "done"]
        if name not in {part.first["experiment"] for part, _ in shown}:
            ran = name in set(results.finished["experiment"])
            reason = "its runs log no known measure" if ran else f"no finished run of size {size}"
            wrong.append(f"{name}: {reason}")
    if shown:
        folder = experiments[0] if len(experiments) == 1 else f"summary/{'+'.join(experiments)[:120]}"
        out, parts = root / folder / size, [part for part, _ in shown]
        out.mkdir(parents=True, exist_ok=True)
        text = "\n".join(section(part, rows) for part, rows in shown)
        write_atomic(out / "table.md", f"{text}\n{NOTE}\n")
        write_atomic(out / "estimates.csv", frame.to_csv(index=False, float_format="%.6g"))
        figure = curves.draw_probes(parts)
        [picture, _] = plot.save(figure, out / "figure", ["png"], CAPTIONS["probes"], parts)
        print("\n" + "\n".join(line for line in text.splitlines() if line))
        print(f"figure: {picture}, beside table.md and estimates.csv")
        if changed := sum(len({*part.methods} - {*part.plain.methods}) for part in parts):
            print(f"figure and verdicts leave out {changed} labels of changed settings, which the table has")
        print("\n".join(sentences(claims.verdicts(results, "all"))) or NO_VERDICT)
    return wrong


def section(part: Results, rows: pd.DataFrame) -> str:
    """Return the tables of one setting with headings, one per measure."""
    text = f"## {part.first['experiment']}: {names.title(part, ', ')}\n"
    for metric, title in rows.drop_duplicates("metric").set_index("metric")["measure"].items():
        text += f"\n### {title[0].upper()}{title[1:]}\n\n{markdown(tables.ends(rows, metric))}\n"
    return text


def sentences(compared: pd.DataFrame) -> list[str]:
    """Return a sentence for FIRE against `none` and for each other claim, by the rule applied to the seeds of the sweep."""
    against_none = (compared["better"] == "fire") & (compared["worse"] == "none")
    told = []
    for row in compared[(compared["kind"] == "claims") | against_none].to_dict("records"):
        if row["verdict"] != "open":
            said = row["verdict"]
        elif row["seeds"] < 2:
            said = ["they share no seed", "one seed decides nothing"][row["seeds"]]
        elif row["premise"]:
            said = "open until at least two seeds of every method are done"
        elif row["figure"].startswith("fig4"):
            said = "not judged, because too few seeds have a return of random actions above 0"
        else:
            said = "plasticity lost? run full_reset with at least two of the seeds"
        p = "" if pd.isna(row["p_holm"]) else f", p {p_text(row['p_holm'])} corrected"
        seeds = names.seeds_text(pd.Series(row["seeds"]))
        told.append(f"{row['experiment']}: {claim_text(row)}: {said} (gain {gain_text(row)}{p}, {seeds})")
    return told
