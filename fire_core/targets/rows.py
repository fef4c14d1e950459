"""Which rows of each weight are one matrix, and which weights are the heads, as one run on an example shows.

Rows that reach different factors (of the scores of attention, of the mean of values, of a gate) are different matrices; a
rotation, which adds rows, makes them one. Only places are followed, not values, so the example may be small.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fire_core.errors import UserError, first_line
from fire_core.passes import undisturbed
from fire_core.targets.labels import constant, core, numbered
from fire_core.targets.trace import Known, Operation, Product, Source, Trace, combined

FACTORS = {"mul", "div", "addcmul", "addcdiv", "lerp", "where", "masked_fill", "pow", "xlogy", "ldexp"}
Parts = tuple[tuple[str, range | tuple[int, ...]], ...]
Use = tuple[str, int, int]


@dataclass(frozen=True)
class Traced:
    """What a run shows, by `id` of the parameter.

    parts: rows of the weights whose rows are used in more than one way. whole: weights that are one matrix. unclear: why
    the use of others is not known. heads: weights whose outputs reach the model's output, and no other weight.
    """

    parts: dict[int, Parts]
    whole: frozenset[int]
    unclear: dict[int, str]
    heads: frozenset[int]


def trace_rows(model: nn.Module, example: Any) -> Traced:
    """Run `model` once on `example`, in evaluation mode, and return what it shows of its weights.

    Args:
        example: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
    Raises: UserError if the model cannot be run on it.
    """
    weights = [p for p in model.parameters() if p.dim() >= 2 and p.layout is torch.strided]
    trace = RowTrace(weights)
    with undisturbed(model, training=False):
        try:
            output = trace.run(model, example)
        except Exception as error:
            raise UserError(
                f"example: {type(model).__name__} cannot be run on it ({type(error).__name__}: {first_line(error)}): give "
                "a batch, a tuple of arguments, or a dict of keyword arguments"
            ) from error
    parts = trace.parts()
    unclear = {id(weights[number]): why for number, why in trace.unclear.items()}
    reached = [s.weights for _, s in trace.sources(opened(output)) if not s.weights & trace.heard]
    return Traced(
        parts={key: cut for key, cut in parts.items() if key not in unclear},
        whole=frozenset(id(weights[number]) for number in trace.followed) - unclear.keys() - parts.keys(),
        unclear=unclear,
        heads=frozenset(id(weights[number]) for number in frozenset().union(*reached)),
    )


def opened(tree: Any, depth: int = 4) -> list[Any]:
    """Return the leaves of a tree, and those of the attributes of objects in it, such as distributions."""
    leaves = tree_leaves(tree)
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor | nn.Module | type)] if depth else []
    return leaves + [leaf for each in others for leaf in opened(getattr(each, "__dict__", {}), depth - 1)]


class RowTrace(Trace):
    """Follows the rows of weights.

    Attributes:
        uses: row -> (kind, number, factor) of each "product" of activations, "attention" or "gate", by its number, of which
            it is a factor (0, 1, 2); a factor of the product with such a product is one of "values", with the number of the
            latter. sums: pairs of rows that are added. unclear: weight -> what its rows cannot be followed through.
            followed: weights whose rows a product was seen to use. heard: weights whose outputs another one reads.
    """

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self.weights = weights
        self.uses: dict[int, set[Use]] = defaultdict(set)
        self.sums: list[Tensor] = []
        self.unclear: dict[int, str] = {}
        self.heard: set[int] = set()
        self.followed: set[int] = set()
        for number, weight in enumerate(weights):
            rows = numbered(number, [len(weight), *[1] * (weight.ndim - 1)], weight).expand(weight.shape)
            self._sources[weight] = Source(rows, weights=frozenset([number]), is_weight=True)

    def product(self, product: Product, result: Tensor) -> Source:
        reads, weight = product.reads, product.weight
        heard = frozenset().union(*(source.weights for _, source in reads))
        for factor, source in reads if weight is None else ():
            scores = next((s.scores for _, s in reads if s is not source and s.scores is not None), None)
            self._use("product" if scores is None else "values", factor, source.labels, scores)
        if len(reads) == 2 or not result.ndim:
            return Source(weights=heard, scores=self.operations)
        if weight is None:
            return Source(weights=heard)
        self.heard |= heard
        followed, through, weights = weight, product.name, weight.weights
        dims, sizes = [0, product.side] if product.stacked else [product.side], product.sizes(result)
        if product.name == "convolution":
            dims = [int(product.args[6])]  # 1 if it is transposed
            if product.operands[1].shape[1] == 1 and len(product.operands[1]) == product.operands[0].shape[1]:
                followed, through = reads[0][1], "a depthwise convolution"  # its channels stay apart
                weights, dims = weights | heard, [1]
        rows = constant(followed.labels, dims)
        if rows is None or rows.numel() != torch.Size(sizes).numel():
            self.lose(through, [(result, followed)])
            return Source(weights=weights)
        self.followed |= weight.weights
        return Source(rows.reshape(sizes).expand(result.shape), weights=weights)

    def attention(self, operation: Operation, known: Known) -> Source:
        for factor, tensor in enumerate(operation.args[:3]):
            self._use("attention", factor, self._sources.get(tensor, Source()).labels)
        return Source(weights=combined(known).weights)

    def elementwise(self, operation: Operation, known: Known, shape: torch.Size) -> Source:
        # gates: here, whether the rows were multiplied with values without labels
        found = [(s.labels.expand(shape), bool(s.gates)) for _, s in known if s.labels is not None]
        rows, gated = found[0]
        for other, also in found[1:]:
            a, b = torch.broadcast_tensors(core(rows), core(other))  # type: ignore[no-untyped-call]
            differ = (a != b) & (a >= 0) & (b >= 0)
            if differ.any() and operation.name in FACTORS:
                self._use("gate", 0, a[differ])
                self._use("gate", 1, b[differ])
                return replace(combined(known), gates=frozenset())
            if differ.any() and gated != also:  # a scale and a shift
                self._use("gate", 0, (a if gated else b)[differ])
                a, b = (b, a) if gated else (a, b)
            elif differ.any():
                ids, places = torch.stack((a[differ], b[differ])).unique(return_inverse=True)
                pairs = (places[0] * len(ids) + places[1]).unique()  # much faster than of two columns
                self.sums.append(ids[torch.stack((pairs // len(ids), pairs % len(ids)))])
            rows, gated = torch.where(a < 0, b, a).expand(shape), gated and also
        others = [x for x, s in known if s.labels is None and not s.discrete and x.is_floating_point()]
        if operation.name in FACTORS and any(x.shape == shape and 0 not in x.stride() for x in others):
            gated = True
        return replace(combined(known), labels=rows, gates=frozenset([0] if gated else []))

    def other(self, operation: Operation, known: Known, output: Tensor, mixes: bool) -> Source:
        name, joined = operation.name, combined(known)
        if not joined.is_weight and len(self.sources(operation.inputs)) > len(known):
            self.heard |= joined.weights  # a recurrent layer
        if name == "glu":
            whole = next(source.labels for _, source in known if source.labels is not None)
            for factor, half in enumerate(whole.chunk(2, (*operation.args, -1)[1])):
                self._use("gate", factor, half)
        smaller = not output.is_complex() and output.numel() < max(x.numel() for x, _ in known)
        alone = sum(not s.discrete for _, s in known) < 2 and name != "prod" and "pool" not in name
        statistic = smaller and alone and not operation.function._schema.is_mutable
        decision = not (output.is_floating_point() or output.is_complex())
        if mixes and not (statistic or decision or joined.is_weight):
            self.lose(name, known)
        return joined

    def lose(self, why: str, known: Known) -> Source:
        reason = f"its rows cannot be followed through {why}"
        for _, source in known:
            self.unclear |= dict.fromkeys(self.groups_in(source), reason)
        return combined(known)

    def _use(self, kind: str, factor: int, rows: Tensor | None, number: int | None = None) -> None:
        number = self.operations if number is None else number
        for row in [] if rows is None else core(rows).unique().tolist():
            self.uses[row].add((kind, number, factor))

    def parts(self) -> dict[int, Parts]:
        """Return the parts of weights whose rows have different uses; rows that are added to each other have the same."""
        above: dict[int, int] = {}

        def root(row: int) -> int:
            while (other := above.get(row, row)) != row:
                row = other
            return row

        for pairs in self.sums:
            for a, b in pairs.T.tolist():
                first, second = sorted((root(a), root(b)))
                above[second] = first
        uses: dict[int, set[Use]] = defaultdict(set)
        for row, found in self.uses.items():
            uses[root(row)] |= found
        parts: dict[int, Parts] = {}
        for number, weight in enumerate(self.weights):
            of = [frozenset(uses.get(root(number << 32 | row), ())) for row in range(len(weight))]
            names = {each: self._role(each) for each in of}
            if not all(names.values()):
                names = {each: f"part {i}" for i, each in enumerate(names)}
            groups: dict[str, list[int]] = defaultdict(list)
            for row, each in enumerate(of):
                groups[names[each]].append(row)
            if len(groups) > 1:
                parts[id(weight)] = tuple((name, _in_order(rows)) for name, rows in groups.items())
        return parts

    def _role(self, uses: frozenset[Use]) -> str:
        """Return "q", "k" or "v" for rows that are used as such, be it in several products (a loop over heads), else ""."""
        roles = {"qkv"[factor] for kind, _, factor in uses if kind == "attention"}
        soft = [(kind, factor) for kind, number, factor in uses if number in self.softened]
        roles |= {"qk"[factor] for kind, factor in soft if kind == "product"}
        roles |= {"v" for kind, _ in soft if kind == "values"}
        return roles.pop() if len(roles) == 1 else ""


def _in_order(rows: list[int]) -> range | tuple[int, ...]:
    ordered = range(rows[0], rows[-1] + 1)
    return ordered if len(ordered) == len(rows) else tuple(rows)
