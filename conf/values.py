"""What settings must look like before a script reads them; one line for each mistake."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from fire_core.errors import UserError

# keys of any script that must be at least 1
WHOLE_NUMBERS = (
    "accumulation", "batch_size", "epsilon_steps", "eval_batch_size", "eval_episodes", "eval_every", "eval_limit",
    "log_every", "metrics_samples", "random_episodes", "replay", "replay_capacity", "steps", "target_every",
    "threads", "total_steps",
)  # fmt: skip
GROUPS = (
    "run", "minutes", "actor", "boundary", "corpus", "critic", "data", "env", "method", "model", "network", "protocol",
)  # fmt: skip
# keys of any script that are true or false
YES_NO = (
    "channels_last", "compile", "tf32", "run.trunk", "run.progress", "run.video", "run.curvature", "model.bias",
    "model.tied",
)  # fmt: skip


def check_values(plain: dict[str, Any]) -> None:
    """One line for a number that no script can work with, and for a word where a group of settings belongs."""
    sizes = plain.get("at", {}).get(plain.get("size"), {})
    for key in GROUPS:
        if not isinstance(plain.get(key, {}), dict):
            path = f"at.{plain['size']}.{key}" if key in sizes else key
            raise UserError(
                f"{key}={plain[key]!r}: {key} is a group of settings; give one, as in {path}.<name>="
            )
    for key in WHOLE_NUMBERS:
        value = plain.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{key}={value!r}: give a whole number, 1 or more")
    rate = plain.get("learning_rate", 1.0)
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < float("inf"):
        raise UserError(f"learning_rate={rate!r}: give a number above 0")
    nested = OmegaConf.create(plain)
    root = plain["run"]["root"]
    if not isinstance(root, str) or not root:
        raise UserError(f"run.root={root!r}: give the folder that all runs go to")
    for key in ("run.checkpoint_seconds", "run.checkpoint_steps"):
        value = OmegaConf.select(nested, key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise UserError(f"{key}={value!r}: give a number, 0 or more")
    for key in YES_NO:
        value = OmegaConf.select(nested, key)
        if value not in (None, True, False):
            raise UserError(f"{key}={value!r}: give true or false")


def check_numbers(cfg: DictConfig, whole: dict[str, int], between: dict[str, tuple[float, float]]) -> None:
    """One line for the first setting that is not a whole number of at least so much, or not a number in its range.

    Also for an `env` of another domain, which lacks some of the keys.
    """
    for key in (*whole, *between):
        value = OmegaConf.select(cfg, key)
        if value is None and key.startswith("env."):
            raise UserError(
                f"env={cfg.env.get('name')!r} has no {key}: that env belongs to another script than {cfg.domain}'s"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in whole and not (number and isinstance(value, int) and value >= whole[key]):
            raise UserError(f"{key}={value!r}: give a whole number, {whole[key]} or more")
        if key in between and not (number and between[key][0] <= value <= between[key][1]):
            raise UserError("{}={!r}: give a number from {:g} to {:g}".format(key, value, *between[key]))
