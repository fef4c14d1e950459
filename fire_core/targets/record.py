"""What a run of a net has shown so far: where the entries of its tensors come from, and what became of rows and units."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fire_core.targets.labels import core, counted_from
from fire_core.targets.operations import tensors_in


class Group(NamedTuple):
    """Units of one product in one form: as computed, or active after one of the functions that read them.

    place: number of the product in order of execution. The label of a unit is number of the group << 32 | unit.
    """

    place: int
    active: bool


class Product(NamedTuple):
    """A product with weights.

    module: name of its Linear, convolution or stack, if it is in one. owner: the latest module with weights. units: their
    number.
    """

    module: str | None
    owner: nn.Module | None
    units: int


@dataclass(frozen=True)
class Source:
    """Where the entries of a tensor come from.

    units: label of each entry, None if no entry has a unit. rows: likewise, numbers of rows. lost: groups that are mixed
    in entries without a label -> the operation that mixed them. gates: places of products that were multiplied with the
    labelled ones. weights: those whose outputs reach the tensor without another product with weights. scores: number of
    the product of two activations that it is. discrete: whether only integers of the input, as masks are, reach it.
    is_weight: whether it depends on weights alone.
    """

    units: Tensor | None = None
    rows: Tensor | None = None
    lost: dict[int, str] = field(default_factory=dict)
    gates: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    scores: int | None = None
    discrete: bool = False
    is_weight: bool = False


Known = list[tuple[Tensor, Source]]


class Read(NamedTuple):
    """The input of a product. columns: label of each input of the layer; None if they differ between samples."""

    module: str | None
    operation: str
    source: Source
    columns: Tensor | None


class Use(NamedTuple):
    """Rows that are one factor (0, 1, 2) of a "product" of activations, "attention" or a "gate", by its number.

    A factor of the product with such a product is one of "values", with the number of the latter.
    """

    kind: str
    number: int
    factor: int
    rows: Tensor


class Record:
    """Notes of one run.

    Attributes:
        groups, products, reads, uses: in order of execution. starts: number of the first row of each weight; rows are
        counted over all weights. sums: pairs of rows that are added. troubles: place -> why its units have no owner.
        unclear: weight -> what its rows cannot be followed through. heard: weights whose outputs another one reads.
        softened: numbers of products that a softmax follows. channels: norm -> label of each of its channels.
    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.groups: list[Group] = []
        self.products: list[Product] = []
        self.reads: list[Read] = []
        self.uses: list[Use] = []
        self.sums: list[Tensor] = []
        self.troubles: dict[int, str] = {}
        self.unclear: dict[int, str] = {}
        self.heard: set[int] = set()
        self.softened: set[int] = set()
        self.channels: dict[str, Tensor] = {}
        self._operations = 0
        self._sources: Any = WeakTensorKeyDictionary()
        weights = list(weights)
        self.starts = list(accumulate((len(weight) for weight in weights), initial=0))
        for number, weight in enumerate(weights):
            rows = counted_from(self.starts[number], len(weight), weight).view(-1, *[1] * (weight.ndim - 1))
            own = frozenset([number])
            self._sources[weight] = Source(rows=rows.expand(weight.shape), weights=own, is_weight=True)

    def sources(self, output: Any) -> Known:
        """Return the tensors in an output that depend on the inputs or on weights, with their sources."""
        found = [(leaf, self._sources.get(leaf)) for leaf in tensors_in(output)]
        return [(leaf, source) for leaf, source in found if source is not None]

    def groups_in(self, source: Source) -> set[int]:
        """Return the numbers of the groups whose units have labels in `source`."""
        return set() if source.units is None else set((core(source.units) >> 32).unique().tolist()) - {-1}

    def places(self, groups: Iterable[int]) -> set[int]:
        """Return the places of the products whose units are in some groups."""
        return {self.groups[number].place for number in groups}

    def _activated(self, source: Source) -> Source:
        """Give new labels to the units that are not active yet."""
        units: Any = source.units
        for number in self.groups_in(source):
            if not self.groups[number].active:
                self.groups.append(Group(self.groups[number].place, active=True))
                small, step = core(units), len(self.groups) - 1 - number << 32
                units = torch.where(small >> 32 == number, small + step, small).expand(units.shape)
        return replace(source, units=units)

    def _trouble(self, places: set[int], why: str) -> None:
        for place in places:
            self.troubles.setdefault(place, why)

    def _use(self, kind: str, factor: int, rows: Tensor | None, number: int | None = None) -> None:
        if rows is not None:
            number = self._operations if number is None else number
            self.uses.append(Use(kind, number, factor, core(rows).unique()))

    def _lose(self, name: str, rows: Tensor | None) -> None:
        if rows is not None:
            found = core(rows)[core(rows) >= 0].unique()
            weights = torch.bucketize(found, found.new_tensor(self.starts), right=True).unique() - 1
            self.unclear |= dict.fromkeys(weights.tolist(), f"its rows cannot be followed through {name}")


def combined(known: Known) -> Source:
    """Return the source, without labels, of what is computed from all of these."""
    sources = [source for _, source in known]
    return Source(
        lost={number: name for source in sources for number, name in source.lost.items()},
        gates=frozenset().union(*(source.gates for source in sources)),
        weights=frozenset().union(*(source.weights for source in sources)),
        scores=next((source.scores for source in sources if source.scores is not None), None),
        discrete=all(source.discrete for source in sources),
        is_weight=all(source.is_weight for source in sources),
    )
