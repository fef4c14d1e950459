"""Settings of a SAC run that must fit together; checked before anything is written."""

from omegaconf import DictConfig, OmegaConf

from conf.values import check_numbers
from fire_core.errors import UserError

WHOLE = {  # the least that makes sense
    "env.action_repeat": 1, "updates_per_step": 1, "midpoint": 1, "learning_starts": 0, "actor.width": 1, "actor.blocks": 0,
    "critic.width": 1, "critic.blocks": 0, "critic.count": 1,
}  # fmt: skip
BETWEEN = {
    "discount": (0, 1), "tau": (0, 1), "weight_decay": (0, 1e6), "temperature": (1e-12, 1e6), "target_entropy": (0, 1e6),
}  # fmt: skip
CHOICES = {
    "compat": ("fair", "official"), "precision": ("fp32", "bf16"), "boundary.temperature": ("renew", "keep"),
    "boundary.normaliser": ("renew", "keep"),
}  # fmt: skip


def check(cfg: DictConfig) -> None:
    """Stop before any work where settings contradict one another."""
    check_numbers(cfg, WHOLE, BETWEEN)
    if not isinstance(cfg.env.name, str):
        raise UserError(f"env.name={cfg.env.name!r}: give the name of a task")
    if not cfg.learning_starts < cfg.midpoint < cfg.steps:
        raise UserError(
            f"midpoint={cfg.midpoint} must lie after learning_starts={cfg.learning_starts} and before steps={cfg.steps}"
        )
    for key, known in CHOICES.items():
        if (value := OmegaConf.select(cfg, key)) not in known:
            raise UserError(f"{key}={value!r}: choose one of {', '.join(known)}")
