"""Keep or clear the optimizer's state after a treatment has changed the weights.

Stale moments push changed weights along gradients of the old ones. What to do with them is a choice independent of the
method, so the training script applies it on the line after the boundary and records it with the run.

What an optimizer remembers is known of the classes of torch.optim. Of any other class, its source tells which entries of
`param_groups` it counts in, and which tensors it fills with copies of the weights.
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
# methods that set up, save or switch an optimizer; what all others write is its memory
NOT_TRAINING = {"__init__", "__setstate__", "load_state_dict", "state_dict", "add_param_group", "train", "eval"}
BUFFERS = {"_dummy_overflow_buf"}  # workspace of apex
ORIGINS = {"x0"}  # copies that new weights are computed from (MADGRAD, D-Adaptation): they cannot follow a change


def reset_optimizer_state(
    optimizers: Mapping[str, Optimizer] | Iterable[Optimizer] | Optimizer,
    policy: str,
    changed: Report | Iterable[Tensor] | None = None,
    *,
    masters: Iterable[tuple[Tensor, Tensor]] = (),
) -> int:
    """Drop the state that optimizers keep for parameters, in place: moments, step counters, factored statistics.

    The optimizer rebuilds a dropped entry at its next step, as a new optimizer does. Learning rates, settings, parameter
    groups and parameter identity stay. Optimizers inside an optimizer (Lookahead, SAM) are included. Counters and
    estimates in `param_groups` return to their first values; a group that has any is cleared as a whole. Copies of
    changed weights (slow weights, float32 masters, z of Schedule-Free) get the new weights under every policy.

    Args:
        policy: "keep" (drop nothing), "clear" (drop everything) or "clear_changed" (drop the state of `changed`).
        changed: the report of the treatment, or the parameters themselves; "clear_changed" needs one of them, and so does
            "keep" for an optimizer that keeps copies of weights.
        masters: pairs (parameter of the model, the copy that the optimizer steps), for an optimizer that is given float32
            copies of half-precision weights.
    Returns: the number of parameters whose state was dropped, added up over `optimizers`.
    Raises: UserError for an unknown policy, a missing or wrong `changed`, optimizers that seem to step copies of it, and
        an optimizer with memory that cannot be told or cannot follow, which names the attribute.
    """
    check_policy(policy)
    if isinstance(optimizers, Mapping):
        optimizers = optimizers.values()
    tops = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    chosen = {id(p): p for p in _parameters(changed, policy)}
    masters = list(masters)
    nests = [_nest(top) for top in tops]
    copies = [_copies(nest, {id(copy) for _, copy in masters}) for nest in nests]
    _check_copies(policy, changed, chosen, copies)
    with torch.no_grad():
        for parameter, master in masters:
            if id(parameter) in chosen:
                master.copy_(parameter)
                del chosen[id(parameter)]
                chosen[id(master)] = master
        _check_stepped([part for nest in nests for part in nest], chosen)
        for key, _, parameter, copy in (entry for entries in copies for entry in entries):
            if policy == "clear" or id(parameter) in chosen:
                copy.copy_(parameter)
        if policy == "keep":
            return 0
        return sum(len({key for part in nest for key in _forget(part, nest, policy, chosen)}) for nest in nests)


@dataclass
class _Code:
    """What the source of a class says about the memory of its optimizers.

    counters: keys of groups, and attributes, that it writes while it trains. read: keys that it reads. expected: keys that may be missing.
    copies: keys of a state, and attributes, that it fills with copies of weights. started: keys of a state that it fills
    before the first step. constants: attributes that start as a constant.
    """

    counters: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    expected: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    started: set[str] = field(default_factory=set)
    constants: dict[str, Any] = field(default_factory=dict)


@cache
def _code(kind: type) -> _Code:
    """Return what the sources of a class and of its bases say. Raises UserError if one cannot be read."""
    code = _Code()
    for base in kind.__mro__:
        if base in (Optimizer, object) or base.__module__ in ("typing", "abc"):
            continue
        functions = [inspect.unwrap(value) for value in vars(base).values() if inspect.isfunction(value)]
        try:
            methods = [ast.parse(textwrap.dedent(inspect.getsource(each))).body[0] for each in functions]
        except (OSError, SyntaxError):
            raise UserError(
                f"the source of {base.__name__} cannot be read, so what this optimizer remembers is not known: build a "
                "new one instead"
            ) from None
        methods = [method for method in methods if isinstance(method, ast.FunctionDef)]
        texts = {method.name: ast.unparse(method) for method in methods}
        starting = {
            name
            for name in texts
            if f"self.{name}(" in texts.get("__init__", "")
            and not any(f"self.{name}(" in text for other, text in texts.items() if other not in NOT_TRAINING)
        } | {"__init__"}
        training = "".join(text for name, text in texts.items() if name not in NOT_TRAINING | starting)
        code.read |= set(re.findall(r"\['(\w+)'\](?! = )", training))
        code.expected |= set(re.findall(r"'(\w+)' (?:not )?in |\.(?:get|setdefault)\('(\w+)'", training))
        for method in methods:
            starts = method.name in starting
            weights = _weights(method)
            for owner, key, value in _writes(method):
                if method.name == "__init__" and owner == "self" and isinstance(value, ast.Constant):
                    code.constants[key] = value.value
                if starts and "state" in owner:
                    code.started.add(key)
                if _is_copy(value, weights):
                    code.copies.add(key)
                elif "state" not in owner and not starts and method.name not in NOT_TRAINING:
                    code.counters.add(key)
    code.expected = {name for pair in code.expected for name in pair if name}
    return code


def _weights(method: ast.FunctionDef) -> set[str]:
    """Return the names of loop variables of a method that run over parameters."""
    loops = [node for node in ast.walk(method) if isinstance(node, ast.For | ast.comprehension)]
    return {"p", "param", "parameter"} | {
        loop.target.id
        for loop in loops
        if isinstance(loop.target, ast.Name) and re.search(r"params|active_p", ast.unparse(loop.iter))
    }


def _is_copy(value: ast.expr, weights: set[str]) -> bool:
    """Return whether an expression copies a parameter."""
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    text = ast.unparse(value)
    return bool(names & weights) and "grad" not in text and bool(re.search(r"\b(clone|copy_|deepcopy|float)\(", text))


def _writes(method: ast.FunctionDef) -> Iterator[tuple[str, str, ast.expr]]:
    """Yield owner, key and value of every `owner["key"] = value`, `owner.key = value`, `setdefault` and `copy_`."""
    for node in ast.walk(method):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr == "copy_":
                targets, value = [node.func.value], node
            elif node.func.attr == "setdefault":
                targets, value = [ast.Subscript(node.func.value, node.args[0])], node.args[-1]
        for target in [each for target in targets for each in getattr(target, "elts", [target])]:
            while isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Constant):
                target = target.value  # self.copies[p] = ...
            if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                yield ast.unparse(target.value), str(target.slice.value), value
            elif isinstance(target, ast.Attribute):
                yield ast.unparse(target.value), target.attr, value


def _nest(optimizer: Any) -> list[Any]:
    """Return an optimizer and those that it holds, at any depth."""
    if not hasattr(optimizer, "param_groups"):
        raise UserError(f"{type(optimizer).__name__} is no optimizer: it has no param_groups")
    nest, waiting = [], [optimizer]
    while waiting:
        part = waiting.pop()
        if not any(part is other for other in nest):
            nest.append(part)
            waiting += [value for _, _, value in _held(part) if hasattr(value, "param_groups")]
    return nest


def _held(part: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (attribute, key, value) of the tensors and optimizers in the attributes of an optimizer."""
    for name, attribute in vars(part).items():
        if name in ("param_groups", "state", "defaults") or attribute is getattr(part, "param_groups", None):
            continue
        waiting = [(None, attribute)]
        while waiting:
            key, value = waiting.pop()
            if isinstance(value, Mapping):
                waiting += list(value.items())[::-1]
            elif isinstance(value, list | tuple):
                waiting += [(key, each) for each in value[::-1]]
            elif isinstance(value, Tensor) or (hasattr(value, "param_groups") and not isinstance(value, nn.Module)):
                yield name, key, value


