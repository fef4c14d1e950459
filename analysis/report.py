"""One HTML file without anything outside it: what was run where, verdicts, figures, tables, reports to
explore.

    python -m analysis.report --root runs [--out runs/report.html]
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from analysis import curves, fig2, fig3, fig4, fig5, measures, probes, result_tables, style
from analysis.benchmark_tables import tables_of
from analysis.figure import experiment_of, open_results
from analysis.folders import read_boundaries
from analysis.load import Results
from fire_core.errors import UserError

TEMPLATE = Path(__file__).with_name("report_template.html")
FIGURES = (
    ("fig2", "Figure 2: vision", fig2.draw, ("fig2",)),
    ("probes", "Probes of plasticity", probes.draw, probes.PROBES),
    ("fig3", "Figure 3: language", fig3.draw, ("fig3",)),
    ("fig4", "Figure 4: reinforcement learning", fig4.draw, ("fig4",)),
    ("fig5", "Figure 5: iterations, and the weights after the reset", fig5.draw, fig5.PREFIXES),
)
GOOD, BAD = ("reproduced", "holds"), ("not reproduced", "the opposite holds")
CLAIM_NOTE = (
    '<p class="note">Two methods at the end of training; the gain is positive when it falls as claimed. Only size paper can '
    "reproduce a number of the paper; size small runs shorter, mostly on other data.</p>"
)
KEPT = ("name", "action", "dfi_before", "dfi_after", "dfi_factor", "sfe", "sfe_relative", "residual")


def table_html(frame: pd.DataFrame, chips: Sequence[str] = ()) -> str:
    """A frame of text cells; columns in `chips` hold verdicts and are coloured by their first words."""
    if frame.empty:
        return '<p class="note">Nothing run yet.</p>'
    head = "".join(f"<th>{escape(str(column))}</th>" for column in frame.columns)
    rows = []
    for row in frame.itertuples(index=False):
        cells = (
            f"<td>{chip(str(value))}</td>"
            if column in chips
            else f"<td{_wrap(value)}>{escape(str(value))}</td>"
            for column, value in zip(frame.columns, row)
        )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _wrap(value: object) -> str:
    """Long text may break; numbers and names stay on one line."""
    return ' class="long"' if len(str(value)) > 60 else ""


def claims_html(table: pd.DataFrame) -> str:
    """Claims with a verdict at some size; the others folded away."""
    verdicts = ("at size paper", "at size small")
    waiting = result_tables.is_waiting(table)
    title = f"{int(waiting.sum())} claims not run at any size"
    folded = f"<details><summary>{title}</summary>{table_html(table[waiting])}</details>"
    return table_html(table[~waiting], verdicts) + folded


def chip(text: str) -> str:
    kind = "good" if text.startswith(GOOD) else "bad" if text.startswith(BAD) else "open"
    return f'<span class="chip {kind}">{escape(text)}</span>'


def picture(figure: style.Figure, caption: str) -> str:
    """The figure as PNG inside the page."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130, metadata={"Software": None})
    style.plt.close(figure)
    data = base64.b64encode(stream.getvalue()).decode()
    return (
        f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def figures_html(results: Results) -> str:
    """Every figure that has runs, sizes apart."""
    blocks = []
    for _, title, draw, prefixes in FIGURES:
        names = [n for n in results.finished["experiment"].unique() if n.startswith(tuple(prefixes))]
        for size in ("paper", "small", "smoke"):
            parts = curves.settings(results.select(experiment=names, size=size)) if names else []
            parts = [part for part in parts if len(part.metrics)]
            if parts:
                blocks.append(f"<h3>{escape(title)}, size {size}</h3>")
                try:
                    blocks.append(picture(draw(parts, False), f"{title}, size {size}"))
                except UserError as error:
                    blocks.append(f'<p class="note">{escape(str(error))}</p>')
    return "".join(blocks) or '<p class="note">No finished run yet.</p>'


def benchmarks_html() -> str:
    """What the benchmarks measured, each folded away under its title."""
    return "".join(
        f"<details><summary>{escape(benchmark.title)}</summary>"
        f'<p class="note">{escape(f"{benchmark.legend} {origin}").replace("`", "")}</p>{table_html(table)}</details>'
        for benchmark, table, origin in tables_of()
    )


def where_table(results: Results) -> pd.DataFrame:
    """One row a setting: how many runs, of what, where."""
    rows = []
    for part in curves.settings(results):
        runs = part.finished
        rows.append(
            {
                "experiment": experiment_of(part),
                "size": runs["size"].iloc[0],
                "data": runs["data"].iloc[0],
                "runs": len(runs),
                "methods": ", ".join(style.ordered(runs["label"])),
                "seeds": " ".join(map(str, sorted(runs["seed"].unique()))),
                "commit": result_tables.joined(runs["commit"]),
                "machine": result_tables.joined(runs["machine"]),
            }
        )
    return pd.DataFrame(rows)


def matrix_reports(results: Results) -> list[dict[str, Any]]:
    """The last boundary report of the lowest seed of every setting and label, numbers to four digits."""
    found = []
    runs = results.finished.sort_values(["experiment", "size", "label", "seed"], kind="stable")
    for run in runs.drop_duplicates(["experiment", "size", "data", "label"]).to_dict("records"):
        reports = read_boundaries(run["path"]) if run["path"] else []
        if not reports or not reports[-1].get("rows"):
            continue
        title = f"{run['experiment']} | {run['size']} | {run['label']} | seed {run['seed']}"
        rows = [
            {key: _short(row.get(key)) for key in KEPT}
            | {"shape": "x".join(map(str, row.get("shape") or []))}
            | ({"action": f"{row.get('action')}: {row['reason']}"} if row.get("reason") else {})
            for row in reports[-1]["rows"]
        ]
        found.append({"title": f"{title} | boundary {reports[-1].get('phase')}", "rows": rows})
    return found


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def page(results: Results) -> str:
    """The whole file as text."""
    claim_table = result_tables.claim_table(results)
    words = pd.concat([claim_table["at size paper"].str.split(":").str[0], claim_table["at size small"]])
    counted = [(word, int((words == word).sum())) for word in (*GOOD, *BAD, "cannot be told apart")]
    counts = "".join(f"<div><b>{number}</b>{escape(word)}</div>" for word, number in counted)
    counts += f"<div><b>{len(results.finished)}</b>finished runs</div>"
    reports = matrix_reports(results)
    explorer = (
        '<div class="controls"><select id="pick" aria-label="run"></select>'
        '<input id="search" type="search" placeholder="filter by name" aria-label="filter">'
        '<span class="note" id="chosen"></span></div><div class="scroll" id="matrices"></div>'
        if reports
        else '<p class="note">Boundary reports are in the run folders; give --root runs.</p>'
    )
    ends = "".join(
        f"<details><summary>{escape(experiment_of(part))}, size {escape(part.finished['size'].iloc[0])}, "
        f"data {escape(part.finished['data'].iloc[0])}</summary>"
        f'<p class="note">{escape(result_tables.provenance_lines(part)).replace("`", "")}</p>'
        f"{table_html(result_tables.end_value_table(part))}<h3>FIRE against each other method</h3>"
        f"{table_html(result_tables.contrast_table(part))}</details>"
        for part in curves.settings(results)
        if measures.measures_of(part, experiment_of(part))
    )
    sections = [
        ("claims", "Claims", CLAIM_NOTE + claims_html(claim_table)),
        ("where", "What was run where", table_html(where_table(results))),
        ("figures", "Figures", figures_html(results)),
        ("ends", "End values", ends or '<p class="note">Nothing run yet.</p>'),
        ("boundary", "Right after the boundary", table_html(result_tables.boundary_table(results))),
        ("matrices-title", "Matrix by matrix", explorer),
        ("learning", "Learning before the boundary", table_html(result_tables.learning_table(results))),
        ("cost", "Cost", table_html(result_tables.cost_table(results))),
        ("ablations", "Ablations", table_html(result_tables.ablation_table(results))),
        ("benchmarks", "Benchmarks", benchmarks_html()),
        ("missing", "Not run at the paper's size", table_html(result_tables.not_run(results))),
    ]  # fmt: skip
    nav = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in sections)
    head = (
        "<header><h1>FIRE: what was run and what it shows</h1>"
        '<p class="note">95 % intervals: Student\'s t over seeds below 10 seeds, bootstrap from 10 on, none for one seed; '
        f"differences are paired by seed.</p><nav>{nav}</nav></header>"
        f'<div class="counts">{counts}</div>'
    )
    body = head + "".join(f'<h2 id="{key}">{escape(title)}</h2>{html}' for key, title, html in sections)
    data = json.dumps(reports, separators=(",", ":")).replace("<", "\\u003c")
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(body=body, reports=data)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="runs", help="run folders, or an export (analysis/results)")
    parser.add_argument("--out", default=None, help="default <root>/report.html")
    options = parser.parse_args(given)
    try:
        results = open_results(options.root)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    path = Path(options.out or Path(options.root) / "report.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(results), encoding="utf-8")
    for problem in results.problems:
        print(f"left out: {problem}", file=sys.stderr)
    print(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB, open it in any browser)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
