"""Settings of a SAC run that must fit together, beyond their types and ranges; checked before anything is written."""

from omegaconf import DictConfig

from fire_core.errors import UserError


def check(cfg: DictConfig) -> None:
    """Stop before any work where settings contradict one another."""
    if not cfg.learning_starts < cfg.midpoint < cfg.steps:
        raise UserError(
            f"midpoint={cfg.midpoint} must lie after learning_starts={cfg.learning_starts} and before steps={cfg.steps}"
        )
