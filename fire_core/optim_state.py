"""Keep or clear the optimizer's state after a treatment: stale moments push changed weights along gradients of the old ones.

The source of an optimizer's class tells what it remembers besides its state: entries of `param_groups` that it counts in,
copies of weights.
"""

import ast
import inspect
import re
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adadelta, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from fire_core.errors import UserError
from fire_core.report import Report

POLICIES = ("keep", "clear", "clear_changed")
# methods that save or switch an optimizer: neither what it starts with nor what it remembers
NO_TRAINING = {"__setstate__", "load_state_dict", "state_dict", "train", "eval"}
# attributes that are looked at elsewhere, a workspace of apex, and tables of bitsandbytes
NO_MEMORY = {"param_groups", "state", "defaults", "_dummy_overflow_buf", "name2qmap"}
ORIGIN = "x0"  # the copy that MADGRAD and D-Adaptation compute new weights from: it cannot follow a change
CAPTURED = {Adadelta, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop}  # a CUDA graph may hold what they remember
UNKNOWN, ABSENT = object(), object()
LOOPS = r"for (?:\w+, )?(\w+) in (?!zip)[^\n]*(?:params|active_p)"  # over parameters, in source
ZERO = r"zeros|tensor\(0(\.0)?[,)]"  # as a first value, in source


def reset_optimizer_state(
    optimizers: Mapping[str, Optimizer] | Iterable[Optimizer] | Optimizer,
    policy: str,
    changed: Report | Iterable[Tensor] | None = None,
) -> int:
    """Drop the state that optimizers keep for parameters, in place: moments, step counters, factored statistics.

    The optimizer rebuilds a dropped entry at its next step, as a new optimizer does. Learning rates, settings, parameter
    groups and parameter identity stay. Optimizers inside an optimizer (Lookahead, SAM) are included. Counters and
    estimates in `param_groups` return to their first values, but for those that a class lists as `never_cleared` (the
    position of a random stream). A group that has any, or one momentum for all, is cleared as a whole. Copies of
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
    nests = [nest_of(each) for each in (given if isinstance(given, Iterable) else [given])]
    chosen = _chosen(changed, policy, nests)
    copies = [copy for nest in nests for copy in copies_in(nest)]
    for key, parameter, _ in copies if policy == "keep" else ():
        if changed is None or (key == ORIGIN and id(parameter) in chosen):
            advice = "give the report as `changed`" if changed is None else "choose clear or clear_changed"
            wrong = f"optimizer_state='keep': {key!r} of this optimizer holds copies of weights"
            raise UserError(f"{wrong}, and the next step would bring the old ones back: {advice}")
    counters = {} if policy == "keep" else {id(part): _counters(part) for nest in nests for part in nest}
    for _, parameter, copy in copies:
        if policy == "clear" or id(parameter) in chosen:
            copy.data.copy_(parameter)
    dropped = set()
    for number, nest in enumerate(nests if counters else ()):
        for part in nest:
            dropped |= {(number, key) for key in _forget(part, counters[id(part)], policy == "clear", chosen)}
    return len(dropped)


def check_policy(policy: str) -> None:
    """Raise UserError for an unknown policy."""
    if policy not in POLICIES:
        raise UserError(f"optimizer_state={policy!r:.80}: choose one of {', '.join(POLICIES)}")


def _chosen(changed: Report | Iterable[Tensor] | None, policy: str, nests: list[list[Any]]) -> set[int]:
    """Return the identities of the changed parameters.

    Raises UserError if the optimizers seem to step copies of them, which restore the old values.
    """
    hint = "give the report of the treatment, or the parameters themselves"
    if changed is None and policy == "clear_changed":
        raise UserError(f"optimizer_state='clear_changed' without changed parameters: {hint}")
    changed = changed.parameters if isinstance(changed, Report) else changed
    found = [changed] if isinstance(changed, Tensor) else list(changed or ())
    if wrong := [entry for entry in found if not isinstance(entry, Tensor)]:
        raise UserError(f"changed holds {wrong[0]!r}, which is not a parameter: {hint}")
    stepped = {key for nest in nests for key in weights_of(nest)}
    left = [p for p in found if id(p) not in stepped]
    in_half = [p for p in left if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if stepped and (in_half or (left and len(left) == len(found))):
        example = (in_half or left)[0]
        raise UserError(
            f"{len(in_half or left)} changed parameters, the first {tuple(example.shape)} in {example.dtype}, are stepped "
            "by none of these optimizers: if they step float32 copies, the next step brings the old weights back; write the "
            "new weights into the copies and give these as `changed`, else give the optimizer of this model, built anew if "
            "a method such as plasticity_injection has replaced its parameters"
        )
    return {id(p) for p in found}


def weights_of(nest: Iterable[Any]) -> dict[int, Tensor]:
    """Return the parameters of the optimizers of one nest, by identity."""
    return {id(p): p for part in nest for group in part.param_groups for p in group["params"]}


def nest_of(optimizer: Any) -> list[Any]:
    """Return an optimizer and those that it holds, at any depth."""
    if not hasattr(optimizer, "param_groups"):
        raise UserError(f"{type(optimizer).__name__} is no optimizer: it has no param_groups")
    nest = [optimizer]
    for part in nest:  # it grows meanwhile
        for _, _, value in _held(part):
            if not isinstance(value, Tensor) and not any(value is other for other in nest):
                nest.append(value)
    return nest


def _held(part: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (attribute, key in the innermost mapping, value) of the tensors and optimizers in an optimizer's attributes."""
    ignored = NO_MEMORY | _memory(part.__class__).filled
    for name, attribute in vars(part).items():
        if name not in ignored and attribute is not part.param_groups:
            yield from ((name, key, value) for key, value in _within(attribute))


