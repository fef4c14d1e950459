"""Data classes for finding targets: places of parameters, layouts, parts, and the table of targets.

A *target* is one matrix inside a parameter: the weight of a Linear layer, one spatial tap of a convolution, the q of a
fused q/k/v, one expert, one critic of an ensemble. `walk` finds the places of parameters, `architectures` knows their
layouts, `split` cuts them into targets, and `rules` chooses among the targets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fire_core.columns import columns

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Part:
    """One block of a parameter, which may become a target.

    shape: (out, in), or () if the block holds no matrix. taps: number of spatial positions of a convolution, else 1.
    The other fields are those of `Target`; `label` is the part of the target's name in brackets.
    """

    kind: str
    reason: str
    included: bool = False
    label: str = ""
    index: tuple = ()
    transposed: bool = False
    shape: tuple = ()
    taps: int = 1
    role: str = ""


@dataclass(frozen=True)
class Place:
    """The place of a parameter in a model: the module that holds it, that module's parents, and its names.

    path: name of the module. parents: outermost first. parameter_name: the name in `model.named_parameters()`.
    aliases: all names, with and without the prefixes of wrappers. tied: also held by an Embedding. head: output layer.
    """

    path: str
    attribute: str
    module: nn.Module
    parents: tuple[nn.Module, ...]
    parameter: nn.Parameter
    parameter_name: str
    aliases: tuple[str, ...]
    tied: bool
    head: bool

    @property
    def name(self) -> str:
        """Name of the parameter under `path`; a tied parameter can have another `parameter_name`."""
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


@dataclass(frozen=True)
class Layout:
    """How the output rows of one weight are divided into parts.

    sizes: the parts in the order of the rows, as (name, number of rows); if empty, the weight is one matrix.
    repeats: how many times the pattern of parts occurs (q/k/v head by head). transposed: stored as (in, out).
    why: the reason that targets give. left_out: names of parts that are not targets, with reasons.
    why_out: if not empty, the reason that the whole weight is left out. declared: set by the user through `fused_rows`.
    """

    sizes: Sizes = ()
    repeats: int = 1
    transposed: bool = False
    kind: str = "linear"
    why: str = ""
    why_out: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    declared: bool = False

    @property
    def total(self) -> int:
        """Number of output rows of all parts together."""
        return self.repeats * sum(size for _, size in self.sizes)

    def picks(self) -> Iterator[tuple[str, slice | list[int], int]]:
        """Yield (name, rows, number of rows) of each part; rows are a slice, or a list of indices if scattered."""
        period, start = sum(size for _, size in self.sizes), 0
        for name, size in self.sizes:
            if self.repeats == 1:
                yield name, slice(start, start + size), size
            elif size == 1:
                yield name, slice(start, None, period), self.repeats
            else:
                rows = [turn * period + start + i for turn in range(self.repeats) for i in range(size)]
                yield name, rows, len(rows)
            start += size


@dataclass(frozen=True)
class Target:
    """One matrix of a model (or one parameter that holds none), and whether it is to be treated.

    Attributes:
        name: the parameter and the part of it, e.g. "layer1.0.conv1.weight[0,2]", "h.0.attn.c_attn.weight[q]".
        parameter: the name in `model.named_parameters()`; a tied weight has one name there and one target here.
        kind: "linear", "conv", "embedding", "expert", "ensemble", "recurrent", "bias", "norm", "lora", ...
        index: `parameter[index]` is the stored block.
        transposed: whether that block is stored as (in, out).
        shape: (out, in) of the matrix, () for a parameter without matrices.
        scale: sqrt(out / in), divided by the number of taps for convolutions: the published scale after projection.
        included: whether the target is to be treated.
        reason: why the target is included or left out.
        role: "q", "k", "v", "o", "attention", "mlp" or "head", or "" if unknown.
        module: name of the module that holds the parameter.
        aliases: all names of the parameter that patterns may use.
        tied: whether the parameter is also an embedding table.
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
        """Return the (out, in) matrix of this target from a model or a dict from parameter names to tensors.

        The matrix is a view of the parameter: writing into it (under `torch.no_grad()`) changes the parameter. Only for
        a block with scattered rows (q/k/v interleaved head by head; `is_view` is False) it is a copy. `write` works for
        both.
        """
        block = _parameter(self, source)[self.index]
        return block.mT if self.transposed else block

    @property
    def is_view(self) -> bool:
        """Whether `matrix` is a view of the parameter."""
        return not any(isinstance(entry, list) for entry in self.index)

    def write(self, source: nn.Module | Mapping[str, Tensor], value: Tensor) -> None:
        """Copy `value` (out, in), of any dtype, into the parameter, in place."""
        with torch.no_grad():
            parameter = _parameter(self, source)
            parameter[self.index] = (value.mT if self.transposed else value).to(parameter.dtype)


class TargetTable(list):
    """A list of every `Target` of a model, in module order. `str()` formats it, with equal targets in one line."""

    @property
    def included(self) -> list[Target]:
        """The targets that are to be treated."""
        return [target for target in self if target.included]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters with at least one included target."""
        return list(dict.fromkeys(target.parameter for target in self.included))

    def lines(self, *, by_layer: bool = True) -> list[dict[str, object]]:
        """Return one row for all targets that differ only in their part, with the number of matrices.

        The keys are in, parameter, shape, kind, role, why, matrices and part. by_layer=False also merges the same
        parameter of repeated layers ("h.*.attn.c_attn.weight") and leaves the role empty.
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
            merged = rows.setdefault(tuple(row.values()), {**row, "matrices": 0, "parts": {}})
            merged["matrices"] += 1 if target.shape else 0  # type: ignore[operator]
            part = target.name.partition("[")[2].rstrip("]")
            merged["parts"][part] = None  # type: ignore[index]
        for row in rows.values():
            parts = list(row.pop("parts"))  # type: ignore[call-overload]
            row["part"] = ", ".join(parts) if len(parts) <= 3 else f"{parts[0]} .. {parts[-1]}"  # type: ignore
        return list(rows.values())

    def __str__(self) -> str:
        keys = ("parameter", "part", "matrices", "shape", "kind", "role", "why")
        rows = [{"": "in" if row["in"] else "out"} | {key: row[key] for key in keys} for row in self.lines()]
        count = sum(target.shape[0] * target.shape[1] for target in self.included)
        return f"{columns(rows)}\n{len(self.included)} matrices with {count:,} weights are in."


def names(table: Iterable[Target]) -> list[str]:
    """Return the parameter names of a table, once each, those of included targets first."""
    ordered = sorted(table, key=lambda target: not target.included)
    return list(dict.fromkeys(target.parameter for target in ordered))


def shorten(words: Sequence[str], limit: int = 8) -> str:
    """Return the first `limit` words, joined by commas, and how many follow."""
    more = f", ... ({len(words) - limit} more)" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


def _parameter(target: Target, source: nn.Module | Mapping[str, Tensor]) -> Tensor:
    if isinstance(source, nn.Module):
        return source.get_parameter(target.parameter)
    return source[target.parameter]
