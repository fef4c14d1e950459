"""The table of targets of a model, the roles of targets in their network, and rules that choose among them.

A *target* is one matrix inside a parameter: the weight of a Linear layer, one spatial tap of a convolution, the q of a
fused q/k/v, one expert, one critic of an ensemble. `model_targets` finds those of a model.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fire_core.columns import columns
from fire_core.errors import UserError

WORDS = (
    "q to_q q_proj query query_proj queries wq w_q q_lin linear_q q_linear q_attn q_proj_weight",
    "o o_proj out_proj to_out proj c_proj wo w_o out_lin dense out",
    "mlp ffn ff feed_forward feedforward experts expert moe block_sparse_moe intermediate",
    "fc1 fc2 c_fc gate_proj up_proj down_proj gate_up_proj linear1 linear2 w1 w2 w3",
)
Q, O, MLP, MLP_LAYERS = (frozenset(words.split()) for words in WORDS)
K = {name.replace("queries", "keys").replace("query", "key").replace("q", "k") for name in Q}
V = {name.replace("queries", "values").replace("query", "value").replace("q", "v") for name in Q}
PROJECTIONS = {"q": Q, "k": K, "v": V, "o": O}
ATTENTION = ("q", "k", "v", "o", "attention")


def role_of(name: str, parents: tuple[nn.Module, ...]) -> str:
    """Return the role of the parameter `name`, or "" if unknown; `parents` are its modules, outermost first.

    Attention is recognised by "attn" or "attention" in a path component or in the name of a class other than the
    model's, or by a q and a k in one module. A "value" or "q" without a k is usually a head in reinforcement learning.
    A feed-forward block is recognised by the usual component and layer names.
    """
    path = name.lower().removesuffix(".weight").split(".")
    around = (*path, *(type(parent).__name__.lower() for parent in parents[1:]))
    beside = {n.lower() for module in parents[-2:] for n in (*module._modules, *module._parameters)}
    if any("attn" in word or "attention" in word for word in around) or (beside & Q and beside & K):
        known = (role for role, words in PROJECTIONS.items() if path[-1] in words)
        return next(known, "o" if "to_out" in path else "attention")
    return "mlp" if path[-1] in MLP_LAYERS or not MLP.isdisjoint(path) else ""


@dataclass(frozen=True)
class Target:
    """One matrix of a model (or one parameter that holds none), and whether it is to be treated.

    Attributes:
        name: the parameter and the part of it, e.g. "layer1.0.conv1.weight[0,2]", "h.0.attn.c_attn.weight[q]".
        parameter: the name in `model.named_parameters()`; a tied weight has one name there and one target here.
        kind: "linear", "conv", "embedding", "expert", "ensemble", "bias", "norm", "lora", ...
        index: `parameter[index]` is the stored block. transposed: whether that block is stored as (in, out).
        shape: (out, in) of the matrix, () for a parameter without matrices.
        scale: sqrt(out / in), divided by the number of taps for convolutions: the published scale after projection.
        included, reason: whether the target is to be treated, and why.
        role: "q", "k", "v", "o", "attention", "mlp" or "head", or "" if unknown. aliases: names that patterns may use.
        module: name of the module that holds the parameter. tied: whether the parameter is also an embedding table.
    """

    name: str
    parameter: str
    kind: str = ""
    scale: float = 1.0
    included: bool = False
    reason: str = ""
    index: tuple = ()
    transposed: bool = False
    shape: tuple = ()
    role: str = ""
    module: str = ""
    aliases: tuple[str, ...] = ()
    tied: bool = False

    def matrix(self, source: nn.Module | Mapping[str, Tensor]) -> Tensor:
        """Return the (out, in) matrix of this target from a model or a dict from parameter names to tensors.

        The matrix is a view of the parameter: writing into it (under `torch.no_grad()`) changes the parameter. Of a part
        whose rows lie apart (interleaved heads), it is a copy; `write` serves both.
        """
        named = source.get_parameter if isinstance(source, nn.Module) else source.__getitem__
        block = named(self.parameter)[self.index]
        return block.mT if self.transposed else block

    def write(self, source: nn.Module | Mapping[str, Tensor], value: Tensor) -> None:
        """Copy `value` (out, in), of any dtype, into the parameter, in place."""
        named = source.get_parameter if isinstance(source, nn.Module) else source.__getitem__
        with torch.no_grad():
            parameter = named(self.parameter)
            parameter[self.index] = (value.mT if self.transposed else value).to(parameter.dtype)


class TargetTable(list):
    """A list of every `Target` of a model, in module order.

    `str()` formats it, with the parts of a parameter and repeated layers ("h.*.attn.c_attn.weight") in one line; biases
    and norm parameters are only counted.

    Attributes:
        head_known: whether it is known which layers are the output layers.
    """

    head_known: bool = True

    @property
    def included(self) -> list[Target]:
        """The targets that are to be treated."""
        return [target for target in self if target.included]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters with at least one included target."""
        return list(dict.fromkeys(target.parameter for target in self.included))

    def __str__(self) -> str:
        lines: dict[tuple, list[str]] = {}  # what is printed as one -> parts
        for target in self:
            if target.kind not in ("bias", "norm"):
                name, _, part = target.name.rstrip("]").partition("[")
                state, name = "in" if target.included else "out", re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
                lines.setdefault((state, name, target.shape, target.kind, target.reason), []).append(part)
        rows = []
        for (state, name, shape, _, reason), members in lines.items():
            parts = list(dict.fromkeys(members))
            part = ", ".join(parts) if len(parts) <= 3 else f"{parts[0]} .. {parts[-1]}"
            values = (state, name, part, len(members) if shape else 0, "x".join(map(str, shape)), reason)
            rows.append(dict(zip(("", "parameter", "part", "matrices", "shape", "why"), values)))
        weights = sum(target.shape[0] * target.shape[1] for target in self.included)
        vectors = sum(target.kind in ("bias", "norm") for target in self)
        count = f"{len(self.included)} matrices with {weights:,} weights are in"
        return f"{columns(rows)}\n{count}; {vectors} biases and norm parameters are out{left_out(self.unclear, self)}"

    @property
    def unclear(self) -> list[Target]:
        """The weights that may hold several matrices in an order that is not known, and are out for that reason."""
        return [target for target in self if target.kind == "unclear"]


