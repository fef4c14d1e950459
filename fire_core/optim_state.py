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
# methods that set up, save or switch an optimizer; what all others write is its memory
NOT_TRAINING = set(
    ["__init__", "__setstate__", "load_state_dict", "state_dict", "add_param_group", "train", "eval"]
)
WORKSPACE = {"_dummy_overflow_buf"}  # of apex
ORIGINS = {
    "x0"
}  # copies that new weights are computed from (MADGRAD, D-Adaptation): they cannot follow a change


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
    estimates in `param_groups` return to their first values, but for those that a class lists as `never_cleared` (the
    position of a random stream); a group that has any is cleared as a whole. Copies of
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
    given = optimizers.values() if isinstance(optimizers, Mapping) else optimizers
    chosen = {id(p): p for p in _parameters(changed, policy)}
    masters = list(masters)
    nests = [_nest(each) for each in (given if isinstance(given, Iterable) else [given])]
    copies = [copy for nest in nests for copy in _copies(nest, {id(master) for _, master in masters})]
    for key, parameter, _ in copies if policy == "keep" else ():
        if changed is None or (key in ORIGINS and id(parameter) in chosen):
            raise UserError(
                f"optimizer_state='keep': {key!r} of this optimizer holds copies of weights, and the next step would "
                "bring the old ones back: "
                + ("give the report as `changed`" if changed is None else "choose clear or clear_changed")
            )
    forgetting = nests if policy != "keep" else []
    for part in [part for nest in forgetting for part in nest]:
        _restarts(part)  # raises before anything is written
    with torch.no_grad():
        for parameter, master in masters:
            if id(parameter) in chosen:
                master.copy_(parameter)
                del chosen[id(parameter)]
                chosen[id(master)] = master
        _check_stepped([part for nest in nests for part in nest], chosen)
        for _, parameter, copy in copies:
            if policy == "clear" or id(parameter) in chosen:
                copy.copy_(parameter)
        dropped = [[_forget(part, nest, policy, chosen) for part in nest] for nest in forgetting]
        return sum(len(set().union(*each)) for each in dropped)


@dataclass
class _Code:
    """What the source of a class says about the memory of its optimizers.

    counters: keys of groups, and attributes, that it writes while it trains. read: keys that it reads. optional: keys that
    may be missing. copies: keys of a state, and attributes, that hold copies of weights. started: keys of a state that it
    fills before the first step. constants: attributes that start as a constant.
    """

    counters: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    started: set[str] = field(default_factory=set)
    constants: dict[str, Any] = field(default_factory=dict)


@cache
def _code(kind: type) -> _Code:
    """Return what the sources of a class and of its bases say. Raises UserError if one cannot be read."""
    code = _Code()
    for base in inspect.getmro(kind):
        if base in (Optimizer, object) or base.__module__ in ("typing", "abc"):
            continue
        functions = [inspect.unwrap(value) for value in vars(base).values() if inspect.isfunction(value)]
        try:
            trees = [ast.parse(textwrap.dedent(inspect.getsource(each))).body[0] for each in functions]
        except (OSError, SyntaxError):
            raise UserError(
                f"the source of {base.__name__} cannot be read, so what this optimizer remembers is not known: build a "
                "new one instead"
            ) from None
        methods = {tree.name: tree for tree in trees if isinstance(tree, ast.FunctionDef)}
        texts = {name: ast.unparse(tree) for name, tree in methods.items()}
        later = [text for name, text in texts.items() if name not in NOT_TRAINING]
        called = {name for name in texts if f"self.{name}(" in texts.get("__init__", "")}
        starting = {"__init__"} | {n for n in called if not any(f"self.{n}(" in text for text in later)}
        training = "".join(text for name, text in texts.items() if name not in NOT_TRAINING | starting)
        code.read |= set(re.findall(r"\['(\w+)'\](?! = )", training))
        code.optional |= set(re.findall(r"'(\w+)' (?:not )?in ", training))
        code.optional |= set(re.findall(r"\.(?:get|setdefault)\('(\w+)'", training))
        for name, method in methods.items():
            for owner, key, value in _writes(method):
                if name == "__init__" and owner == "self" and isinstance(value, ast.Constant):
                    code.constants[key] = value.value
                if name in starting and "state" in owner:
                    code.started.add(key)
                if _is_copy(value, method):
                    code.copies.add(key)
                elif "state" not in owner and name not in NOT_TRAINING | starting:
                    code.counters.add(key)
    code.counters -= {"lr", *getattr(kind, "never_cleared", ())}
    return code


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
        for place in [each for target in targets for each in getattr(target, "elts", [target])]:
            while isinstance(place, ast.Subscript) and not isinstance(place.slice, ast.Constant):
                place = place.value  # self.copies[p] = ...
            if isinstance(place, ast.Subscript) and isinstance(ast.literal_eval(place.slice), str):
                yield ast.unparse(place.value), ast.literal_eval(place.slice), value
            elif isinstance(place, ast.Attribute):
                yield ast.unparse(place.value), place.attr, value


def _is_copy(value: ast.expr, method: ast.FunctionDef) -> bool:
    """Return whether an expression in a method copies a parameter."""
    loops = [node for node in ast.walk(method) if isinstance(node, ast.For | ast.comprehension)]
    over = [loop.target for loop in loops if re.search(r"params|active_p", ast.unparse(loop.iter))]
    weights = {"p", "param", "parameter"} | {target.id for target in over if isinstance(target, ast.Name)}
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    copies = re.search(r"\b(clone|copy_|deepcopy|float)\(", ast.unparse(value))
    return bool(names & weights and copies) and "grad" not in ast.unparse(value)