def _within(value: Any, key: Any = None) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        for inner, each in value.items():
            yield from _within(each, inner)
    elif isinstance(value, list | tuple | deque):
        for each in value:
            yield from _within(each, key)
    elif isinstance(value, Tensor) or (hasattr(value, "param_groups") and not isinstance(value, nn.Module)):
        yield key, value


class _Memory(NamedTuple):
    """What the source of a class says about its optimizers: keys of groups and states, and attributes.

    counters: written while it trains. needed: read while it trains, without asking whether they are there. copies: of
    weights. first: what it starts with, constants or UNKNOWN. kept: the same of a state that is filled before a step,
    ABSENT for zeros, copies and settings. filled: attributes that training fills with a scalar and otherwise only reads.
    """

    counters: set[str]
    needed: set[str]
    copies: set[str]
    first: dict[str, Any]
    kept: dict[str, Any]
    filled: set[str]


@cache
def _memory(kind: Any) -> _Memory:
    """Return what the sources of a class and of its bases say. Raises UserError if one cannot be read."""
    memory, asked = _Memory(set(), set(), set(), {}, {}, set()), set[tuple[str, str]]()
    for base in reversed(kind.__mro__):
        if base in (Optimizer, object) or base.__module__ in ("typing", "abc"):
            continue
        found = [getattr(each, "__func__", each) for each in vars(base).values()]  # static ones too
        functions = [inspect.unwrap(each) for each in found if inspect.isfunction(each)]
        try:
            trees = [ast.parse(textwrap.dedent(inspect.getsource(each))).body[0] for each in functions]
        except (OSError, SyntaxError):
            wrong = f"what {base.__name__} remembers is not known, as its source cannot be read"
            raise UserError(f"{wrong}: build a new one instead") from None
        methods = {each.name: each for each in trees if isinstance(each, ast.FunctionDef)}
        start = ast.unparse(methods["__init__"]) if "__init__" in methods else ""
        starts = {"__init__", "add_param_group", *re.findall(r"self\.(\w+)\(", start)}
        excluded = starts | NO_TRAINING
        training = "".join(ast.unparse(each) for name, each in methods.items() if name not in excluded)
        both = set(re.findall(r"self\.(\w+)\(", training))  # some start, and run in every step too
        memory.filled.update(re.findall(r"self\.(\w+)\.fill_\(", training))
        memory.counters.update(re.findall(r"self\.(\w+)\.(?!fill_\()\w+_\(", training))
        for name, method in methods.items():
            text = ast.unparse(method)
            if name in starts and re.search(r"\.state\[\w+\](\.update\(| = (?!\{\}))", text):
                memory.kept["state"] = UNKNOWN  # whole entries
            if name not in excluded:
                memory.needed.update(re.findall(r"\['(\w+)'\](?! = )", text))
                asked.update(re.findall(r"'(\w+)' (?:not )?in |\.(?:get|setdefault)\('(\w+)'", text))
            for owner, key, value in _writes(method):
                is_copy, in_state = _is_copy(value, method), "state" in owner
                first = value.value if isinstance(value, ast.Constant) else UNKNOWN
                if is_copy:
                    memory.copies.add(key)
                if name in starts and in_state:
                    setting = first is not UNKNOWN and not re.search(rf"\['{key}'\] [-+*/]?= ", training)
                    known = is_copy or setting or base.__module__.startswith("torch.optim.")
                    memory.kept[key] = ABSENT if known or re.search(ZERO, ast.unparse(value)) else first
                elif name in starts and not (name in both and key in memory.first):
                    memory.first[key] = first
                if name not in NO_TRAINING | (starts - both) and not in_state and not is_copy:
                    memory.counters.add(key)
    memory.needed.difference_update(chain.from_iterable(asked))
    memory.filled.difference_update(memory.counters)
    memory.counters.difference_update({"lr", "initial_lr"}, getattr(kind, "never_cleared", ()))
    return memory


