"""What a rule for targets means: presets, patterns, lists with exclusions, callables."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fire_core.errors import UserError
from fire_core.roles import ATTENTION

if TYPE_CHECKING:
    from fire_core.targets import Target, TargetTable

Test = Callable[["Target"], bool]

PRESETS: dict[str, tuple[str, Test]] = {
    "all": ("every matrix", lambda t: True),
    "linear": ("every matrix outside convolutions", lambda t: t.kind != "conv"),
    "conv": ("every tap of every convolution", lambda t: t.kind == "conv"),
    "qk": ("queries and keys of attention", lambda t: t.role in ("q", "k")),
    "attention": ("all projections of attention", lambda t: t.role in ATTENTION),
    "mlp": ("feed-forward blocks, experts included", lambda t: t.role == "mlp"),
    "head": (
        "the output layer: as the model names it, else the Linear tied to an embedding, else the last one",
        lambda t: t.role == "head",
    ),
    "embedding": ("embedding tables, which are in only where tied to a Linear", lambda t: t.tied),
}


def selector(table: TargetTable, rule: object, *, matrices_only: bool = True) -> Test:
    """The test that a rule stands for. Raises UserError for a pattern that matches nothing in `table`."""
    if callable(rule):
        return lambda target: target.included and bool(rule(target))
    items = split_rule(rule)
    if len(items) > 1:  # "no_head" beside other entries takes away, as "-head" does
        items = [f"-{item.removeprefix('no_')}" if _is_negated(item) else item for item in items]
    wanted = [item for item in items if not item.startswith("-")] or ["all"]
    unwanted = [item.removeprefix("-") for item in items if item.startswith("-")]
    takes = [_test(table, item, matrices_only) for item in wanted]
    leaves = [_test(table, item, matrices_only=False) for item in unwanted]
    return lambda target: any(test(target) for test in takes) and not any(test(target) for test in leaves)


def _is_negated(item: str) -> bool:
    return item not in PRESETS and item.startswith("no_") and item.removeprefix("no_") in PRESETS


def split_rule(rule: object) -> list[str]:
    """A comma string or a sequence of strings as a list of items."""
    parts = rule.split(",") if isinstance(rule, str) else rule
    if not isinstance(parts, Sequence) and not hasattr(parts, "__iter__"):
        raise UserError(
            f"targets={rule!r} is no rule: give a preset, a pattern, a list of them, or a callable"
        )
    items = [item.strip() for item in parts]  # type: ignore[union-attr]
    if not items or not all(items):
        raise UserError(f"targets={rule!r} is empty: give a preset ({', '.join(PRESETS)}) or a pattern")
    return items


def _test(table: TargetTable, item: str, matrices_only: bool) -> Test:
    preset = PRESETS.get(item) or PRESETS.get(item.removeprefix("no_"))
    if preset is not None:
        inside = preset[1]
        if item in PRESETS:
            return lambda target: target.included and inside(target)
        return lambda target: target.included and not inside(target)
    hits = [target for target in table if _matches(target, item)]
    if not hits:
        raise UserError(f"targets: {item!r} matches nothing; {_nearest(table, item)}")
    if matrices_only and not any(target.included for target in hits):
        raise UserError(f"targets: {item!r} matches only {hits[0].name}, which is out: {hits[0].reason}")
    return lambda target: (target.included or not matrices_only) and _matches(target, item)


def _matches(target: Target, pattern: str) -> bool:
    """A pattern names a target, its parameter (any of its names), or any module around it."""
    flat = target.name.replace("[", ".").replace("]", "")
    candidates = {target.parameter, target.name, flat, *target.aliases}
    for alias in (target.parameter, *target.aliases):
        parts = alias.split(".")
        candidates.update(".".join(parts[:length]) for length in range(1, len(parts)))
    return any(name == pattern or fnmatchcase(name, pattern) for name in candidates)


def _nearest(table: TargetTable, item: str) -> str:
    from fire_core.targets import names, shorten

    existing = names(table)
    presets = [*PRESETS, *(f"no_{name}" for name in PRESETS)]
    modules = list(dict.fromkeys(target.module for target in table if target.module))
    near = difflib.get_close_matches(item, [*presets, *modules, *existing], n=4, cutoff=0.6)
    nearest = f"nearest: {', '.join(near)}; " if near else ""
    return f"{nearest}names that exist: {shorten(existing)}; presets: {', '.join(PRESETS)}"
