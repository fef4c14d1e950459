"""Keep or clear the optimizer's state after a treatment has changed the weights.

Stale moments push changed weights along gradients of the old ones. What to do with them is a choice independent of the
method, so the training script applies it on the line after the boundary and records it with the run.

The source of an optimizer's class tells what it remembers besides its state: the entries of `param_groups` that it counts
in, and the tensors that it fills with copies of weights.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from fire_core.errors import UserError
from fire_core.report import Report

POLICIES = ("keep", "clear", "clear_changed")
# methods that save or switch an optimizer: neither what it starts with nor what it remembers
NO_TRAINING = {"__setstate__", "load_state_dict", "state_dict", "add_param_group", "train", "eval"}
WORKSPACE = "_dummy_overflow_buf"  # of apex
ORIGIN = "x0"  # the copy that MADGRAD and D-Adaptation compute new weights from: it cannot follow a change
UNKNOWN = object()


def reset_optimizer_state(
    optimizers: Mapping[str, Optimizer] | Iterable[Optimizer] | Optimizer,
    policy: str,
    changed: Report | Iterable[Tensor] | None = None,
) -> int:
    """Drop the state that optimizers keep for parameters, in place: moments, step counters, factored statistics.

    The optimizer rebuilds a dropped entry at its next step, as a new optimizer does. Learning rates, settings, parameter
    groups and parameter identity stay. Optimizers inside an optimizer (Lookahead, SAM) are included. Counters and
    estimates in `param_groups` return to their first values, but for those that a class lists as `never_cleared` (the
    position of a random stream); a group that has any is cleared as a whole. Copies of
    changed weights (slow weights, float32 masters, z of Schedule-Free) get the new weights under every policy.

    Args:
        policy: "keep" (drop nothing), "clear" (drop everything) or "clear_changed" (drop the state of `changed`).
        changed: the report of the treatment, or the parameters themselves; "clear_changed" needs one of them, and so does
            "keep" for an optimizer that keeps copies of weights.
    Returns: the number of parameters whose state was dropped, added up over `optimizers`.
    Raises: UserError for an unknown policy, a missing or wrong `changed`, optimizers that seem to step copies of it, and
        an optimizer with memory that cannot be told or cannot follow, which names the attribute.
    """
    check_policy(policy)
    given = optimizers.values() if isinstance(optimizers, Mapping) else optimizers
    chosen = {id(p): p for p in _parameters(changed, policy)}
    nests = [_nest(each) for each in (given if isinstance(given, Iterable) else [given])]
    copies = [copy for nest in nests for copy in _copies(nest)]
    for key, parameter, _ in copies if policy == "keep" else ():
        if changed is None or (key == ORIGIN and id(parameter) in chosen):
            advice = "give the report as `changed`" if changed is None else "choose clear or clear_changed"
            raise UserError(
                f"optimizer_state='keep': {key!r} of this optimizer holds copies of weights, and the next step would "
                f"bring the old ones back: {advice}"
            )
    _check_stepped([part for nest in nests for part in nest], chosen)
    forgetting = [] if policy == "keep" else [[(part, _starts(part)) for part in nest] for nest in nests]
    everything = policy == "clear"
    for _, parameter, copy in copies:
        if everything or id(parameter) in chosen:
            copy.data.copy_(parameter)
    dropped = [[_forget(part, starts, everything, chosen) for part, starts in nest] for nest in forgetting]
    return sum(len(set().union(*each)) for each in dropped)


@dataclass
class _Memory:
    """What the source of a class says about the memory of its optimizers: keys of groups and states, and attributes.

    written: while it trains. read: while it trains, and without asking whether they are there. copies: of weights. first:
    the constants that attributes start with, or UNKNOWN. kept: keys of a state that are filled before the first step.
    """

    written: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    first: dict[str, Any] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)


@cache
def _memory(kind: type) -> _Memory:
    """Return what the sources of a class and of its bases say. Raises UserError if one cannot be read."""
    memory, optional = _Memory(), set[str]()
    for base in reversed(kind.__mro__):
        if base in (Optimizer, object) or base.__module__ in ("typing", "abc"):
            continue
        functions = [inspect.unwrap(each) for each in vars(base).values() if inspect.isfunction(each)]
        try:
            trees = [ast.parse(textwrap.dedent(inspect.getsource(each))).body[0] for each in functions]
        except (OSError, SyntaxError):
            raise UserError(
                f"the source of {base.__name__} cannot be read, so what this optimizer remembers is not known: build a "
                "new one instead"
            ) from None
        methods = {each.name: each for each in trees if isinstance(each, ast.FunctionDef)}
        texts = {name: ast.unparse(each) for name, each in methods.items() if name not in NO_TRAINING}
        start = texts.pop("__init__", "")
        helpers = {name for name in texts if f"self.{name}(" in start}
        helpers -= {name for name in helpers if any(f"self.{name}(" in text for text in texts.values())}
        training = "".join(text for name, text in texts.items() if name not in helpers)
        memory.read |= set(re.findall(r"\['(\w+)'\](?! = )", training))
        optional |= set(re.findall(r"'(\w+)' (?:not )?in ", training))
        optional |= set(re.findall(r"\.(?:get|setdefault)\('(\w+)'", training))
        for name, method in methods.items():
            starts = name == "__init__" or name in helpers
            for owner, key, value in _writes(method):
                if _is_copy(value, method):
                    memory.copies.add(key)
                elif "state" not in owner and name in texts and not starts:
                    memory.written.add(key)
                if starts and "state" in owner:
                    memory.kept.add(key)
                elif starts:
                    memory.first[key] = value.value if isinstance(value, ast.Constant) else UNKNOWN
    memory.read -= optional
    memory.written -= {"lr", "initial_lr", *getattr(kind, "never_cleared", ())}
    return memory


def _writes(method: ast.FunctionDef) -> Iterator[tuple[str, str, ast.expr]]:
    """Yield owner, key and value of every `owner["key"] = value`, `owner.key = value`, `setdefault` and `copy_`."""
    for node in ast.walk(method):
        places: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            places, value = node.targets, node.value
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
            places, value = [node.target], node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr == "copy_":
                places, value = [node.func.value], node
            elif node.func.attr == "setdefault":
                places, value = [ast.Subscript(node.func.value, node.args[0])], node.args[-1]
        for place in [each for target in places for each in getattr(target, "elts", [target])]:
            while isinstance(place, ast.Subscript) and not isinstance(place.slice, ast.Constant):
                place = place.value  # self.copies[p] = ...
            if isinstance(place, ast.Subscript) and isinstance(ast.literal_eval(place.slice), str):
                yield ast.unparse(place.value), ast.literal_eval(place.slice), value
            elif isinstance(place, ast.Attribute):
                yield ast.unparse(place.value), place.attr, value


def _is_copy(value: ast.expr, method: ast.FunctionDef) -> bool:
    """Return whether an expression in a method copies a parameter."""
    text = ast.unparse(value)
    loops = re.findall(r"for (\w+) in [^\n]*(?:params|active_p)", ast.unparse(method))
    weights = "|".join({"p", "param", "parameter", *loops})
    copies = re.search(r"\b(clone|copy_|deepcopy|float)\(", text) and re.search(rf"\b({weights})\b", text)
    return bool(copies) and "grad" not in text


def _nest(optimizer: Any) -> list[Any]:
    """Return an optimizer and those that it holds, at any depth."""
    if not hasattr(optimizer, "param_groups"):
        raise UserError(f"{type(optimizer).__name__} is no optimizer: it has no param_groups")
    nest = [optimizer]
    for part in nest:  # it grows meanwhile
        inside = [value for _, _, value in _held(part) if not isinstance(value, Tensor)]
        nest += [each for each in inside if not any(each is other for other in nest)]
    return nest


def _held(part: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (attribute, key, value) of the tensors and optimizers in the attributes of an optimizer."""
    for name, attribute in vars(part).items():
        if name in ("param_groups", "state", "defaults", WORKSPACE) or attribute is part.param_groups:
            continue
        waiting = [(None, attribute)]
        while waiting:
            key, value = waiting.pop()
            if isinstance(value, Mapping):
                waiting += list(value.items())[::-1]
            elif isinstance(value, list | tuple):
                waiting += [(key, each) for each in value[::-1]]
            elif isinstance(value, Tensor) or (
                hasattr(value, "param_groups") and not isinstance(value, nn.Module)
            ):
                yield name, key, value