def left_out(unclear: Sequence[Target | Any], rows: Sequence[Target | Any]) -> str:
    """Return the line about weights that are out because it is not known how they are cut, or "".

    rows: all targets, or rows of a report; weights are those with a shape, and the unclear ones.
    """
    out = [row.parameter for row in unclear]
    weights = {*out, *(row.parameter for row in rows if row.shape)}
    return f"\n{len(out)} of {len(weights)} weights left out: {shorten(out)}" if out else ""


def names(table: Iterable[Target]) -> list[str]:
    """Return the parameter names of a table, once each, those of included targets first."""
    return list(dict.fromkeys(t.parameter for t in sorted(table, key=lambda target: not target.included)))


def shorten(words: Sequence[str], limit: int = 8) -> str:
    """Return the first `limit` words, joined by commas, and how many follow."""
    return ", ".join(words[:limit]) + (f", ... ({len(words) - limit} more)" if len(words) > limit else "")


PRESETS: dict[str, Callable[[Target], bool]] = {
    "all": lambda t: True,
    "linear": lambda t: t.kind != "conv",
    "conv": lambda t: t.kind == "conv",
    "qk": lambda t: t.role in ("q", "k"),
    "attention": lambda t: t.role in ATTENTION,
    "mlp": lambda t: t.role == "mlp",
    "head": lambda t: t.role == "head",
    "embedding": lambda t: t.tied,
}