def _copies(nest: list[Any], declared: set[int]) -> list[tuple[str, Any, Tensor, Tensor]]:
    """Return (key, optimizer, parameter, copy) of the copies of weights that the optimizers of one nest keep.

    declared: identities of tensors that are left out. Raises UserError for other tensors in attributes.
    """
    keys = set().union(*(_code(type(part)).copies for part in nest))
    listed = {id(p): p for part in nest for group in part.param_groups for p in group["params"]}
    states = {id(part.state): part.state for part in nest}.values()
    in_state = {id(v) for state in states for entry in state.values() for v in _tensors(entry).values()}
    found = [
        (key, state, parameter, value)
        for state in states
        for parameter, entry in state.items()
        for key, value in _tensors(entry).items()
        if key in keys and isinstance(parameter, Tensor) and value.shape == parameter.shape
    ]
    known = listed.keys() | in_state | declared | {id(p.grad) for p in listed.values()}
    for part in nest:
        others: dict[str, list[tuple[Any, Tensor]]] = {}
        for name, key, value in _held(part):
            if isinstance(value, Tensor) and id(value) not in known and name not in BUFFERS:
                others.setdefault(name, []).append((key, value))
        for name, values in others.items():
            by_key = [listed.get(key if isinstance(key, int) else id(key)) for key, _ in values]
            owners = by_key if None not in by_key else list(listed.values())
            shapes = [None if p is None else p.shape for p in owners]
            if name not in keys or shapes != [value.shape for _, value in values]:
                raise UserError(
                    f"{type(part).__name__} keeps {len(values)} tensors in its attribute {name!r}, and whether they are "
                    "copies of weights is not known: give copies as masters=zip(parameters, copies), or build a new optimizer"
                )
            found += [(name, part, owner, value) for owner, (_, value) in zip(owners, values, strict=True)]
    return found


