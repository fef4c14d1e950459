"""Settings of a DQN run that must fit together; checked before anything is written."""

from omegaconf import DictConfig

from fire_core.errors import UserError

COMPAT = ("official", "corrected")


def check(cfg: DictConfig) -> None:
    """Raise a one-line error for the first setting that does not fit, with its value and what would."""
    n = cfg.env.environments
    if not isinstance(n, int) or n < 1:
        raise UserError(f"env.environments={n!r}: give a whole number, 1 or more")
    if cfg.compat not in COMPAT:
        raise UserError(f"compat={cfg.compat!r}: choose one of {', '.join(COMPAT)}")
    if not 0 < cfg.midpoint < cfg.total_steps:
        raise UserError(f"midpoint={cfg.midpoint} must lie between 0 and total_steps={cfg.total_steps}")
    for key in ("total_steps", "midpoint", "target_every", "log_every", "eval_every", "learning_starts"):
        if cfg[key] % n:
            raise UserError(f"{key}={cfg[key]} must be a multiple of env.environments={n}: all step together")
    counted = ("random_episodes",) if cfg.compat == "official" else ("random_episodes", "eval_episodes")
    for key in counted:
        if cfg[key] % n:
            raise UserError(
                f"{key}={cfg[key]} must be a multiple of env.environments={n}: each plays as many"
            )
    updates = cfg.updates_per_transition * n
    if updates < 1 or abs(updates - round(updates)) > 1e-9:
        raise UserError(
            f"updates_per_transition={cfg.updates_per_transition} with env.environments={n} gives {updates:g} updates "
            "a step: it must be a whole number, at least 1"
        )
    if cfg.midpoint <= cfg.learning_starts:
        raise UserError(f"midpoint={cfg.midpoint} must be after learning_starts={cfg.learning_starts}")
    if cfg.midpoint % cfg.target_every:
        raise UserError(
            f"midpoint={cfg.midpoint} must be a multiple of target_every={cfg.target_every}: "
            "the target network is copied right before the boundary, so that every method starts from the same one"
        )
