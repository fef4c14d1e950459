"""Rules that choose targets: presets, patterns, lists with exclusions, lists of targets, callables."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from fire_core.errors import UserError
from fire_core.targets.roles import ATTENTION
from fire_core.targets.split import list_targets
from fire_core.targets.table import Target, TargetTable, names, shorten

Test = Callable[[Target], bool]

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


def find_targets(
    model: nn.Module, targets: str | Sequence[str] | Callable[[Target], bool] = "all"
) -> TargetTable:
    """Return a table of every matrix and every other parameter of `model`, with `included` set by the rule `targets`.

    A rule chooses among matrices. Biases, norm layers, embeddings that are not tied to a Linear layer and other
    parameters without matrices stay out whatever the rule is, each with its reason.

    Args:
        targets: a preset (`"all"`, `"linear"`, `"conv"`, `"qk"`, `"attention"`, `"mlp"`, `"head"`, `"embedding"`, or
            `"no_"` before any of them); a wildcard pattern over parameter, module or target names (`"layer1.*"`); a
            list or comma-separated string of these (one match is enough; a leading `-` excludes, and so does a `"no_"`
            preset in a list); a list of `Target`; or a callable(Target) -> bool. Where a module has the name of a
            preset, `"name:head"` is the module.
    Raises: UserError if a pattern matches nothing or no matrix is left, and for lazy, FSDP1 or ZeRO-3 parameters.
    """
    return choose(list_targets(model), targets, type(model).__name__)


def choose(
    table: TargetTable, targets: str | Sequence[str] | Callable[[Target], bool], owner: str = "the model"
) -> TargetTable:
    """Return the table of `list_targets` with the rule applied; errors as in `find_targets`, with the name `owner`."""
    if not any(target.included for target in table):
        reasons = (
            "; ".join(dict.fromkeys(f"{t.name}: {t.reason}" for t in table[:4])) or "it has no parameters"
        )
        raise UserError(f"{owner} has no matrix to treat ({reasons})")
    chosen = selector(table, targets)
    result = TargetTable(t if not t.included or chosen(t) else _leave_out(t, targets) for t in table)
    if not result.included:
        raise UserError(f"targets={targets!r} leaves no matrix in; names that exist: {shorten(names(table))}")
    return result


def match_parameters(model: nn.Module, rule: str | Sequence[str] | Callable[[Target], bool]) -> list[str]:
    """Return the names of all parameters (weights and biases) of the modules that a rule chooses, in model order.

    For "reset the linear layers", `match_parameters(model, "linear")` returns fc1.weight, fc1.bias, ... Presets and
    callables choose the modules that hold their targets. Patterns also choose modules without any matrix (`"*.bn1"`).

    Raises: UserError if the rule matches nothing.
    """
    table = list_targets(model)
    chosen = selector(table, rule, matrices_only=False)
    modules = {target.module for target in table if chosen(target)}
    if not modules:
        raise UserError(f"rule {rule!r} names no parameter; names that exist: {shorten(names(table))}")
    matched = {target.parameter for target in table if target.module in modules}
    return [name for name, _ in model.named_parameters() if name in matched]


def _leave_out(target: Target, rule: object) -> Target:
    text = rule if isinstance(rule, str) else getattr(rule, "__name__", str(rule))
    return replace(target, included=False, reason=f"not chosen by targets={text}")


def selector(table: TargetTable, rule: object, *, matrices_only: bool = True) -> Test:
    """Return the rule as a test of one target. Raises UserError for a pattern that matches nothing in `table`."""
    if callable(rule):
        chosen = rule
        return lambda target: target.included and bool(chosen(target))
    if isinstance(rule, Sequence) and rule and all(isinstance(item, Target) for item in rule):
        rule = [f"name:{item.name}" for item in rule]
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
    """Return the items of a comma-separated string or a sequence of strings. Raises UserError for empty ones."""
    parts = re.split(r",(?![^\[]*\])", rule) if isinstance(rule, str) else rule  # "0.weight[1,2]" is one name
    if not isinstance(parts, Sequence) and not hasattr(parts, "__iter__"):
        raise UserError(
            f"targets={rule!r} is not a rule: give a preset, a pattern, a list of them, or a callable"
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
    item = item.removeprefix("name:")
    hits = [target for target in table if _matches(target, item)]
    if not hits:
        raise UserError(f"targets: {item!r} matches nothing; {_nearest(table, item)}")
    if matrices_only and not any(target.included for target in hits):
        raise UserError(f"targets: {item!r} matches only {hits[0].name}, which is out: {hits[0].reason}")
    return lambda target: (target.included or not matrices_only) and _matches(target, item)


def _matches(target: Target, pattern: str) -> bool:
    """Return whether the pattern matches the target, its parameter (by any of its names), or a module around it."""
    flat = target.name.replace("[", ".").replace("]", "")
    candidates = {target.parameter, target.name, flat, *target.aliases}
    for alias in (target.parameter, *target.aliases):
        parts = alias.split(".")
        candidates.update(".".join(parts[:length]) for length in range(1, len(parts)))
    return any(name == pattern or fnmatchcase(name, pattern) for name in candidates)


def _nearest(table: TargetTable, item: str) -> str:
    existing = names(table)
    presets = [*PRESETS, *(f"no_{name}" for name in PRESETS)]
    modules = list(dict.fromkeys(target.module for target in table if target.module))
    near = difflib.get_close_matches(item, [*presets, *modules, *existing], n=4, cutoff=0.6)
    nearest = f"nearest: {', '.join(near)}; " if near else ""
    return f"{nearest}names that exist: {shorten(existing)}; presets: {', '.join(PRESETS)}"
