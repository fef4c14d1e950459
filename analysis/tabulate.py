"""A frame of text cells as Markdown or LaTeX."""

from __future__ import annotations

import pandas as pd

LATEX = {
    "&": r"\&",
    "%": r"\%",
    "_": r"\_",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
}


def markdown(frame: pd.DataFrame) -> str:
    """A pipe table with aligned columns; numbers to the right."""
    cells = [[str(value).replace("|", "\\|") for value in row] for row in frame.itertuples(index=False)]
    titles = [str(column) for column in frame.columns]
    widths = [max([3, len(title), *(len(row[i]) for row in cells)]) for i, title in enumerate(titles)]
    right = [bool(cells) and all(_numeric(row[i]) for row in cells) for i in range(len(titles))]

    def line(row: list[str]) -> str:
        return (
            "| " + " | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)) + " |"
        )

    rule = "| " + " | ".join("-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right)) + " |"
    return "\n".join([line(titles), rule, *map(line, cells)])


def _numeric(text: str) -> bool:
    return text in {"", "-"} or (text.lstrip("+-")[:1].isdigit() and " " not in text)


def latex(frame: pd.DataFrame, caption: str, name: str) -> str:
    """A booktabs table; `name` is its \\label."""

    def escape(text: object) -> str:
        return "".join(LATEX.get(character, character) for character in str(text))

    rows = [" & ".join(map(escape, row)) + r" \\" for row in frame.itertuples(index=False)]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{{'l' * len(frame.columns)}}}",
            r"\toprule",
            " & ".join(map(escape, frame.columns)) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{escape(caption)}}}",
            rf"\label{{{name}}}",
            r"\end{table}",
            "",
        ]
    )
