"""Which matrices a network holds, and which of them a rule picks.

A *target* is one matrix inside a parameter: the weight of a Linear layer, one spatial tap of a convolution,
the q of a fused q/k/v, one expert, one critic of an ensemble. `find_targets` lists all of them, in or out,
each with the reason.

Layers are told apart in `fire_core/layouts.py` (how a parameter splits into matrices) and
`fire_core/target_rules.py` (what a rule such as "qk" or "-head" means).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fire_core.errors import UserError
from fire_core.layouts import Part, Place, places, split


@dataclass(frozen=True)
class Target:
    """One matrix of a model (or one parameter that holds none), and whether it is to be treated.

    name: the parameter and the part of it, e.g. "layer1.0.conv1.weight[0,2]", "h.0.attn.c_attn.weight[q]".
    parameter: the name in `model.named_parameters()`; a tied weight has one name there and one target here.
    kind: "linear", "conv", "embedding", "expert", "ensemble", "recurrent", "bias", "norm", "state_space",
    "lora", ...
    index: applied to the parameter, gives the stored block. `transposed`: that block is (in, out).
    shape: (out, in) of the matrix, () for a parameter without matrices.
    scale: sqrt(out / in), for convolutions divided by the number of taps (the published scale of a projected
    matrix).
    reason: why it is out, or why it is in.
    role: what the matrix does where that is known ("q", "k", "v", "o", "mlp", "head", ...), else "".
    module: the module that holds the parameter. aliases: further names that patterns may use.
    tied: the parameter is also an embedding table.
    """

    name: str
    parameter: str
    kind: str
    index: tuple
    transposed: bool
    shape: tuple
    scale: float
    included: bool
    reason: str
    role: str = ""
    module: str = ""
    aliases: tuple[str, ...] = ()
    tied: bool = False

    def matrix(self, source: nn.Module | Mapping[str, Tensor]) -> Tensor:
        """The (out, in) matrix of this target, out of a model or a dict from parameter names to tensors.

        A view of the parameter: writing into it (under `torch.no_grad()`) changes the parameter. The one
        exception is a block whose rows are scattered (`is_view` is False: q/k/v interleaved head by head),
        where it is a copy; `write` works for both.
        """
        block = _parameter(self, source)[self.index]
        return block.mT if self.transposed else block

    @property
    def is_view(self) -> bool:
        return not any(isinstance(entry, list) for entry in self.index)

    def write(self, source: nn.Module | Mapping[str, Tensor], value: Tensor) -> None:
        """Copies `value` (out, in), of any dtype, into the parameter, in place."""
        with torch.no_grad():
            parameter = _parameter(self, source)
            parameter[self.index] = (value.mT if self.transposed else value).to(parameter.dtype)


class TargetTable(list):
    """A list of every `Target` of a model, in module order. `str()` prints it, equal neighbours in one
    line."""

    @property
    def included(self) -> list[Target]:
        return [target for target in self if target.included]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters with at least one included target."""
        return list(dict.fromkeys(target.parameter for target in self.included))

    def rows(self, *, by_layer: bool = True) -> list[dict[str, object]]:
        """One row for neighbours that differ in nothing but their part, with the number of matrices.

        by_layer=False also merges the same parameter of repeated layers ("h.*.attn.c_attn.weight").
        """
        rows: dict[tuple, dict[str, object]] = {}
        for target in self:
            parameter = target.name.split("[")[0]
            if not by_layer:
                parameter = re.sub(r"(?<![^.])\d+(?![^.])", "*", parameter)
            row: dict[str, object] = {
                "in": target.included,
                "parameter": parameter,
                "shape": "x".join(map(str, target.shape)),
                "kind": target.kind,
                "role": target.role if by_layer else "",
                "why": target.reason,
            }
            merged = rows.setdefault(tuple(row.values()), {**row, "matrices": 0, "parts": []})
            merged["matrices"] += 1 if target.shape else 0  # type: ignore[operator]
            part = target.name.partition("[")[2].rstrip("]")
            if part not in merged["parts"]:  # type: ignore[operator]
                merged["parts"].append(part)  # type: ignore[attr-defined]
        for row in rows.values():
            parts = row.pop("parts")
            row["part"] = ", ".join(parts) if len(parts) <= 3 else f"{parts[0]} .. {parts[-1]}"  # type: ignore
        return list(rows.values())

    def __str__(self) -> str:
        columns = ("in", "parameter", "part", "matrices", "shape", "kind", "role", "why")
        rows = [{**row, "in": "in" if row["in"] else "out"} for row in self.rows()]
        cells = [list(columns), *([str(row[column]) for column in columns] for row in rows)]
        cells[0][0] = ""
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
        count = sum(target.shape[0] * target.shape[1] for target in self.included)
        return "\n".join([*lines, f"{len(self.included)} matrices with {count:,} weights are in."])


