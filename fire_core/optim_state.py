"""What becomes of the optimizer's memory when weights were changed under it: keep, clear, or clear what changed.

Stale moments push re-initialised weights along gradients of the old ones; the policy is therefore an axis of its own,
applied on the line after the boundary and recorded with the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError

POLICIES = ("keep", "clear", "clear_changed")


def apply_policy(
    optimizers: Mapping[str, Optimizer] | Iterable[Optimizer] | Optimizer,
    policy: str,
    changed: Iterable[nn.Parameter] | None = None,
) -> int:
    """Drop optimizer state in place: moments, step counters, factored statistics, all of a parameter's entry.

    A dropped entry is rebuilt by the optimizer at its next step, as in a new optimizer; learning rates, parameter
    groups and parameter identity stay. Works for any torch optimizer that keeps its memory in `Optimizer.state`.

    Args:
        policy: "keep"; "clear" (all); "clear_changed" (only of the parameters given).
        changed: parameters whose values were replaced, e.g. `report.parameters(state)`; "clear_changed" needs them.
    Returns: number of parameters whose state was dropped.
    Raises: UserError for an unknown policy, and for names where parameters are needed.
    """
    check_policy(policy)
    if isinstance(optimizers, Optimizer):
        optimizers = [optimizers]
    elif isinstance(optimizers, Mapping):
        optimizers = list(optimizers.values())
    chosen = {id(p) for p in _parameters(changed, policy)}
    dropped = 0
    for optimizer in optimizers:
        for parameter in list(optimizer.state):
            if policy == "clear" or (policy == "clear_changed" and id(parameter) in chosen):
                del optimizer.state[parameter]
                dropped += 1
    return dropped


def _parameters(changed: Iterable[nn.Parameter] | None, policy: str) -> list[nn.Parameter]:
    hint = "give the parameters themselves: [model.get_parameter(name) for name in report.changed]"
    if changed is None and policy == "clear_changed":
        raise UserError(f"optimizer_state='clear_changed' without changed parameters: {hint}")
    found = [] if changed is None else list(changed)
    for entry in found:
        if not isinstance(entry, Tensor):
            raise UserError(f"changed holds {entry!r}, which is no parameter: {hint}")
    return found


def check_policy(policy: str) -> None:
    """Raise UserError for an unknown policy, before any training."""
    if policy not in POLICIES:
        raise UserError(f"optimizer_state={policy!r}: choose one of {', '.join(POLICIES)}")
