"""Tables of plain text: rows as aligned columns."""

from collections.abc import Mapping, Sequence


def columns(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows with the same keys as aligned columns under a line with the keys.

    Numbers stand on the right, floats with three digits, None as "-"; columns of text stand on the left. No rows give "".
    """
    if not rows:
        return ""
    texts = {key: any(isinstance(row[key], str) for row in rows) for key in rows[0]}
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, texts.values())
        ).rstrip()
        for line in cells
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