def choose(
    table: TargetTable, targets: str | Sequence[str] | Callable[[Target], bool], owner: str = "the model"
) -> TargetTable:
    """Return the table of `list_targets` with the rule applied; errors as in `find_targets`, with the name `owner`."""
    if not table.included:
        reasons = "; ".join(f"{t.name}: {t.reason}" for t in table[:4]) or "it has no parameters"
        raise UserError(f"{owner} has no matrix to treat ({reasons})")
    if targets == "all":
        return table
    chosen = {target.name for target in select(table, targets)}
    text = targets if isinstance(targets, str) else getattr(targets, "__name__", str(targets))
    out = {"included": False, "reason": f"not chosen by targets={text}"}
    result = TargetTable(replace(t, **out) if t.included and t.name not in chosen else t for t in table)
    if not result.included:
        raise UserError(f"targets={targets!r} leaves no matrix in; names that exist: {shorten(names(table))}")
    return result


def select(table: TargetTable, rule: object, *, matrices_only: bool = True) -> list[Target]:
    """Return the targets of the rule: matrices, and else also what else its patterns match.

    Raises UserError for what is not a rule, and for a pattern that matches nothing in `table`.
    """
    if callable(rule):
        return [target for target in table.included if rule(target)]
    parts = re.split(r",(?![^\[]*\])", rule) if isinstance(rule, str) else rule  # "0.weight[1,2]" is one name
    items: list[Any] = list(parts) if isinstance(parts, Iterable) else []
    if all(isinstance(item, Target) for item in items):
        items = [item.name for item in items if item.included] or [item.name for item in items]
    items = [item.strip() if isinstance(item, str) else "" for item in items]
    if not items or "" in items:
        remedy = f"give a preset ({', '.join(PRESETS)}), a pattern, a list of them, or a callable"
        raise UserError(f"targets={rule!r} is not a rule: {remedy}")
    if len(items) > 1:  # "no_head" beside other entries takes away, as "-head" does
        negated = {f"no_{name}": f"-{name}" for name in PRESETS}
        items = [negated.get(item, item) for item in items]
    wanted = [item for item in items if not item.startswith("-")] or ["all"]
    taken = {t.name for item in wanted for t in _hits(table, item, matrices_only)}
    left = {t.name for item in items if item.startswith("-") for t in _hits(table, item[1:], False)}
    return [target for target in table if target.name in taken - left]


def _hits(table: TargetTable, item: str, matrices_only: bool) -> list[Target]:
    """Return the targets of one preset or pattern."""
    if preset := PRESETS.get(item.removeprefix("no_")):
        if preset is PRESETS["head"] and not table.head_known:
            wrong = f"targets: {item!r} needs the output layers, and which they are is not known"
            raise UserError(
                f"{wrong}: set is_head = True on each, give find_targets an example, or name them"
            )
        return [target for target in table.included if preset(target) == (item in PRESETS)]
    hits = [target for target in table if _matches(target, item)]
    if not hits:
        existing = names(table)
        modules = [target.module for target in table if target.module]
        known = [*PRESETS, *map("no_{}".format, PRESETS), *modules, *existing]
        near = difflib.get_close_matches(item, dict.fromkeys(known), n=4, cutoff=0.6)
        nearest = f"nearest: {', '.join(near)}; " if near else ""
        wrong = f"targets: {item!r} matches nothing; {nearest}names: {shorten(existing)}"
        raise UserError(f"{wrong}; presets: {', '.join(PRESETS)}")
    if matrices_only and not any(target.included for target in hits):
        raise UserError(f"targets: {item!r} matches only {hits[0].name}, which is out: {hits[0].reason}")
    return [target for target in hits if target.included or not matrices_only]


def _matches(target: Target, pattern: str) -> bool:
    """Return whether the pattern matches the target, its parameter (by any of its names), or a module around it."""
    whole, _, label = target.name.rstrip("]").partition("[")
    # q of "q,0,2", a tap of a fused convolution
    parts = [part for part in label.split(",") if not part.isdigit()]
    candidates = {target.name, *(f"{whole}.{part}" for part in (label, *parts))}
    for alias in (target.parameter, *target.aliases):
        words = alias.split(".")
        candidates.update(".".join(words[:length]) for length in range(1, len(words) + 1))
    return any(name == pattern or fnmatchcase(name, pattern) for name in candidates)
