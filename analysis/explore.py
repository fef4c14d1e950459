"""One HTML page on which a reader explores results: choose a panel, switch methods on and off, see single seeds.

The page needs no server and no network: the drawing library, Vega-Lite, is inside. Every mean, interval and difference on
it is taken from the frame of estimates, and the script of the page computes none.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import estimates, names, paper, plot
from analysis.figures.curves import points, random_level
from analysis.measures import Measure
from analysis.rendering import difference_text, mean_text, p_text, short
from analysis.runs import SIZES, Results, settings
from fire_core.errors import UserError

KINDS = {"result": "result", "boundary": "right after the last boundary"}  # kind of estimate: its heading


def page(results: Results) -> str:
    """Return the page of the finished runs. Raises UserError if there is none, or if vl-convert-python is missing."""
    try:
        import vl_convert
    except ImportError as error:
        raise UserError("vl-convert-python is missing: make explore installs it") from error
    if results.finished.empty:
        raise UserError("no finished run to explore: run something first, as in make vision-sweep")
    text = json.dumps(page_data(results), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    html = Path(__file__).with_name("explore.html").read_text(encoding="utf-8")
    library = vl_convert.javascript_bundle().replace("</script", "<\\/script")  # Vega-Lite
    return html.replace("{{ library }}", library, 1).replace("{{ data }}", text, 1)


def page_data(results: Results) -> dict[str, Any]:
    """Return what the page knows: the methods in the order of every legend, and the settings, the paper's panels first.
    Methods are named by their place in that order, and runs by their place in the list of their setting."""
    looks, plain = names.looks(results), set(results.runs["method"])
    labels = {label: place for place, label in enumerate(looks)}
    methods = [
        {"method": look.name, "colour": look.colour}
        | {"bright": label in names.INTEREST, "variant": label not in plain}
        for label, look in looks.items()
    ]
    frame, panels = estimates.sides(estimates.frame(results)), paper.panels()

    def rank(part: Results) -> tuple[int, bool, str, int]:
        name, size = part.first["experiment"], SIZES.index(part.first["size"])
        return panels.index(name) if name in panels else len(panels), not part.first["figure"], name, size

    told = [_setting(part, estimates.of(frame, part), labels) for part in sorted(settings(results), key=rank)]
    return {"methods": methods, "settings": [setting for setting in told if setting["measures"]]}


def _setting(part: Results, rows: pd.DataFrame, labels: dict[str, int]) -> dict[str, Any]:
    """Return one experiment at one size on one data set: its runs, its measures and the curves these are read from.

    The script in explore.html reads the keys.
    """
    first, runs = part.first, part.finished.assign(place=part.finished["label"].map(labels))
    changed = runs["dirty"].astype(str).map({"True": " with changes"}).fillna("")
    runs = runs.assign(code=runs["commit"] + changed).sort_values(["place", "seed"], kind="stable")
    known, places = runs["label"].unique(), {run: i for i, run in enumerate(zip(runs["label"], runs["seed"]))}
    figure, told, curves = first["figure"], list[dict[str, Any]](), dict[str, dict[str, Any] | None]()
    for kind, _, measure, values in estimates.numbers(part):
        of_measure = rows[(rows["kind"] == kind) & (rows["metric"] == measure.key)]
        if of_measure.empty:
            continue
        curve = f"{measure.metric}{', ends of phases' * (measure.reduce == 'late_phases')}"
        if kind == "result" and curve not in curves:
            curves[curve] = _curve(part, measure, labels, places)
        about = {"key": measure.key, "kind": KINDS[kind], "curve": curve}
        about["level"] = _short(random_level(part, measure.metric))
        about["values"] = [_short(values.get(label, {}).get(seed)) for label, seed in places]
        told.append(about | _measure(of_measure, labels))
    return {
        "experiment": first["experiment"],
        "panel": names.panel(first["experiment"]),
        "group": f"Figure {figure.removeprefix('fig')[:1]}" if figure else "Beside the paper's panels",
        "size": f"{first['size']}, {names.data(first['data'])}",
        "title": names.title(part, ", "),
        "premise": plot.premise_text(part),
        "source": plot.provenance(runs),
        "runs": runs[["place", "seed", "code", "trunk_commit"]].to_numpy().tolist(),
        "open": [labels[label] for label in known if label in names.INTEREST] or [labels[known[0]]],
        "measures": told,
        "curves": curves,
    }


def _measure(rows: pd.DataFrame, labels: dict[str, int]) -> dict[str, Any]:
    """Return the estimates of one measure, with the text of the tables: [method, mean, low, high, seeds, text] and
    [method, reference, text of the difference, word, pairs, p]."""
    rows = rows.assign(place=rows["label"].map(labels)).sort_values("place", kind="stable")
    own = estimates.means(rows).to_dict("records")
    ends = [[*(_short(row[n]) for n in ("place", "mean", "low", "high", "n")), _text(row)] for row in own]
    gaps = [
        [row["place"], row["reference"], difference_text(row), row["word"], row["pairs"], p_text(row["p"])]
        for row in rows[rows["reference"] != ""].to_dict("records")
    ]
    better = "higher" if rows["higher_is_better"].iloc[0] else "lower"
    return {"title": rows["measure"].iloc[0], "better": better if gaps else "", "ends": ends, "gaps": gaps}


def _text(row: Mapping[str, Any]) -> str:
    """Return a mean with its interval; what was measured at a boundary has three significant digits."""
    if row["kind"] == "result":
        return mean_text(row)
    mean, low, high = (short(row[name]) for name in ("mean", "low", "high"))
    return mean if pd.isna(row["low"]) else f"{mean} [{low}, {high}]"


def _curve(
    part: Results, measure: Measure, labels: dict[str, int], places: dict[tuple[str, int], int]
) -> dict[str, Any] | None:
    """Return the curves of a metric, of each run and with the band of each method, or None if they have one point."""
    rows, unit, marks, late = points(part, measure, paper=False)
    if rows["x"].nunique() < 2:
        return None
    grids, limits = dict[tuple[float, ...], int](), None
    if late is not None:
        low, high = (rows.loc[rows["x"] >= late, "value"].agg(each) for each in ("min", "max"))
        room = 0.08 * (high - low) + 1e-4
        limits = [_short(low - room), _short(high + room)]

    def numbers(frame: pd.DataFrame, *columns: str) -> list[Any]:
        grid = grids.setdefault(tuple(_short(x) for x in frame["x"]), len(grids))
        return [grid, *([_short(value) for value in frame[column]] for column in columns)]

    seeds = [[places[run], *numbers(own, "value")] for run, own in rows.groupby(["label", "seed"])]
    columns = ("mean", "low", "high")
    bands = [[labels[name], *numbers(plot.band(own), *columns)] for name, own in rows.groupby("label")]
    drawn = {"unit": unit, "boundaries": marks, "limits": limits, "seeds": seeds, "bands": bands}
    return drawn | {"grids": [list(grid) for grid in grids]}


def _short(value: Any) -> Any:
    """Return a number with six significant digits, as in the committed results, None for NaN, and text unchanged."""
    if value is None or isinstance(value, str):
        return value
    number = float(f"{value:.6g}")
    return None if number != number else int(number) if number.is_integer() else number
