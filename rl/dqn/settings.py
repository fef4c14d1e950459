"""Settings of a DQN run that depend on one another; types and ranges are checked by the schema."""

import importlib.util

from omegaconf import DictConfig

from fire_core.errors import UserError


def check(cfg: DictConfig) -> None:
    """Raise UserError for the first setting that does not fit the others, with its value and what would fit."""
    layers = cfg.network.convolutions
    if not layers or any(len(layer) != 3 for layer in layers):
        raise UserError(
            f"network.convolutions={layers}: give [channels, kernel, stride] for each, whole numbers above 0"
        )
    if cfg.run.video and importlib.util.find_spec("imageio") is None:
        raise UserError("run.video=true needs imageio: make install-dqn")
    n = cfg.env.environments
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
