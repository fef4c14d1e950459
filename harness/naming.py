"""What a run is and where it goes: its identity, the label of its folder, and the folder."""

import re
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from fire_core.methods import Method
from harness.config import options, parse
from harness.runs.folders import fingerprint, free_folder
from harness.settings import Domain, keys

LABEL_LENGTH = 60
# keys that a folder's path names without its label
IN_THE_PATH = ("experiment", "size", "method", "seed", "search")


def identity(domain: Domain, cfg: DictConfig, method: Method) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return (settings that a run's numbers depend on, those that its phase 0 depends on, None if that is not shared)."""
    numbers = numbers_only(domain, cfg)
    if not cfg.run.trunk or method.first_phase < 1 or "trigger" in cfg:
        return numbers, None
    elsewhere = ("method", "optimizer_state", "experiment", "size", *domain.at_boundary)
    phase_0 = {key: value for key, value in numbers.items() if key not in elsewhere}
    return numbers, {"domain": domain.name} | phase_0


def numbers_only(domain: Domain, cfg: DictConfig) -> dict[str, Any]:
    """Return the part of a checked config that defines the numbers of a run; its hash is the run's identity."""
    kept = OmegaConf.create()
    for name, each in keys(domain).items():
        value = OmegaConf.select(cfg, name, default=MISSING)
        counts = each.numbers(cfg) if callable(each.numbers) else each.numbers
        if counts and value != MISSING and not (each.added and value is None):
            OmegaConf.update(kept, name, value)
    return OmegaConf.to_container(kept)  # type: ignore[return-value]


def named_folder(domain: Domain, cfg: DictConfig, typed: list[str]) -> Path:
    """Return the folder with the name of a run. `typed` are its overrides."""
    name = label(cfg.method.name, changes(domain, typed))
    return Path(cfg.run.root, cfg.experiment, cfg.size, name, f"seed_{cfg.seed}")


def own_folder(domain: Domain, cfg: DictConfig, typed: list[str]) -> Path:
    """Return the folder of a run, which no other config has."""
    return free_folder(named_folder(domain, cfg, typed), numbers_only(domain, cfg))


def changes(domain: Domain, typed: list[str]) -> list[str]:
    """Return the typed overrides that are part of a run's label, sorted: those of keys that define every run."""
    known, changed = keys(domain), []
    for text, override in zip(typed, parse(typed), strict=True):
        key = override.key_or_group
        defines = options(key) or key not in known or known[key].numbers is True
        if defines and key not in IN_THE_PATH and not override.is_hydra_override():
            changed.append(text)
    return sorted(changed)


def label(method: str, changed: list[str]) -> str:
    """Return the name of a run's folder: the method and its changes; a hash replaces what exceeds LABEL_LENGTH."""
    parts = [method, *(change.removeprefix("method.") for change in changed)]
    parts = [re.sub(r"[^\w=.,+-]", "_", re.sub(r"[\[\] ]", "", part)) for part in parts]
    if len("-".join(parts)) <= LABEL_LENGTH:
        return "-".join(parts)
    short = [method]
    while len("-".join([*short, parts[len(short)]])) <= LABEL_LENGTH - 10:
        short.append(parts[len(short)])
    return "-".join([*short, fingerprint(changed, 8)])
