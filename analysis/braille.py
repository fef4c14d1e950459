"""Curves in characters for a terminal: a character of braille has two by four dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

WIDTH, HEIGHT = 60, 10  # characters
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # of a character, from its top


def chart(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    """Return `HEIGHT` lines with all curves, name -> (x in ascending order, y), and the name of each beside its end, or in
    the nearest free line. The numbers on the left are the largest and the smallest y."""
    columns, rows = 2 * WIDTH, 4 * HEIGHT
    left, right = (pick(pick(x) for x, _ in curves.values()) for pick in (min, max))
    low, high = (pick(pick(y) for _, y in curves.values()) for pick in (min, max))
    dots, names = np.zeros((rows, columns), bool), dict[int, str]()
    for name, (x, y) in curves.items():
        places = (np.array(x) - left) / ((right - left) or 1) * (columns - 1)
        heights = (high - np.array(y)) / ((high - low) or 1) * (rows - 1)
        drawn = np.arange(np.ceil(places[0]), np.floor(places[-1]) + 1, dtype=int)
        levels = np.interp(drawn, places, heights).round().astype(int)
        for column, start, end in zip(drawn, [levels[0], *levels], levels):
            dots[min(start, end) : max(start, end) + 1, column] = True  # no gap where a curve is steep
        free = [line for line in range(HEIGHT) if line not in names]
        if free:
            names[min(free, key=lambda line: abs(line - levels[-1] // 4))] = name
    cells = dots.reshape(HEIGHT, 4, WIDTH, 2) * DOTS[:, None]
    ends = {0: f"{high:.3g}", HEIGHT - 1: f"{low:.3g}"}
    return "\n".join(
        f"{ends.get(line, ''):>8} {''.join(chr(0x2800 + bits) for bits in row)} {names.get(line, '')}".rstrip()
        for line, row in enumerate(cells.sum((1, 3)))
    )
