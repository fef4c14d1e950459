"""Checks of a language run's settings that go beyond the type and range of each, made before anything is written."""

from __future__ import annotations

from omegaconf import DictConfig

from fire_core.errors import UserError
from language.model import Shape

SHORTEST_OF_QUESTIONS = 32  # tokens in the shortest window


def check_settings(cfg: DictConfig) -> Shape:
    """Return the shape of the model. Raises UserError for settings that do not fit together."""
    if len(cfg.betas) != 2 or not all(beta < 1 for beta in cfg.betas):
        raise UserError(f"betas={cfg.betas}: give two numbers from 0 to below 1, as in betas=[0.9,0.95]")
    for key in ("phase_1", "phase_2"):
        if cfg[key].passes is None and cfg[key].iterations is None:
            raise UserError(
                f"{key}.passes=null and {key}.iterations=null: give one of them, the phase has no length"
            )
        if (cfg[key].block or 0) > cfg.model.block:
            raise UserError(
                f"{key}.block={cfg[key].block}: the model has {cfg.model.block} positions; set model.block to the longest "
                "window of both phases"
            )
    shortest = min(cfg[key].block or cfg.model.block for key in ("phase_1", "phase_2"))
    if "questions" in (cfg.corpus.a.name, cfg.corpus.b.name) and shortest < SHORTEST_OF_QUESTIONS:
        raise UserError(
            f"windows of {shortest} tokens with the corpus questions: its loss counts only answers, and a window this short "
            f"may contain none; use a block of {SHORTEST_OF_QUESTIONS} or more"
        )
    return Shape(**{k: v for k, v in cfg.model.items() if k != "name" and v is not None})
