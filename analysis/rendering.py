"""Numbers, tables and the templates of the documents as text."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis.measures import digits
from analysis.plot import look


def number(value: float | None, decimals: int = 4, sign: bool = False) -> str:
    """Return `value` with that many decimals, or "-" if it is missing."""
    if value is None or pd.isna(value):
        return "-"
    return f"{value:{'+' if sign else ''}.{decimals}f}"


def spread(mean: float, low: float, high: float, decimals: int = 4, sign: bool = False) -> str:
    """Return for example `0.8443 [0.8359, 0.8528]`, without brackets for one seed."""
    if pd.isna(mean):
        return "-"
    text = number(mean, decimals, sign)
    return text if pd.isna(low) else f"{text} [{number(low, decimals, sign)}, {number(high, decimals, sign)}]"


def mean_text(row: pd.Series, decimals: int | None = None) -> str:
    """Return the mean of a row of estimates with its interval."""
    return spread(
        row["mean"], row["low"], row["high"], digits(row.get("metric", "")) if decimals is None else decimals
    )


def difference_text(row: pd.Series, decimals: int | None = None) -> str:
    """Return the difference of a row of estimates with its interval."""
    mean, low, high = row["difference"], row["difference_low"], row["difference_high"]
    return spread(mean, low, high, digits(row.get("metric", "")) if decimals is None else decimals, sign=True)


def p_text(p: float) -> str:
    """Return a p-value as text: three decimals below 0.1, else two; "-" for NaN."""
    return "-" if pd.isna(p) else "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def short(value: object) -> str:
    """Return a float with three significant digits ("-" for NaN), and any other value as text."""
    return str(value) if not isinstance(value, float) else "-" if pd.isna(value) else f"{value:.3g}"


def plain(text: object) -> str:
    """Return a text that came from a file so that it stays text in Markdown and HTML: one line without control
    characters, tags, links, code fences and column marks. A Markup, which is our own Markdown, is returned unchanged."""
    if isinstance(text, Markup):
        return text
    line = "".join(letter if letter.isprintable() else " " for letter in str(text))
    line = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", line).replace("](", "]\\(").replace("```", "``")
    return line.replace("|", "\\|")


def markdown(table: pd.DataFrame) -> Markup:
    """Return a table as Markdown, its cells as plain text."""
    shown = table.map(lambda cell: plain(cell) if isinstance(cell, str) else cell)
    text = shown.to_markdown(index=False, disable_numparse=True) if len(table) else "Nothing was run yet."
    return Markup(text)


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined,
    finalize=lambda value: plain(value) if isinstance(value, str) else value,
)  # fmt: skip
TEMPLATES.filters |= {"markdown": markdown, "difference": difference_text, "mean": mean_text}
TEMPLATES.filters |= {"number": number, "p": p_text, "name": lambda label: look(label).name, "own": Markup}


def render(template: str, **values: object) -> str:
    """Return the text of templates/`template`.md.j2 with `values`."""
    return TEMPLATES.get_template(f"{template}.md.j2").render(values)
