"""What one run of a net shows: of which unit, or of which row of which weight, each entry of each tensor is made.

Labels follow the entries through elementwise functions, as PyTorch marks them, and views. What any other operation does
with labels is found by running it once more on numbers that stand for them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from fire_core.passes import call, eager
from fire_core.targets.labels import MIXED, OUTSIDE, compact, core, is_mixed

WITH_ADDEND = {"addmm", "baddbmm", "addmv"}
PRODUCTS = {"mm", "bmm", "mv", "dot", "convolution", *WITH_ADDEND}
LOOK_UPS = {"embedding", "_embedding_bag"}
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
RESHAPES = {"view", "_unsafe_view", "_reshape_alias"}
UNSAFE_VIEWS = {"_unsafe_view", "unsafe_split", "unsafe_chunk"}
COPIES = {"_to_copy", "clone", "copy"}
# elementwise operations that PyTorch does not mark as such
UNMARKED = {"hardswish", "_prelu_kernel", "log_sigmoid_forward", "rrelu_with_noise", *COPIES}


class Operation(NamedTuple):
    """One call of a function of PyTorch."""

    function: Any
    name: str
    args: Any
    kwargs: Any

    def again(self, of: Callable[[Tensor], Tensor]) -> list[Any]:
        """Return the results for other tensors."""
        args, kwargs = tree_map_only(Tensor, of, (self.args, self.kwargs))
        return tree_leaves(self.function(*args, **kwargs))

    @property
    def inputs(self) -> list[Tensor]:
        return tensors_in((self.args, self.kwargs))


@dataclass(frozen=True)
class Source:
    """Where the entries of a tensor come from.

    labels: number of a group << 32 | member for each entry; None if no entry has one. lost: groups that are mixed in
    entries without a label -> the operation that mixed them. gates: places of layers that were multiplied with the labelled
    ones. discrete: whether only integers of the input, as masks are, reach it. weights: those whose outputs reach it without
    another product with weights. scores: number of the product of two activations that it is. is_weight: from weights alone.
    """

    labels: Tensor | None = None
    lost: dict[int, str] = field(default_factory=dict)
    gates: frozenset[int] = frozenset()
    discrete: bool = False
    weights: frozenset[int] = frozenset()
    scores: int | None = None
    is_weight: bool = False


Known = list[tuple[Tensor, Source]]


class Product(NamedTuple):
    """A product. reads: (place among the operands, source) of activations. weight: source of an operand that is a weight.

    side: the dimension of units in W x (-2) or x W (-1). stacked: whether each row of a batch has a matrix W of its own.
    """

    name: str
    args: Any
    operands: Any
    reads: list[tuple[int, Source]]
    weight: Source | None
    side: int
    stacked: bool

    def along(self, tensor: Tensor) -> list[int]:
        """Return the dimensions of units."""
        last = 1 if self.name == "convolution" else self.side if tensor.ndim > 1 else -1
        return [0, last] if self.stacked else [last]

    def sizes(self, result: Tensor) -> list[int]:
        """Return the sizes of the result, 1 where the units do not depend on a dimension."""
        dims = [dim % result.ndim for dim in self.along(result)]
        return [size if dim in dims else 1 for dim, size in enumerate(result.shape)]


class Trace(TorchDispatchMode):
    """Context that follows the labels of what depends on the input or on weights, without gradients.

    operations: number of calls so far. softened: numbers of products of two activations that a softmax follows. What is
    labelled, and what becomes of labels that meet or are lost, is decided by the classes that follow the rows of weights
    (`fire_core.targets.rows`) and the outputs of layers (`fire_core.units.trace`): each of these returns a result's source.
    """

    product: Callable[[Product, Tensor], Source]
    attention: Callable[[Operation, Known], Source]
    elementwise: Callable[[Operation, Known, torch.Size], Source]
    other: Callable[[Operation, Known, Tensor, bool], Source]  # of what may mix labels
    lose: Callable[[str, Known], Source]

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.softened: set[int] = set()
        self._sources: Any = WeakTensorKeyDictionary()

    def run(self, net: nn.Module, inputs: Any) -> Any:
        """Run `inputs` through `net` in its present mode and return the output."""
        fused = torch.backends.mha.get_fastpath_enabled()  # PyTorch's encoder layers as single operations
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            mode = torch.is_inference_mode_enabled() and any(p.is_inference() for p in net.parameters())
            with torch.inference_mode(mode), torch.no_grad(), eager():  # in that mode, nothing is dispatched
                inputs = tree_map_only(Tensor, Tensor.clone, inputs)
                for leaf in tensors_in(inputs):
                    self._sources[leaf] = Source(discrete=not leaf.is_floating_point())
                with self:
                    return call(net, inputs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)

    def sources(self, tree: Any) -> Known:
        """Return the tensors in a tree that depend on the inputs or on weights, with their sources."""
        found = [(leaf, self._sources.get(leaf)) for leaf in tensors_in(tree)]
        return [(leaf, source) for leaf, source in found if source is not None]

    def groups_in(self, source: Source) -> set[int]:
        """Return the numbers of the groups whose members have labels in `source`."""
        return set() if source.labels is None else set((core(source.labels) >> 32).unique().tolist()) - {-1}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and note where the entries of its results come from."""
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__.rstrip("_")
        args = args[1:] if name == "copy" else args  # what was there before is gone
        known = self.sources((args, kwargs))
        known = [each for each in known if not each[1].is_weight] or known
        operation = Operation(function, name, args, kwargs or {})
        self.operations += 1
        if "softmax" in name:
            self.softened |= {source.scores for _, source in known if source.scores is not None}
        if name in PRODUCTS or name in LOOK_UPS:
            self._multiply(name, args, result)
        elif not known:
            pass
        elif name.startswith(ATTENTION):
            self._set(result, self.attention(operation, known))
        elif all(source.labels is None for _, source in known):
            self._set(result, combined(known))
        elif function.is_view or name in UNSAFE_VIEWS:
            self._view(operation, known, tensors_in(result))
        elif torch.Tag.pointwise in function.tags or name in UNMARKED:
            self._set(result, self.elementwise(operation, known, tensors_in(result)[0].shape))
        elif outputs := tensors_in(result):
            self._other(operation, known, outputs)
        if name == "copy" and known and result._is_view():  # what is in the whole is not followed any more
            whole = result._base
            self._sources[whole] = self.lose("a write into a part", self.sources((whole, result)))
        return result

    def _set(self, result: Any, source: Source) -> None:
        for leaf in tensors_in(result):
            self._sources[leaf] = source

    def _multiply(self, name: str, args: Any, result: Tensor) -> None:
        operands = args[1:3] if name in WITH_ADDEND else args[:2]
        sources = [None if name in LOOK_UPS else self._sources.get(x) for x in operands]
        reads = [(i, s) for i, s in enumerate(sources) if s is not None and not s.is_weight]
        weight = next((s for s in sources if s is not None and s.is_weight), None)
        side = -2 if reads and reads[0][0] == 1 else -1
        matrix = operands[side + 2]
        stacked = "bmm" in name and len(reads) == 1 and len(matrix) > 1 and matrix.stride(0) != 0
        if reads or name in LOOK_UPS:
            product = Product(name, args, operands, reads, weight, side, stacked)
            self._set(result, self.product(product, result))

    def _view(self, operation: Operation, known: Known, parts: list[Tensor]) -> None:
        source = known[0][1]
        labels: Any = source.labels
        try:
            reshaped = operation.name in RESHAPES
            moved = [labels.reshape(parts[0].shape)] if reshaped else operation.again(lambda leaf: labels)
            for part, each in zip(parts, moved, strict=True):
                self._sources[part] = replace(source, labels=compact(each))
        except RuntimeError:  # a view of complex numbers, or by strides
            self._set(parts, self.lose(operation.name, known))

    def _other(self, operation: Operation, known: Known, outputs: list[Tensor]) -> None:
        """Follow labels through an operation that is neither elementwise nor a view."""
        moved = self._moved(operation, known, outputs)
        joined = self.other(operation, known, outputs[0], is_mixed(moved[0]))
        for output, labels in zip(outputs, moved, strict=True):
            if labels is None or not (core(labels) >= 0).any():
                self._sources[output] = replace(joined, labels=None, gates=frozenset())
            else:
                lost = joined.lost if is_mixed(labels) else {}
                self._sources[output] = replace(joined, labels=labels, lost=lost)

    def _moved(self, operation: Operation, known: Known, outputs: list[Tensor]) -> list[Tensor | None]:
        """Return the labels of the results, None where they are not known."""
        function, name, args, _ = operation
        nothing: list[Tensor | None] = [None] * len(outputs)
        first = next(source.labels for _, source in known if source.labels is not None)
        if name == "glu":
            return [compact(first.chunk(2, args[1] if len(args) > 1 else -1)[0])]
        in_place = any(word in name for word in ("norm", "softmax", "dropout"))
        if in_place and outputs[0].shape == first.shape:
            return [first, *nothing[1:]]
        if function._schema.is_mutable:  # running it again must not write
            return nothing

        def labels_of(leaf: Tensor) -> Tensor:
            source = self._sources.get(leaf, Source())
            missing = MIXED if source.lost else OUTSIDE
            return first.new_full((), missing).expand(leaf.shape) if source.labels is None else source.labels

        try:
            return through_any(operation, labels_of)
        except (RuntimeError, TypeError, ValueError):
            return nothing