def _writes(method: ast.FunctionDef) -> Iterator[tuple[str, str, ast.expr]]:
    """Yield owner, key and value of every `owner["key"] = value`, `owner.key = value`, `setdefault` and `copy_`."""
    for node in ast.walk(method):
        match node:
            case ast.Assign(targets=places, value=value):
                pass
            case ast.AugAssign(place, _, value) | ast.AnnAssign(place, _, ast.expr() as value):
                places = [place]
            case ast.Call(ast.Attribute(place, "copy_")):
                places, value = [place], node
            case ast.Call(ast.Attribute(owner, "setdefault"), [key, value]):
                setting = method.name == "step" and "group" in ast.unparse(owner)
                places = [] if setting else [ast.Subscript(owner, key)]
            case _:
                continue
        values = getattr(value, "elts", [])
        places = [p for target in places for p in getattr(target, "elts", [target])]
        for place, own in zip(places, values if len(values) == len(places) > 1 else [value] * len(places)):
            while isinstance(place, ast.Subscript) and not isinstance(place.slice, ast.Constant):
                place = place.value  # self.copies[p] = ...
            match place:
                case ast.Subscript(owner, ast.Constant(str(name))) | ast.Attribute(owner, name):
                    yield ast.unparse(owner), name, own


def _is_copy(value: ast.expr, method: ast.FunctionDef) -> bool:
    """Return whether an expression in a method copies a parameter."""
    text = ast.unparse(value)
    weights = "|".join({"p", "param", "parameter", *re.findall(LOOPS, ast.unparse(method))})
    copies = re.search(r"\b(clone|copy_|deepcopy|float|double)\(|\.to\(torch\.float", text)
    other = re.search(r"grad|zero|fill_|ones|full_like|empty|[<>=] [^()]*\)\.", text)  # the last one: a mask
    return bool(copies and re.search(rf"\b({weights})\b", text)) and not other


def copies_in(nest: list[Any]) -> list[tuple[str, Tensor, Tensor]]:
    """Return the copies of weights that the optimizers of one nest keep, in their states and in their attributes.

    Each is (key of the state or name of the attribute, parameter, copy). Raises UserError for other tensors in attributes.
    """
    keys = set().union(*(_memory(part.__class__).copies for part in nest))
    weights = weights_of(nest)
    found, known = [], {*weights, *(id(p.grad) for p in weights.values())}
    for p, entry in [item for part in nest for item in part.state.items() if isinstance(item[1], Mapping)]:
        tensors = [(key, value) for key, value in entry.items() if isinstance(value, Tensor)]
        known |= {id(value) for _, value in tensors}
        found += [(key, p, t) for key, t in tensors if key in keys and getattr(p, "shape", 0) == t.shape]
    for part in nest:
        for name, held in groupby(_held(part), key=itemgetter(0)):
            copies = [(key, v) for _, key, v in held if isinstance(v, Tensor) and id(v) not in known]
            owners: list[Any] = [weights.get(key if isinstance(key, int) else id(key)) for key, _ in copies]
            owners = [*weights.values()] if None in owners else owners
            if copies and (name not in keys or [p.shape for p in owners] != [v.shape for _, v in copies]):
                wrong = f"{type(part).__name__} keeps {len(copies)} tensors in its attribute {name!r}"
                raise UserError(f"{wrong}, and whether they copy weights is not known: build a new optimizer")
            found += [(name, p, copy) for p, (_, copy) in zip(owners, copies, strict=True)]
    return found


