"""Which rows of each weight are one matrix, and which weights are the heads, as one run on an example shows.

Rows that reach different factors (of the scores of attention, of the mean of values, of a gate) are different matrices; a
rotation, which adds rows, makes them one. Only places are followed, not values, so the example may be small, and even on
the meta device.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fire_core.errors import UserError, first_line
from fire_core.passes import undisturbed
from fire_core.targets.trace import Trace

Rows = slice | tuple[int, ...]
Parts = tuple[tuple[str, Rows], ...]


@dataclass(frozen=True)
class Traced:
    """What a run shows, by `id` of the parameter.

    parts: rows of the weights whose rows are used in more than one way. whole: weights that are one matrix. unclear: why
    the use of others is not known. heads: weights whose outputs reach the model's output, and no other weight.
    """

    parts: dict[int, Parts] = field(default_factory=dict)
    whole: frozenset[int] = frozenset()
    unclear: dict[int, str] = field(default_factory=dict)
    heads: frozenset[int] = frozenset()


def trace_rows(model: nn.Module, example: Any) -> Traced:
    """Run `model` once on `example`, in evaluation mode, and return what it shows of its weights.

    Args:
        example: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
    Raises: UserError if the model cannot be run on it.
    """
    weights = [p for p in model.parameters() if p.dim() >= 2 and p.layout is torch.strided]
    trace = Trace(weights=weights)
    with undisturbed(model, training=False):
        try:
            output = trace.run(model, example)
        except Exception as error:
            raise UserError(
                f"example: {type(model).__name__} cannot be run on it ({type(error).__name__}: {first_line(error)}): give "
                "a batch, a tuple of arguments, or a dict of keyword arguments"
            ) from error
    parts = _parts(trace, weights)
    unclear = {id(weights[number]): why for number, why in trace.unclear.items()}
    reached = [source.weights for _, source in trace.sources(output) if not source.weights & trace.heard]
    return Traced(
        parts={key: cut for key, cut in parts.items() if key not in unclear},
        whole=frozenset(id(weight) for weight in weights) - unclear.keys() - parts.keys(),
        unclear=unclear,
        heads=frozenset(id(weights[number]) for number in frozenset().union(*reached)),
    )


def _parts(trace: Trace, weights: list[nn.Parameter]) -> dict[int, Parts]:
    """Return the parts of the weights whose rows have different uses; rows that are added to each other have the same."""
    above: dict[int, int] = {}

    def root(row: int) -> int:
        while (other := above.get(row, row)) != row:
            row = other
        return row

    for pair in trace.sums:
        for a, b in pair.T.tolist():
            first, second = sorted((root(a), root(b)))
            above[second] = first
    uses: dict[int, set[tuple[str, int, int]]] = defaultdict(set)
    for use in trace.uses:
        for row in use.rows.tolist():
            uses[root(row)].add((use.kind, use.number, use.factor))
    parts: dict[int, Parts] = {}
    for number, weight in enumerate(weights):
        of = [frozenset(uses.get(root(trace.starts[number] + row), ())) for row in range(len(weight))]
        names = {each: _role(each, trace.softened) for each in of}
        if not all(names.values()):
            names = {each: f"part {i}" for i, each in enumerate(names)}
        groups: dict[str, list[int]] = defaultdict(list)
        for row, each in enumerate(of):
            groups[names[each]].append(row)
        if len(groups) > 1:
            parts[id(weight)] = tuple((name, _as_slice(rows)) for name, rows in groups.items())
    return parts


def _role(uses: frozenset[tuple[str, int, int]], softened: set[int]) -> str:
    """Return "q", "k" or "v" for rows that are used as such, be it in several products (a loop over heads), else ""."""
    roles = {"qkv"[factor] for kind, _, factor in uses if kind == "attention"}
    roles |= {"qk"[factor] for kind, number, factor in uses if kind == "product" and number in softened}
    roles |= {"v" for kind, number, _ in uses if kind == "values" and number in softened}
    return roles.pop() if len(roles) == 1 else ""


def _as_slice(rows: list[int]) -> Rows:
    return slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else tuple(rows)