def _nest(optimizer: Any) -> list[Any]:
    """Return an optimizer and those that it holds, at any depth."""
    if not hasattr(optimizer, "param_groups"):
        raise UserError(f"{type(optimizer).__name__} is no optimizer: it has no param_groups")
    nest: list[Any] = []
    waiting = [optimizer]
    while waiting:
        part = waiting.pop()
        if not any(part is other for other in nest):
            nest.append(part)
            waiting += [value for _, _, value in _held(part) if not isinstance(value, Tensor)]
    return nest


def _held(part: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (attribute, key, value) of the tensors and optimizers in the attributes of an optimizer."""
    for name, attribute in vars(part).items():
        if name in ("param_groups", "state", "defaults") or attribute is part.param_groups:
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


def _copies(nest: list[Any], declared: set[int]) -> list[tuple[str, Tensor, Tensor]]:
    """Return the copies of weights that the optimizers of one nest keep, in their states and in their attributes.

    Each is (key of the state or name of the attribute, parameter, copy). declared: identities of tensors that are left out.
    Raises UserError for other tensors in attributes.
    """
    keys = set().union(*(_code(part.__class__).copies for part in nest))
    listed = {id(p): p for part in nest for group in part.param_groups for p in group["params"]}
    entries = [(p, key, value) for part in nest for p in part.state for key, value in _tensors(part.state[p])]
    own = [entry for entry in entries if entry[1] in keys and isinstance(entry[0], Tensor)]
    found = [(key, p, value) for p, key, value in own if value.shape == p.shape]
    known = {
        *listed,
        *declared,
        *(id(value) for _, _, value in entries),
        *(id(p.grad) for p in listed.values()),
    }
    for part in nest:
        held = [(name, key, value) for name, key, value in _held(part) if isinstance(value, Tensor)]
        held = [each for each in held if id(each[2]) not in known and each[0] not in WORKSPACE]
        for name in {name for name, _, _ in held}:
            values = {i: (key, value) for i, (each, key, value) in enumerate(held) if each == name}.values()
            by_key = [listed.get(key if isinstance(key, int) else id(key)) for key, _ in values]
            owners = list(listed.values()) if None in by_key else [p for p in by_key if p is not None]
            if name not in keys or [p.shape for p in owners] != [value.shape for _, value in values]:
                raise UserError(
                    f"{type(part).__name__} keeps {len(values)} tensors in its attribute {name!r}, and whether they copy "
                    "weights is not known: give copies as masters=zip(parameters, copies), or build a new optimizer"
                )
            found += [(name, p, value) for p, (_, value) in zip(owners, values, strict=True)]
    return found


def _tensors(entry: Any) -> list[tuple[str, Tensor]]:
    """Return keys and tensors of the state of one parameter."""
    found = entry.items() if isinstance(entry, Mapping) else ()
    return [(key, value) for key, value in found if isinstance(value, Tensor)]


def _forget(part: Any, nest: list[Any], policy: str, chosen: Mapping[int, Tensor]) -> set[int]:
    """Clear the memory of one optimizer of a nest, and return the identities of the parameters whose state is dropped."""
    code, codes = _code(part.__class__), [_code(each.__class__) for each in nest]
    started, copies = (set().union(*(getattr(each, of) for each in codes)) for of in ("started", "copies"))
    numbers = [name for name in code.counters & code.constants.keys() if _is_number(vars(part).get(name))]
    # LBFGS keeps the memory of all its parameters at one of them
    together = bool(numbers) or isinstance(part, LBFGS)
    dropped, restarts = set(), _restarts(part)
    touched = [any(id(p) in chosen for p in group["params"]) for group in part.param_groups]
    everything = policy == "clear" or (together and any(touched))
    for group, changed in zip(part.param_groups, touched, strict=True):
        counters = [(key, value) for owner, key, value in restarts if owner is group]
        whole = everything or (changed and bool(counters))
        for key, value in counters if whole else ():
            if value is None:
                del group[key]
            else:
                group[key] = value
        for parameter in group["params"]:
            if parameter in part.state and (whole or id(parameter) in chosen):
                entry = part.state.pop(parameter)
                for key, value in _tensors(entry):
                    if key in started - copies:
                        value.fill_(group.get("initial_accumulator_value", 0.0))  # of Adagrad
                if kept := {key: value for key, value in entry.items() if key in started}:
                    part.state[parameter] = kept
                dropped.add(id(parameter))
    for key in [key for key in part.state if everything and not isinstance(key, Tensor)]:
        del part.state[key]
    for name in numbers if everything else ():
        setattr(part, name, code.constants[name])
    return dropped


def _is_number(value: Any) -> bool:
    single = isinstance(value, Tensor) and value.numel() == 1
    return single or (isinstance(value, int | float) and not isinstance(value, bool))


def _restarts(part: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Return (group, key, first value) of the counters in the groups of an optimizer; the value is None if it has none.

    Raises UserError if one is not known, or that of a number in the state.
    """
    code = _code(part.__class__)
    defaults = getattr(part, "defaults", {})
    found = []
    unknown = [(key, "state") for key in part.state if not isinstance(key, Tensor) and key in code.started]
    for group in part.param_groups:
        for key in code.counters:
            if _is_number(group.get(key)):
                removable = key in code.optional or key not in code.read
                if key not in defaults and not removable and not isinstance(group[key], int):
                    unknown.append((key, "param_groups"))
                found.append((group, key, defaults.get(key, None if removable else 0)))
    for key, where in unknown:
        raise UserError(
            f"{type(part).__name__} keeps {key!r} in its {where}, and what it starts with is not known: build a new "
            "optimizer instead"
        )
    return found


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
