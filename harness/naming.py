"""What a run is and where it goes: its identity, the label of its folder, and the folder."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from fire_core.errors import UserError
from fire_core.methods import Method
from harness.config import compose, is_group, is_hydra, parse, resolve
from harness.runs.checkpoint import identity_of
from harness.runs.folders import fingerprint
from harness.runs.record import RunName
from harness.settings import Domain, keys, numbers_only

LABEL_LENGTH = 60


def identity(domain: Domain, cfg: DictConfig, method: Method) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return (settings that the numbers of a run depend on, those that the numbers of its phase 0 depend on).

    The second is None if phase 0 is not shared: with run.trunk=false, a trigger, or a method that acts in phase 0.
    """
    config = OmegaConf.to_container(cfg)
    assert isinstance(config, dict)
    numbers = numbers_only(domain, {k: v for k, v in config.items() if k != "domain"})
    shares = cfg.run.trunk and method.first_phase >= 1 and "trigger" not in cfg
    return numbers, phase_0(domain, numbers) if shares else None


def phase_0(domain: Domain, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that the numbers of phase 0 depend on; runs with the same settings share a trunk."""
    elsewhere = ("method", "optimizer_state", "experiment", "size", *domain.at_boundary)
    return {"domain": domain.name} | {key: value for key, value in numbers.items() if key not in elsewhere}


def name_run(
    domain: Domain, cfg: DictConfig, typed: list[Override], identity: str, *, sweep: bool
) -> tuple[RunName, list[str]]:
    """Return the name of a run, and the typed overrides that its label shows.

    A single run that sets a value to its default has the name of the run that does not set it. The runs of a sweep are
    named by its axes, whatever the defaults are.
    """
    changed = changes(domain, typed)
    name = RunName(cfg.run.root, cfg.experiment, cfg.size, label(cfg.method.name, changed), cfg.seed)
    defaults = [] if sweep else _defaults_among(domain, cfg, typed, changed)
    if defaults and identity_of(name.folder) != identity:  # no older run is named with them
        changed = [change for change in changed if change not in defaults]
        name = replace(name, label=label(cfg.method.name, changed))
    return name, changed


def changes(domain: Domain, typed: list[Override]) -> list[str]:
    """Return the typed overrides that are part of a run's label, sorted.

    The folder names experiment, size, method and seed already. A key that does not define every run, such as
    `run.root` or `data.folder`, is not part of a label.
    """
    entries = keys(domain)
    changed = []
    for override in typed:
        key = override.key_or_group
        named_elsewhere = key in ("experiment", "size", "method", "seed", "search") or is_hydra(override)
        if not named_elsewhere and (
            is_group(override) or key not in entries or entries[key][0].metadata["numbers"] is True
        ):
            changed.append(override.input_line or "")
    return sorted(changed)


def _defaults_among(domain: Domain, cfg: DictConfig, typed: list[Override], changed: list[str]) -> list[str]:
    """Return the changes that set what the config has without them."""
    keyed = {o.input_line or "": o.key_or_group for o in parse(changed) if not is_group(o)}
    if not keyed:
        return []
    try:
        default = resolve(
            domain, compose(domain, [o.input_line or "" for o in typed if o.input_line not in keyed])
        )
    except UserError:  # the config needs them
        return []
    return [
        line for line, key in keyed.items() if OmegaConf.select(default, key) == OmegaConf.select(cfg, key)
    ]


def is_sweep() -> bool:
    """Return whether this process trains a run of a sweep."""
    mode = HydraConfig.get().mode
    return mode is not None and mode.name == "MULTIRUN"


def label(method: str, changed: list[str]) -> str:
    """Return the name of a run's folder: the method and its changes, joined by "-".

    A name longer than LABEL_LENGTH is cut to the first changes and a hash of all.
    """
    parts = [method, *(change.removeprefix("method.") for change in changed)]
    parts = [re.sub(r"[^\w=.,+-]", "_", re.sub(r"[\[\] ]", "", part)) for part in parts]
    if len("-".join(parts)) <= LABEL_LENGTH:
        return "-".join(parts)
    short = [method]
    while len("-".join([*short, parts[len(short)]])) <= LABEL_LENGTH - 10:
        short.append(parts[len(short)])
    return "-".join([*short, fingerprint(changed, 8)])
