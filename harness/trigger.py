"""Triggers of runs: with `trigger=`, the method acts before the next step when a trigger fires, not at the boundaries of
phases, of which it is not told. It sees what the script records, an epoch or an evaluation at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fire_core.errors import UserError, did_you_mean
from fire_core.methods import Method
from fire_core.triggers import Above, Cooldown, EveryNSteps, Fall, Plateau, Trigger

KINDS: dict[str, Callable[..., Trigger | None]] = {  # name -> function of its settings
    "boundary": lambda: None,
    "every": lambda steps: EveryNSteps(steps),
    "shifted": lambda steps, first: EveryNSteps(steps, first),
    "plateau": Plateau,
    "dormancy": lambda level: Above("dormant_share", level),
    "dfi": lambda level: Above("dfi", level),
    "rank": lambda share: Fall("feature_rank", share),
    "gradient": lambda share: Fall("relative_gradient", share),
}


class RunTrigger:
    """Decides when the method of a run acts, by the settings of `trigger=` (None: at boundaries), and counts the acts."""

    def __init__(self, settings: Mapping[str, Any] | None) -> None:
        self.name = settings["name"] if settings else "boundary"
        self.rule = make(settings) if settings else None
        self.metric = getattr(self.rule, "trigger", self.rule).metric if self.rule else ""
        # whether it needs the metrics of plasticity and the relative gradient in every record
        self.measures = self.name in ("dormancy", "dfi", "rank", "gradient")
        self.acts = 0
        self.cause = ""  # why the method is to act before the next step, "" if it is not

    def look(self, step: int, figures: Mapping[str, float]) -> None:
        """Pass the metrics recorded at a step to the trigger. If it fires, the next call of `due` says so."""
        if self.rule is not None and self.rule(step, figures):
            seen = f": {self.metric}={figures[self.metric]:.4g}" if self.metric else ""
            self.cause = f"{self.name}{seen} at step {step}"

    def due(self, boundary: int | None) -> tuple[int, str] | None:
        """Return (number of the act, its cause) if the method acts now, else None: once the trigger has fired or, without
        one, at each boundary. `boundary` is the index of the phase that begins, None if none does."""
        if self.rule is None:
            return None if boundary is None else (boundary, self.name)
        if not self.cause:
            return None
        cause, self.cause = self.cause, ""
        self.acts += 1
        return self.acts, cause

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trigger and its acts for a checkpoint; {} without a trigger."""
        if self.rule is None:
            return {}
        return {"acts": self.acts, "cause": self.cause, "trigger": self.rule.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if self.rule is not None:
            self.acts, self.cause = saved["acts"], saved["cause"]
            self.rule.load_state_dict(saved["trigger"])


def make(settings: Mapping[str, Any]) -> Trigger | None:
    """Return the trigger of these settings; None if the method acts at boundaries."""
    apart = {"name"} if settings["name"] == "boundary" else {"name", "cooldown"}
    given = {key: value for key, value in settings.items() if key not in apart}
    if trigger := KINDS[settings["name"]](**given):
        trigger.missed = -1  # the script records the metric, if rarely
    return Cooldown(trigger, settings["cooldown"]) if trigger and settings.get("cooldown") else trigger


def check_trigger(settings: dict[str, Any], method: Method, watched: Sequence[str]) -> dict[str, Any] | None:
    """Return the trigger's settings without nulls, None if there is none. `watched`: metrics that `plateau` can observe."""
    given = {key: value for key, value in settings.items() if value is not None}
    name = given["name"]
    if name not in KINDS:
        raise UserError(f"trigger.name={name!r}{did_you_mean(name, KINDS)}")
    try:
        trigger = make(given)
    except TypeError as error:  # a setting too many or too few
        raise UserError(f"trigger={name} {str(error).partition('() ')[2]}") from error
    if trigger is None:
        return None
    if name == "plateau" and (metric := given["metric"]) not in watched:
        raise UserError(f"trigger.metric={metric!r}: this script records {', '.join(watched)}")
    untreated = type(method).treat is Method.treat or getattr(method, "every_steps", 0)
    if method.name != "none" and (untreated or method.changes_optimizer or method.changes_structure):
        wrong = f"trigger={name} with method={method.name}: choose one that only treats weights at a boundary"
        raise UserError(f"{wrong}, such as fire, shrink_perturb or full_reset")
    return given