def _tensors(entry: Any) -> dict[str, Tensor]:
    """Return the tensors of the state of one parameter."""
    found = entry.items() if isinstance(entry, Mapping) else ()
    return {key: value for key, value in found if isinstance(value, Tensor)}


def _check_copies(policy: str, changed: Any, chosen: Mapping[int, Tensor], copies: list[list[Any]]) -> None:
    """Raise UserError if copies of weights cannot follow."""
    for key, _, parameter, _ in (entry for entries in copies for entry in entries):
        if policy == "keep" and changed is None:
            raise UserError(
                f"optimizer_state='keep': this optimizer keeps copies of weights ({key!r}), which would bring the old "
                "ones back: give the report of the treatment as `changed`"
            )
        if policy == "keep" and key in ORIGINS and id(parameter) in chosen:
            raise UserError(
                f"optimizer_state='keep': this optimizer computes weights from {key!r}, the first ones, so the next step "
                "undoes any change: choose clear or clear_changed"
            )


def _forget(part: Any, nest: list[Any], policy: str, chosen: Mapping[int, Tensor]) -> set[int]:
    """Clear the memory of one optimizer of a nest, and return the identities of the parameters whose state is dropped."""
    code, dropped = _code(type(part)), set()
    started = set().union(*(_code(type(other)).started for other in nest))
    every = policy == "clear" or (
        _touched(part.param_groups, chosen)
        and (isinstance(part, LBFGS) or any(code.constants.keys() & code.counters & vars(part).keys()))
    )
    for group in part.param_groups:
        counters = {key for key in code.counters - {"lr", "params"} if _is_number(group.get(key))}
        whole = every or bool(counters and _touched([group], chosen))
        for key in counters if whole else ():
            _restart(part, group, key, code)
        for parameter in group["params"]:
            if parameter in part.state and (whole or id(parameter) in chosen):
                entry = part.state.pop(parameter)
                kept = {key: value for key, value in entry.items() if key in started}
                for key, value in _tensors(kept).items():
                    if key not in set().union(*(_code(type(other)).copies for other in nest)):
                        value.fill_(group.get("initial_accumulator_value", 0.0))  # Adagrad's
                if kept:
                    part.state[parameter] = kept
                dropped.add(id(parameter))
    if every:
        for key in [key for key in part.state if not isinstance(key, Tensor)]:
            if key in started:
                raise UserError(
                    f"{type(part).__name__} keeps {key!r} in its state, and what it starts with is not known: build a new "
                    "optimizer instead"
                )
            del part.state[key]
        for name in code.constants.keys() & code.counters & vars(part).keys():
            if _is_number(getattr(part, name)):
                setattr(part, name, code.constants[name])
    return dropped


def _touched(groups: Iterable[Any], chosen: Mapping[int, Tensor]) -> bool:
    return any(id(p) in chosen for group in groups for p in group["params"])


def _is_number(value: Any) -> bool:
    single = isinstance(value, Tensor) and value.numel() == 1
    return single or (isinstance(value, int | float) and not isinstance(value, bool))


def _restart(part: Any, group: dict[str, Any], key: str, code: _Code) -> None:
    """Give one entry of a group the value that it has in a new optimizer."""
    if key in getattr(part, "defaults", {}):
        group[key] = part.defaults[key]
    elif key in code.expected or key not in code.read:
        del group[key]
    elif isinstance(group[key], int):
        group[key] = 0
    else:
        raise UserError(
            f"{type(part).__name__} keeps {key!r} in its param_groups, and what it starts with is not known: build a new "
            "optimizer instead"
        )


def _parameters(changed: Report | Iterable[Tensor] | None, policy: str) -> list[Tensor]:
    hint = "give the report of the treatment, or the parameters themselves"
    if changed is None and policy == "clear_changed":
        raise UserError(f"optimizer_state='clear_changed' without changed parameters: {hint}")
    if isinstance(changed, Tensor):
        changed = [changed]
    found = changed.parameters if isinstance(changed, Report) else list(changed or ())
    for entry in found:
        if not isinstance(entry, Tensor):
            raise UserError(f"changed holds {entry!r}, which is not a parameter: {hint}")
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
            "by none of these optimizers: if they keep float32 copies, the next step brings the old weights back; give "
            "the pairs as masters=zip(model.parameters(), copies), else the optimizer of this model, built anew if a method "
            "such as plasticity_injection has replaced its parameters"
        )


def check_policy(policy: str) -> None:
    """Raise UserError for an unknown policy."""
    if policy not in POLICIES:
        raise UserError(f"optimizer_state={policy!r}: choose one of {', '.join(POLICIES)}")