def _copies(nest: list[Any]) -> list[tuple[str, Tensor, Tensor]]:
    """Return the copies of weights that the optimizers of one nest keep, in their states and in their attributes.

    Each is (key of the state or name of the attribute, parameter, copy). Raises UserError for other tensors in attributes.
    """
    keys = set().union(*(_memory(part.__class__).copies for part in nest))
    listed = {id(p): p for part in nest for group in part.param_groups for p in group["params"]}
    entries = [
        (key, p, value) for part in nest for p, entry in part.state.items() for key, value in _tensors(entry)
    ]
    found = [(key, p, v) for key, p, v in entries if key in keys and getattr(p, "shape", None) == v.shape]
    known = {*listed, *(id(value) for _, _, value in entries), *(id(p.grad) for p in listed.values())}
    for part in nest:
        held: dict[str, list[tuple[Any, Tensor]]] = {}
        for name, key, value in _held(part):
            if isinstance(value, Tensor) and id(value) not in known:
                held.setdefault(name, []).append((key, value))
        for name, values in held.items():
            by_key = [listed.get(key if isinstance(key, int) else id(key)) for key, _ in values]
            owners = list(listed.values()) if None in by_key else [p for p in by_key if p is not None]
            if name not in keys or [p.shape for p in owners] != [value.shape for _, value in values]:
                raise UserError(
                    f"{type(part).__name__} keeps {len(values)} tensors in its attribute {name!r}, and whether they copy "
                    "weights is not known: build a new optimizer"
                )
            found += [(name, p, value) for p, (_, value) in zip(owners, values, strict=True)]
    return found


