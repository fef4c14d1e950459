"""Trials of experiments: runs that end after a share of the training that follows the shared first phase."""

from dataclasses import dataclass

from omegaconf import DictConfig

from fire_core.seeding import derive
from harness.settings import key


@dataclass
class TrialKeys:
    share: float | None = key("train this share of what follows phase 0", above=0, most=1, added=True)
    repeat: int | None = key("repeat whose order and draws count from phase 1 on", least=0, added=True)


def part_of(cfg: DictConfig, length: int) -> int:
    """Return how many of the `length` epochs or iterations after phase 0 are trained: all, or the share of a trial."""
    return length if cfg.trial.share is None else max(1, round(cfg.trial.share * length))


def seed_of(cfg: DictConfig, phase: int) -> int:
    """Return the seed of the order of the data in a phase, and of the method's draws (phase 1)."""
    return cfg.seed if phase == 0 or cfg.trial.repeat is None else derive(cfg.seed, "trial", cfg.trial.repeat)
