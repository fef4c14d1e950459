"""Settings of a SAC run that depend on one another; types and ranges are checked by the schema."""

from omegaconf import DictConfig

from fire_core.errors import UserError


def check(cfg: DictConfig) -> None:
    """Raise UserError unless the midpoint lies between the start of learning and the end of the run."""
    if not cfg.learning_starts < cfg.midpoint < cfg.steps:
        raise UserError(
            f"midpoint={cfg.midpoint} must lie after learning_starts={cfg.learning_starts} and before steps={cfg.steps}"
        )