def _tensors(entry: Any) -> list[tuple[str, Tensor]]:
    """Return keys and tensors of the state of one parameter."""
    found = entry.items() if isinstance(entry, Mapping) else ()
    return [(key, value) for key, value in found if isinstance(value, Tensor)]


def _starts(part: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Return (group or attributes, key, first value) of the counters of an optimizer; what it starts without is None.

    Raises UserError if one is not known.
    """
    memory, found = _memory(part.__class__), []
    for key in memory.written:
        first = memory.first.get(key)
        if first is not None and first is not UNKNOWN and _is_number(vars(part).get(key)):
            found.append((vars(part), key, first))
    for group in part.param_groups:
        for key in memory.written:
            if _is_number(group.get(key)):
                first = None if key not in memory.read else 0 if isinstance(group[key], int) else UNKNOWN
                found.append((group, key, getattr(part, "defaults", {}).get(key, first)))
    unknown = [key for key in part.state if not isinstance(key, Tensor) and key in memory.kept]
    for key in unknown + [key for _, key, value in found if value is UNKNOWN]:
        raise UserError(
            f"{type(part).__name__} counts in {key!r}, and what it starts with is not known: build a new optimizer instead"
        )
    return found


def _is_number(value: Any) -> bool:
    single = isinstance(value, Tensor) and value.numel() == 1
    return single or (isinstance(value, int | float) and not isinstance(value, bool))


def _forget(part: Any, starts: list[Any], everything: bool, chosen: Mapping[int, Tensor]) -> set[int]:
    """Clear the memory of one optimizer, and return the identities of the parameters whose state is dropped."""
    memory, dropped = _memory(part.__class__), set()
    counting = {id(owner) for owner, _, _ in starts}
    shared = [key for key in part.state if not isinstance(key, Tensor)]  # k of MADGRAD
    touched = [any(id(p) in chosen for p in group["params"]) for group in part.param_groups]
    together = shared or isinstance(part, LBFGS) or id(vars(part)) in counting
    everything = everything or bool(together and any(touched))
    restarting = {id(vars(part))} if everything else set()
    for group, changed in zip(part.param_groups, touched, strict=True):
        if forgets_all := everything or (changed and id(group) in counting):
            restarting.add(id(group))
        for parameter in group["params"]:
            if parameter in part.state and (forgets_all or id(parameter) in chosen):
                entry = part.state.pop(parameter)
                for key, value in _tensors(entry):
                    if key in memory.kept - memory.copies:
                        value.fill_(group.get("initial_accumulator_value", 0.0))  # of Adagrad
                if kept := {key: value for key, value in entry.items() if key in memory.kept}:
                    part.state[parameter] = kept
                dropped.add(id(parameter))
    for owner, key, first in starts:
        if id(owner) in restarting and first is None:
            del owner[key]
        elif id(owner) in restarting:
            owner[key] = first
    for key in shared if everything else ():
        del part.state[key]
    return dropped


def _parameters(changed: Report | Iterable[Tensor] | None, policy: str) -> list[Tensor]:
    hint = "give the report of the treatment, or the parameters themselves"
    if changed is None and policy == "clear_changed":
        raise UserError(f"optimizer_state='clear_changed' without changed parameters: {hint}")
    if isinstance(changed, Tensor | Report):
        return [changed] if isinstance(changed, Tensor) else changed.parameters
    found = list(changed or ())
    if wrong := [entry for entry in found if not isinstance(entry, Tensor)]:
        raise UserError(f"changed holds {wrong[0]!r}, which is not a parameter: {hint}")
    return found


def _check_stepped(optimizers: list[Optimizer], chosen: Mapping[int, Tensor]) -> None:
    """Raise UserError if the optimizers seem to step copies of the changed parameters, which restore the old values."""
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    left = [p for key, p in chosen.items() if key not in stepped]
    in_half = [p for p in left if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if stepped and (in_half or (left and len(left) == len(chosen))):
        example = (in_half or left)[0]
        raise UserError(
            f"{len(in_half or left)} changed parameters, the first {tuple(example.shape)} in {example.dtype}, are stepped "
            "by none of these optimizers: if they step float32 copies, the next step brings the old weights back; write the "
            "new weights into the copies and give these as `changed`, else give the optimizer of this model, built anew if "
            "a method such as plasticity_injection has replaced its parameters"
        )


def check_policy(policy: str) -> None:
    """Raise UserError for an unknown policy."""
    if policy not in POLICIES:
        raise UserError(f"optimizer_state={policy!r}: choose one of {', '.join(POLICIES)}")
