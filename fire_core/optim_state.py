"""Keep or clear the optimizer's state after a treatment has changed the weights.

Stale moments push changed weights along gradients of the old ones. What to do with them is a choice independent of the
method, so the training script applies it on the line after the boundary and records it with the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fire_core.errors import UserError
from fire_core.report import Report

POLICIES = ("keep", "clear", "clear_changed")


def reset_optimizer_state(
    optimizers: Mapping[str, Optimizer] | Iterable[Optimizer] | Optimizer,
    policy: str,
    changed: Report | Iterable[Tensor] | None = None,
    *,
    masters: Iterable[tuple[Tensor, Tensor]] = (),
) -> int:
    """Drop the state that optimizers keep for parameters, in place: moments, step counters, factored statistics.

    The optimizer rebuilds a dropped entry at its next step, as a new optimizer does. Learning rates, parameter groups
    and parameter identity stay. Works for any torch optimizer that keeps its memory in `Optimizer.state`.

    Args:
        policy: "keep" (drop nothing), "clear" (drop everything) or "clear_changed" (drop the state of `changed`).
        changed: the report of the treatment, or the parameters themselves; "clear_changed" needs one of them.
        masters: pairs (parameter of the model, the copy that the optimizer steps), for an optimizer that keeps float32
            copies of half-precision weights. Changed weights are first written into their copies, under every policy;
            without that the next step restores the old ones.
    Returns: the number of parameters whose state was dropped.
    Raises: UserError for an unknown policy, a missing or wrong `changed`, or optimizers that seem to step copies of it.
    """
    check_policy(policy)
    if isinstance(optimizers, Optimizer):
        optimizers = [optimizers]
    optimizers = list(optimizers.values() if isinstance(optimizers, Mapping) else optimizers)
    chosen = {id(p): p for p in _parameters(changed, policy)}
    for parameter, master in masters:
        if id(parameter) in chosen:
            with torch.no_grad():
                master.copy_(parameter)
            del chosen[id(parameter)]
            chosen[id(master)] = master
    _check_stepped(optimizers, chosen)
    dropped = 0
    for optimizer in optimizers:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # LBFGS keeps the memory of all its parameters at one of them
        together = isinstance(optimizer, LBFGS) and stepped & chosen.keys()
        for parameter in list(optimizer.state):
            if policy == "clear" or (policy == "clear_changed" and (together or id(parameter) in chosen)):
                del optimizer.state[parameter]
                dropped += 1
    return dropped


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