def combined(known: Known) -> Source:
    """Return the source, without labels, of what is computed from all of these."""
    sources = [source for _, source in known]
    return Source(
        lost={number: name for source in sources for number, name in source.lost.items()},
        gates=frozenset().union(*(source.gates for source in sources)),
        discrete=all(source.discrete for source in sources),
        weights=frozenset().union(*(source.weights for source in sources)),
        scores=next((source.scores for source in sources if source.scores is not None), None),
        is_weight=all(source.is_weight for source in sources),
    )


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def through_any(operation: Operation, labels_of: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    """Return the labels of the results: run the operation on numbers r and s of the labels, and look up the ratio r/s.

    labels_of: function from an input of the operation to its labels. r rises and s falls with a random number u of each,
    so the ratio is that of one label where an entry is a sum, mean or maximum of entries of one unit, and of no label, but
    for a chance of 1e-10 for each, elsewhere. Raises RuntimeError, TypeError or ValueError if it takes no such numbers.
    """
    inputs = [core(labels_of(leaf)).flatten() for leaf in operation.inputs]
    labels = torch.cat([*inputs, *(inputs[0].new_full((1,), value) for value in (MIXED, OUTSIDE))]).unique()
    draw = torch.Generator().manual_seed(0)
    u = torch.rand(len(labels), generator=draw, dtype=torch.float64, device="cpu").to(labels.device)
    values, order = u.sort()

    def numbers(slope: float, start: float) -> list[Tensor]:
        def of(leaf: Tensor) -> Tensor:
            number = u[torch.searchsorted(labels, core(labels_of(leaf)).contiguous())]
            return (start + slope * number).expand(leaf.shape) if leaf.is_floating_point() else leaf

        return [each for each in operation.again(of) if isinstance(each, Tensor)]  # fast paths add None

    def label(rising: Tensor, falling: Tensor) -> Tensor:
        ratio = rising / falling
        found = ((2 * ratio - 1) / (1 + ratio)).contiguous()  # (1 + u) / (2 - u) = ratio
        near = torch.searchsorted(values, found - 1e-10).clamp_max(len(u) - 1)
        known = labels[order[near]].where((values[near] - found).abs() < 1e-10, MIXED)
        return compact(known.where((rising != 0) | (falling != 0), OUTSIDE))  # padding

    pairs = zip(numbers(1.0, 1.0), numbers(-1.0, 2.0), strict=True)
    return [label(r, s) if r.is_floating_point() else None for r, s in pairs]
