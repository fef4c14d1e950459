"""From a command line to the config of one run.

Hydra composes `conf/<script>.yaml`, the experiment and the typed overrides. The file of an experiment has a section for
each size under `at`. The chosen section replaces values of the script, and typed overrides replace both.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fire_core.errors import UserError
from fire_core.methods import Method, create, without_added
from harness.settings import CONF, Domain, check, groups
from harness.trigger import check_trigger

FOLDERS = "FIRE_CONF"  # environment variable: folders that are searched like conf/, separated as in PATH
SIZES = ("smoke", "small", "medium", "paper")
# keys of an experiment's file that are not part of the config
TABLES = ("at", "tuned", "domain", "declared_in", "hydra")


def folders() -> tuple[Path, ...]:
    """Return the folders of YAML files: conf/ of this repository, then those that were added."""
    return (CONF, *(Path(name) for name in os.environ.get(FOLDERS, "").split(os.pathsep) if name))


def add_folder(folder: Path) -> None:
    """Search a folder like conf/, in this process and in those that it starts."""
    if folder.resolve() not in folders():
        os.environ[FOLDERS] = os.pathsep.join(map(str, [*folders()[1:], folder.resolve()]))


def more_folders(domain: Domain) -> list[str]:
    """Return the override that makes Hydra search all folders beside the domain's own, [] if there are none."""
    others = ", ".join(f"'file://{folder}'" for folder in folders() if folder != domain.conf)
    return [f"hydra.searchpath=[{others}]"] if others else []


def compose(domain: Domain, overrides: list[str]) -> DictConfig:
    """Return what Hydra composes, with its node `hydra`; the size is not merged in and interpolations are not resolved.

    Raises UserError if Hydra cannot compose it.
    """
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(domain.conf), version_base="1.3"):
            return hydra.compose(domain.name, [*overrides, *more_folders(domain)], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, AssertionError) as error:
        reason, _, _ = " ".join(str(error).split()).partition(" Config search path:")
        raise UserError(f"cannot compose the config: {reason}") from error


def parse(overrides: list[str]) -> list[Override]:
    """Return `key=value` arguments as Hydra reads them. Raises UserError for anything else."""
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise UserError(
            f"cannot read the command line ({str(error).splitlines()[0]}): settings are written as key=value, as in "
            "learning_rate=1e-3"
        ) from error


def typed_in(node: DictConfig) -> list[Override]:
    """Return the overrides as they were typed, from Hydra's own node. ${...} in them stays unresolved."""
    return parse(OmegaConf.to_container(node.overrides.task))


def resolve(
    domain: Domain, cfg: DictConfig, node: DictConfig | None = None, typed: list[Override] | None = None
) -> DictConfig:
    """Return the read-only config of one run, with every value checked.

    Args:
        cfg: what `compose` returned.
        node: Hydra's own settings, if they are not part of `cfg`.
        typed: the typed overrides, if `cfg` was composed without them.
    Raises: UserError for a size that the experiment does not have, and for the first wrong value.
    """
    node = cfg.hydra if node is None else node
    choices, typed = node.runtime.choices, typed_in(node) if typed is None else typed
    experiment, sizes = choices["experiment"], cfg.get("at")
    size = "???" if OmegaConf.is_missing(cfg, "size") else cfg.size
    if not isinstance(sizes, DictConfig) or size not in sizes:
        known = [name for name in SIZES if name in (sizes or ())]
        raise UserError(f"size={size!r}: experiment {experiment} has {', '.join(known) or 'no sizes'}")
    base = OmegaConf.masked_copy(cfg, [key for key in cfg if key not in ("at", "hydra")])
    OmegaConf.set_struct(base, False)
    files = {name: choices.get(name) for name in groups(domain) if name != "trigger"}
    chosen = [{name: OmegaConf.load(file_of(name, option))} for name, option in files.items() if option]
    try:
        merged = OmegaConf.merge(base, sizes[cfg.size], *chosen)
        for override in typed:
            if not is_group(override) and not is_hydra(override):
                OmegaConf.update(merged, override.key_or_group, override.value(), merge=True)
        plain = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, RecursionError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the config cannot be resolved: {reason}") from error
    assert isinstance(plain, dict)
    minutes = plain.get("minutes") or {}
    if not isinstance(minutes, dict):
        raise UserError(f"minutes={minutes!r}: minutes is a group of settings; an experiment's file has them")
    plain = {key: value for key, value in plain.items() if key not in TABLES}
    checked = check(domain, plain | {"experiment": experiment, "minutes": minutes.get(cfg.size)})
    method = create_method(domain, checked["method"])
    checked["method"] = without_added(method, checked["method"])
    known = OmegaConf.load(file_of("trigger", choices["trigger"])).keys()
    trigger = check_trigger(choices["trigger"], checked.pop("trigger"), set(known), method, domain.watched)
    parts = checked | {"domain": domain.name} | ({"trigger": trigger} if trigger else {})
    return OmegaConf.create(parts, flags={"readonly": True})


