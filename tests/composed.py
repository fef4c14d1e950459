"""Configs of command lines, and of many methods, of which Hydra composes one: composing takes long."""

from omegaconf import DictConfig, OmegaConf

from fire_core.methods import available
from harness.config import compose, resolve, settings_of
from harness.domains import find
from harness.overrides import check_overrides


def compose_config(name: str, overrides: list[str]) -> DictConfig:
    """The checked config of a command line of the script of a domain."""
    domain = find(name)
    check_overrides(domain, overrides)
    return resolve(domain, compose(domain, overrides))


def with_method(composed: DictConfig, name: str) -> DictConfig:
    """What Hydra composes with method=NAME, from what it composed with another method."""
    return OmegaConf.create(
        dict(composed.items_ex(resolve=False)) | {"method": settings_of(available()[name])}
    )
