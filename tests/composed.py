"""Configs of many methods, of which Hydra composes one: composing takes long."""

from omegaconf import DictConfig, OmegaConf

from fire_core.methods import available
from harness.config import settings_of


def with_method(composed: DictConfig, name: str) -> DictConfig:
    """What Hydra composes with method=NAME, from what it composed with another method."""
    return OmegaConf.create(
        dict(composed.items_ex(resolve=False)) | {"method": settings_of(available()[name])}
    )
