"""Fused and stacked layers of published architectures, as one table of data.

Each entry names a class that holds the layer (or "*"), the layer's or parameter's attribute, and how to read
the sizes of its parts off that class. Nothing here is guessed: an entry whose attributes are missing does not
apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from fire_core.layouts import Place


@dataclass(frozen=True)
class Rows:
    """Parts of a weight's output rows, in order. `repeats`: the whole pattern comes that many times (head by
    head)."""

    sizes: tuple[tuple[str, int], ...] = ()
    repeats: int = 1
    transposed: bool = False
    kind: str = "linear"
    why: str = ""
    why_out: str = ""
    left_out: dict[str, str] = field(default_factory=dict)

    def picks(self) -> Iterator[tuple[str, slice | list[int], int]]:
        """(name, rows, how many) of each part: a slice, or a list of row numbers where the part is
        scattered."""
        period, start = sum(size for _, size in self.sizes), 0
        for name, size in self.sizes:
            if self.repeats == 1:
                yield name, slice(start, start + size), size
            else:
                rows = [r * period + start + i for r in range(self.repeats) for i in range(size)]
                yield name, rows, len(rows)
            start += size

    def role(self, name: str) -> str:
        return name if name in ("q", "k", "v") else "mlp" if name in ("gate", "up") else ""


@dataclass(frozen=True)
class FusedLayer:
    """owner: class name of the module that holds `layer`; rows: reads the sizes off that module."""

    owner: str
    layer: str
    rows: Callable[[Any], Rows]


def _qkv(q: int, k: int, v: int, **more: Any) -> Rows:
    return Rows((("q", q), ("k", k), ("v", v)), why="q, k or v of a fused projection", **more)


FUSED_LAYERS: tuple[FusedLayer, ...] = (
    FusedLayer("MultiheadAttention", "in_proj_weight", lambda m: _qkv(m.embed_dim, m.embed_dim, m.embed_dim)),
    FusedLayer("MultiheadAttention", "q_proj_weight", lambda m: Rows(why="q of MultiheadAttention")),
    FusedLayer("MultiheadAttention", "k_proj_weight", lambda m: Rows(why="k of MultiheadAttention")),
    FusedLayer("MultiheadAttention", "v_proj_weight", lambda m: Rows(why="v of MultiheadAttention")),
)

# attribute or module names -> kind, reason
SKIPPED_ATTRIBUTES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("A_log", "A_logs", "dt_bias", "dt_proj"),
        "state_space",
        "sets the time scales of a state space, not a feature map",
    ),
)

FUSED_NAMES = (
    "qkv",
    "to_qkv",
    "c_attn",
    "Wqkv",
    "query_key_value",
    "qkv_proj",
    "in_proj_qkv",
    "to_kv",
    "kv_proj",
)


def looks_fused(name: str) -> bool:
    return name in FUSED_NAMES


def known_rows(place: Place) -> Rows | None:
    """The layout of one parameter: what its module declares, else what the table says, else None."""
    if place.attribute == "weight" and hasattr(place.module, "fused_rows"):
        return Rows(
            tuple(place.module.fused_rows.items()), why="part of a fused layer, as the module declares"
        )
    found = _lookup(place.module, place.attribute)
    if found is None and place.attribute == "weight" and place.parents:
        found = _lookup(place.parents[-1], place.path.rpartition(".")[2])
    if found is None and looks_fused(place.path.rpartition(".")[2]) and isinstance(place.module, nn.Linear):
        why = "looks like a fused projection, but its parts are not known: set fused_rows on the module"
        return Rows(why_out=why)
    return found


def _lookup(owner: nn.Module, layer: str) -> Rows | None:
    classes = {cls.__name__ for cls in type(owner).__mro__}
    for entry in FUSED_LAYERS:
        if entry.layer == layer and entry.owner in classes:
            return entry.rows(owner)
    return None