def create_method(domain: Domain, settings: dict[str, Any]) -> Method:
    """Return the method of these settings. Raises UserError if they are wrong or it does not run in this domain."""
    if not isinstance(settings.get("name"), str):
        raise UserError(f"method.name={settings.get('name')!r}: choose a method as in method=fire")
    try:
        method = create(**settings)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"method={settings.get('name')}: {error}") from error
    if why := domain.why_not(method):
        raise UserError(f"method={method.name} does not run in {domain.name}: {why}")
    if method.variant not in domain.variants:
        raise UserError(
            f"method.variant={method.variant} does not run in {domain.name}, which has {', '.join(domain.variants)}"
        )
    return method


def is_hydra(override: Override) -> bool:
    """Return whether the override is a setting of Hydra itself."""
    return override.key_or_group.split("/")[0].split(".")[0] == "hydra"


def is_group(override: Override) -> bool:
    """Return whether the override chooses a file of `conf/<group>/`."""
    return override.key_or_group in config_groups()


def config_groups() -> tuple[str, ...]:
    """Return the names of the groups: the folders of conf/ that contain YAML files."""
    return _groups_in(folders())


@functools.cache
def _groups_in(searched: tuple[Path, ...]) -> tuple[str, ...]:
    return tuple(sorted({path.parent.name for folder in searched for path in folder.glob("*/*.yaml")}))


def options(group: str) -> list[str]:
    """Return the names of the files of a group, without .yaml."""
    return sorted({path.stem for folder in folders() for path in (folder / group).glob("*.yaml")})


def file_of(group: str, option: str) -> Path:
    """Return the file of an option of a group, of which there must be one."""
    return next(path for folder in folders() if (path := folder / group / f"{option}.yaml").is_file())


def domain_of(experiment: str) -> str:
    """Return the name of the domain of an experiment."""
    return str(said_by(experiment, "domain") or "")


def said_by(experiment: str, key: str) -> Any:
    """Return a key of an experiment's file, or of the file of the experiment it builds on; None if neither has it."""
    content = read_yaml(file_of("experiment", experiment))
    bases = [base for base in content.get("defaults", []) if isinstance(base, str) and base != "_self_"]
    return said_by(bases[0], key) if bases and key not in content else content.get(key)


def sweeps(experiment: str) -> bool:
    """Return whether an experiment, if it exists, says itself what `-m` sweeps."""
    return experiment in options("experiment") and "sweeper" in (said_by(experiment, "hydra") or {})


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file, {} if it is empty. Files that have not changed are not read again."""
    return _content(path, path.stat().st_mtime_ns)


@functools.cache
def _content(path: Path, changed: int) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        reason = " ".join(str(error).replace('"<unicode string>", ', "").split())
        raise UserError(f"{path} is no YAML: {reason}") from error
    if not isinstance(content, dict) or not isinstance(content.get("at", {}), dict):
        raise UserError(f"{path} is no file of settings: it, and `at` in it, must hold `key: value` lines")
    return content