def find_targets(
    model: nn.Module, targets: str | Sequence[str] | Callable[[Target], bool] = "all"
) -> TargetTable:
    """Every matrix and every other parameter of `model`, with `included` set by the rule `targets`.

    targets: a preset (see `fire_core.target_rules.PRESETS`: "all", "qk", "attention", "mlp", "conv",
    "linear", "head", and "no_" + any of them), an fnmatch pattern over parameter, module or target names
    ("layer1.*", "*.c_attn.weight.q"), a list or comma string of these (any may match; one that starts with
    "-" takes away, and so does a "no_" preset in a list), or a callable(Target) -> bool.
    A rule can only choose among matrices: biases, norm layers, embeddings that are not tied to a Linear layer
    and other parameters without matrices stay out whatever the rule says, each with its reason.

    Raises UserError when a pattern matches nothing, when nothing is left, and for flattened FSDP1 shards.
    """
    return choose(list_targets(model), targets, type(model).__name__)


def choose(
    table: TargetTable, targets: str | Sequence[str] | Callable[[Target], bool], owner: str = "the model"
) -> TargetTable:
    """A table as `list_targets` gives it, with the rule applied; errors as in `find_targets`, naming `owner`."""
    from fire_core.target_rules import selector

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
    """Names of the whole parameters (weights and biases) of the modules that a rule names, in model order.

    For "reset the linear layers": `match_parameters(model, "linear")` gives fc1.weight, fc1.bias, ... Presets
    and callables name the modules that hold their targets; patterns also name modules without any matrix
    ("*.bn1"). Raises UserError when the rule names nothing.
    """
    from fire_core.target_rules import selector

    table = list_targets(model)
    chosen = selector(table, rule, matrices_only=False)
    modules = {target.module for target in table if chosen(target)}
    if not modules:
        raise UserError(f"rule {rule!r} names no parameter; names that exist: {shorten(names(table))}")
    matched = {target.parameter for target in table if target.module in modules}
    return [name for name, _ in model.named_parameters() if name in matched]


def names(table: Iterable[Target]) -> list[str]:
    """Parameter names of a table, once each, those with matrices first."""
    ordered = sorted(table, key=lambda target: not target.included)
    return list(dict.fromkeys(target.parameter for target in ordered))


def shorten(words: Sequence[str], limit: int = 8) -> str:
    """The first few words and how many follow."""
    more = f", ... ({len(words) - limit} more)" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


def list_targets(model: nn.Module) -> TargetTable:
    """The table before any rule: included means "holds a matrix that trains"."""
    check_module(model)
    table = TargetTable()
    all_places = places(model)
    some_train = any(place.parameter.requires_grad for place in all_places)
    for place in all_places:
        for part in split(place):
            frozen = part.included and some_train and not place.parameter.requires_grad
            table.append(_target(place, part, frozen))
    return table


def check_module(model: object) -> None:
    """Raise UserError for what is no torch module."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model is a {type(model).__name__}, not a torch module: give the module itself; for one matrix use "
            "fire_core.polar, for a file of weights `python -m fire_core apply`"
        )


def _target(place: Place, part: Part, frozen: bool) -> Target:
    shape, scale = part.shape, 1.0
    if shape:
        scale = math.sqrt(shape[0] / shape[1]) / part.taps
    name = f"{place.name}[{part.label}]" if part.label else place.name
    return Target(
        name=name,
        parameter=place.parameter_name,
        kind=part.kind,
        index=part.index,
        transposed=part.transposed,
        shape=shape,
        scale=scale,
        included=part.included and not frozen,
        reason="frozen (requires_grad is False while other parameters train)" if frozen else part.reason,
        role=part.role,
        module=place.path,
        aliases=place.aliases,
        tied=place.tied,
    )


def _leave_out(target: Target, rule: object) -> Target:
    text = rule if isinstance(rule, str) else getattr(rule, "__name__", str(rule))
    return replace(target, included=False, reason=f"not chosen by targets={text}")


def _parameter(target: Target, source: nn.Module | Mapping[str, Tensor]) -> Tensor:
    if isinstance(source, nn.Module):
        return source.get_parameter(target.parameter)
    return source[target.parameter]
