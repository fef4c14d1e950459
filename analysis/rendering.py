"""Numbers and tables as text."""

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from analysis.measures import digits


def number(value: float | None, decimals: int = 4, sign: bool = False) -> str:
    """Return `value` with that many decimals, or "-" if it is missing."""
    return "-" if pd.isna(value) else f"{value + 0.0:{'+' if sign else ''}.{decimals}f}"


def spread(mean: float, low: float, high: float, decimals: int = 4, sign: bool = False) -> str:
    """Return for example `0.8443 [0.8359, 0.8528]`, without brackets for one seed."""
    text = number(mean, decimals, sign)
    if pd.isna(low):
        return text
    return f"{text} [{number(low, decimals, sign)}, {number(high, decimals, sign)}]"


def mean_text(row: pd.Series, decimals: int | None = None) -> str:
    places = digits(row.get("metric", "")) if decimals is None else decimals
    return spread(row["mean"], row["low"], row["high"], places)


def difference_text(row: pd.Series, decimals: int | None = None) -> str:
    """Return the difference of a row of estimates with its interval, "-" if there is none."""
    places = digits(row.get("metric", "")) if decimals is None else decimals
    return spread(row["difference"], row["difference_low"], row["difference_high"], places, sign=True)


def gain_text(row: pd.Series, of: str = "") -> str:
    """Return the gain in a row of `claims.verdicts` with its interval; of="exploring_" is that of the exploring seeds."""
    return spread(row[f"{of}gain"], row[f"{of}low"], row[f"{of}high"], row["decimals"], sign=True)


def column(text: Callable[..., str], rows: pd.DataFrame, *more: Any) -> list[str]:
    """Return one text per row, as in `column(mean_text, rows)`."""
    return [text(row, *more) for row in rows.to_dict("records")]


def p_text(p: float) -> str:
    """Return a p-value as text: three decimals below 0.1, else two; "-" for NaN."""
    return "-" if pd.isna(p) else "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def short(value: object) -> str:
    """Return a float with three significant digits ("-" for NaN), and any other value as text."""
    return str(value) if not isinstance(value, float) else "-" if pd.isna(value) else f"{value:.3g}"


def plain(text: object) -> str:
    """Return a text from a file as one line that stays text in Markdown and HTML: no tags, links and column marks."""
    line = "".join(letter if letter.isprintable() else " " for letter in str(text))
    line = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", line).replace("](", "]\\(").replace("```", "``")
    return line.replace("|", "\\|")


def say(problems: Iterable[str]) -> int:
    """Print what was left out, and return 0."""
    for problem in problems:
        print(f"left out: {plain(problem)}", file=sys.stderr)
    return 0


def markdown(table: pd.DataFrame) -> str:
    """Return a table as Markdown, its cells as plain text."""
    if table.empty:
        return "Nothing was run yet."
    return table.map(plain).to_markdown(index=False, disable_numparse=True)
