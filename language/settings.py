"""The settings of a run that no later step would refuse in one line, checked before anything is written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from omegaconf import DictConfig

from fire_core.errors import UserError
from language.model import Shape

COUNTS = ("batch_size", "accumulation", "eval_batch_size", "eval_windows")
LENGTHS = ("iterations", "stop_at", "eval_every")


def check_settings(cfg: DictConfig) -> Shape:
    """The model's shape, once every number of the config can be used; else UserError."""
    for name in COUNTS:
        check_count(name, cfg[name])
    for name in ("learning_rate", "final_learning_rate", "weight_decay", "warmup_limit"):
        check_number(name, cfg[name], 0 <= _number(cfg[name]) < math.inf, "0 or more")
    check_number("clip_norm", cfg.clip_norm, _number(cfg.clip_norm) > 0, "above 0; inf does not clip")
    check_number("warmup_share", cfg.warmup_share, 0 <= _number(cfg.warmup_share) <= 1, "between 0 and 1")
    check_betas(cfg.betas)
    for key in ("phase_1", "phase_2"):
        check_phase(key, cfg[key])
    return Shape(**{k: v for k, v in cfg.model.items() if k != "name" and v is not None})


def check_phase(key: str, entry: Any) -> None:
    """A phase has a length, in passes or iterations; null alone means "not set", zero is refused."""
    for name in LENGTHS:
        if entry[name] is not None:
            check_count(f"{key}.{name}", entry[name], " or null")
    for iteration in entry.save_at or ():
        check_count(f"{key}.save_at: iteration", iteration)
    if entry.passes is not None:
        check_number(f"{key}.passes", entry.passes, 0 < _number(entry.passes) < math.inf, "above 0, or null")
    if entry.passes is None and entry.iterations is None:
        raise UserError(
            f"{key}.passes=null and {key}.iterations=null: give one of them, the phase has no length"
        )


def check_count(name: str, value: Any, also: str = "") -> None:
    """Refuse anything but a whole number from 1."""
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{name}={value!r}: give a whole number, 1 or more{also}")


def check_number(name: str, value: Any, good: bool, wanted: str) -> None:
    """Refuse a value that is not `good`."""
    if not good:
        raise UserError(f"{name}={value!r}: give a number {wanted}")


def check_betas(betas: Any) -> None:
    """Adam's two averages."""
    values = list(betas) if isinstance(betas, Iterable) else [betas]
    if len(values) != 2 or not all(0 <= _number(beta) < 1 for beta in values):
        raise UserError(f"betas={values}: give two numbers from 0 to below 1, as in betas=[0.9,0.95]")


def _number(value: Any) -> float:
    """The value, or NaN, which no comparison accepts."""
    return float(value) if isinstance(value, int | float) else math.nan