@contextmanager
def copies_follow(optimizers: Iterable[Any], masters: bool = False) -> Iterator[None]:
    """Write entries of weights that the body changes into optimizers' copies; `masters`: into those equal up to rounding."""
    others = [o for o in optimizers if not type(o).__module__.startswith("torch.optim.")]  # those keep none
    copies = [found[1:] for each in others for found in copies_in(nest_of(each))]
    before = [(p, held, p.detach().clone(), held.clone()) for p, held in copies]
    yield
    for p, held, old, kept in before:
        stays, own = ((p == old) | (kept.to(p) != old), held) if masters else (p == old, kept)
        held.data.copy_(torch.where(stays.to(held.device), own, p.to(kept)))


def _counters(part: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Return (group or attributes, key, first value) of the counters of an optimizer; ABSENT: it starts without.

    Raises UserError if one is not known.
    """
    memory, found = _memory(part.__class__), []
    for key in sorted(memory.counters):
        first = memory.first.get(key, UNKNOWN if key in memory.needed else ABSENT)
        owners = [(group, getattr(part, "defaults", {}).get(key, first)) for group in part.param_groups]
        owners += [(vars(part), first)] if _is_number(first) else []
        found += [(owner, key, value) for owner, value in owners if _is_number(owner.get(key))]
    unknown = [key for key in part.state if not isinstance(key, Tensor) and key in memory.kept]
    unknown += [key for key, first in memory.kept.items() if first is UNKNOWN]
    maps = {key: vars(part).get(key) for key in sorted(memory.counters - NO_MEMORY)}
    unknown += [k for k, m in maps.items() if isinstance(m, Mapping) and any(map(_is_number, m.values()))]
    for key in unknown + [key for _, key, first in found if first is UNKNOWN]:
        wrong = f"{type(part).__name__} keeps {key!r}, whose first value is not known"
        raise UserError(f"{wrong}: build a new optimizer, or choose keep")
    return found


def _is_number(value: Any) -> bool:
    single = isinstance(value, Tensor) and value.numel() == 1
    return single or (isinstance(value, int | float) and not isinstance(value, bool))


def groups_in_one(part: Any) -> set[int]:
    """Return the identities of the groups that keep stacked momenta with one of their parameters."""
    found = set()
    for group in part.param_groups:
        if len(held := [p for p in group["params"] if part.state.get(p)]) == 1:
            p, several = held[0], len(group["params"]) > 1
            stacks = [v for v in part.state[p].values() if isinstance(v, Tensor) and v.dim() > p.dim()]
            if any(v.shape[1:] == p.shape and (several or len(v) == 1) for v in stacks):
                found.add(id(group))
    return found


def _forget(part: Any, counters: list[Any], everything: bool, chosen: set[int]) -> set[int]:
    """Clear the memory of one optimizer, and return the identities of the parameters whose state is dropped."""
    memory, dropped = _memory(part.__class__), set()
    counting = {id(owner) for owner, _, _ in counters} | groups_in_one(part)
    shared = [key for key in part.state if not isinstance(key, Tensor)]  # k of MADGRAD
    touched = {id(g) for g in part.param_groups if any(id(p) in chosen for p in g["params"])}
    together = shared or isinstance(part, LBFGS) or id(vars(part)) in counting
    everything = everything or bool(together and touched)
    restarting = {id(vars(part)), *map(id, part.param_groups)} if everything else touched & counting
    for group in part.param_groups:
        for parameter in group["params"]:
            if parameter in part.state and (id(group) in restarting or id(parameter) in chosen):
                entry = part.state.pop(parameter)
                captured = group.get("capturable") and type(part) in CAPTURED
                if kept := {key: value for key, value in entry.items() if captured or key in memory.kept}:
                    part.state[parameter] = kept
                started = {"sum": group.get("initial_accumulator_value", 0.0), "mu_product": 1.0}
                for key, value in kept.items():
                    if isinstance(value, Tensor) and key not in memory.copies:
                        value.fill_(started.get(key, 0.0))
                    elif memory.kept.get(key, ABSENT) is not ABSENT:
                        kept[key] = memory.kept[key]
                dropped.add(id(parameter))
    for owner, key, first in counters:
        if id(owner) in restarting and first is ABSENT:
            del owner[key]
        elif id(owner) in restarting:
            owner[key] = first
    for key in shared if everything else ():
        del part.state[key]
    return dropped
