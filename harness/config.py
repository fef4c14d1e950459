"""From a command line to the config of one run.

Hydra composes it, once. Its defaults list, in `conf/<script>.yaml`, names what it composes beside the files of `conf/`:
the keys of the script, from its dataclasses (`<script>_keys`); the section `at.<size>` of the experiment's file, as
`at/<experiment>/<size>`; and each method, as the settings of its class. `resolve` then checks every value.
"""

from __future__ import annotations

import functools
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fire_core.errors import UserError
from fire_core.methods import Method, available, create, without_added
from harness.settings import CONF, Domain, check, unset
from harness.trigger import check_trigger

FOLDERS = "FIRE_CONF"  # environment variable: folders that are searched like conf/, separated as in PATH
SIZES = ("smoke", "small", "medium", "paper")
# keys of the composed config that are not settings of a run
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


def compilable(method: str) -> bool:
    """Return whether nets are compiled under `compile: ${compilable:${method.name}}`: unless the method watches training
    passes with hooks, which compiled nets hide."""
    return method not in available() or "activations" not in available()[method]().needs


OmegaConf.register_new_resolver("compilable", compilable)


def compose(domain: Domain, overrides: list[str]) -> DictConfig:
    """Return what Hydra composes, with its node `hydra`; interpolations are not resolved and values not checked.

    Raises UserError if Hydra cannot compose it.
    """
    typed = [name for o in parse(overrides) if o.key_or_group == "experiment" for name in values_of(o)]
    defaults = read_yaml(domain.conf / f"{domain.name}.yaml")["defaults"]
    default = [entry["experiment"] for entry in defaults if isinstance(entry, dict) and "experiment" in entry]
    experiments = [name for name in typed if name in options("experiment")] or default
    store(domain, experiments)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(domain.conf), version_base="1.3"):
            return hydra.compose(domain.name, [*overrides, *more_folders(domain)], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, AssertionError) as error:
        group, _, name = str(getattr(error, "missing_cfg_file", None) or "").rpartition("/")
        if group == "size" or group.startswith("at/"):
            sizes = sorted(sections(experiments[0]), key=lambda size: (*SIZES, size).index(size))
            told = ", ".join(sizes) or "no sizes"
            raise UserError(f"size={name!r}: experiment {experiments[0]} has {told}") from error
        reason, _, _ = " ".join(str(error).split()).partition(" Config search path:")
        raise UserError(f"cannot compose the config: {reason}") from error


def store(domain: Domain, experiments: list[str]) -> None:
    """Tell Hydra what it composes beside the files of conf/. It copies all sections each time, so it gets few."""
    configs = ConfigStore.instance()
    configs.store(name=f"{domain.name}_keys", node=unset(domain.keys))
    for method in available().values():
        configs.store(group="method", name=method.name, node=settings_of(method))
    for experiment in experiments:
        for size, section in sections(experiment).items():
            configs.store(group="size", name=size, node={"size": size}, package="_global_")
            configs.store(group=f"at/{experiment}", name=size, node=section, package="_global_")


@functools.cache
def settings_of(cls: type[Method]) -> dict[str, Any]:
    """Return the settings of a method: what the experiment has tuned, else the defaults of its class.

    conf/tuned.yaml names the settings that are tuned under another name than `tuned.<method>.<setting>`.
    """
    elsewhere = read_yaml(CONF / "tuned.yaml").get(cls.name, {})
    method, node = cls(), {"name": cls.name}
    for name in (*(["variant"] if "variant" in elsewhere else []), *(each.name for each in fields(cls))):
        default = getattr(method, name)
        text = "null" if default is None else str(default).replace("True", "true").replace("False", "false")
        for tuned in (elsewhere.get(name), f"{cls.name}.{name}"):
            text = f"${{oc.select:tuned.{tuned},{text}}}" if tuned else text
        node[name] = text
    return node


def sections(experiment: str) -> dict[str, DictConfig]:
    """Return {size: what the experiment sets at this size}, with what it inherits."""
    content = read_yaml(file_of("experiment", experiment))
    found: dict[str, Any] = sections(base) if (base := base_of(content)) else {}
    own = {size: OmegaConf.merge(found.get(size, {}), at or {}) for size, at in content.get("at", {}).items()}
    return found | own


def parse(overrides: list[str]) -> list[Override]:
    """Return `key=value` arguments as Hydra reads them. Raises UserError for anything else."""
    return [_parse(text) for text in overrides]


@functools.cache
def _parse(text: str) -> Override:
    try:
        [override] = OverridesParser.create().parse_overrides([text])
        return override
    except HydraException as error:
        raise UserError(
            f"cannot read the command line ({str(error).splitlines()[0]}): settings are written as key=value, as in "
            "learning_rate=1e-3"
        ) from error


def values_of(override: Override) -> list[str]:
    """Return the values of an override, several if it is swept."""
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(options(override.key_or_group))
    if override.is_sweep_override():
        return [str(value) for value in override.sweep_string_iterator()]
    return [str(value)]


def typed_in(node: DictConfig) -> list[Override]:
    """Return the overrides as they were typed, from Hydra's own node. ${...} in them stays unresolved."""
    return parse(OmegaConf.to_container(node.overrides.task))


def resolve(domain: Domain, cfg: DictConfig, node: DictConfig | None = None) -> DictConfig:
    """Return the read-only config of one run, with every value checked.

    Args:
        cfg: what Hydra composed.
        node: Hydra's own settings, if they are not part of `cfg`.
    Raises: UserError for the first wrong value.
    """
    choices = (cfg.hydra if node is None else node).runtime.choices
    try:
        composed: Any = OmegaConf.masked_copy(cfg, [k for k in cfg if k != "hydra"])
        composed = OmegaConf.to_container(composed, resolve=True)
    except (OmegaConfBaseException, RecursionError, TypeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the config cannot be resolved: {reason}") from error
    settings = {key: value for key, value in composed.items() if key not in TABLES}
    minutes = (composed.get("minutes") or {}).get(composed["size"])
    checked = check(domain, settings | {"experiment": choices["experiment"], "minutes": minutes})
    method = create_method(domain, checked["method"])
    checked["method"] = without_added(method, checked["method"])
    own = set(read_yaml(file_of("trigger", choices["trigger"])))
    trigger = check_trigger(choices["trigger"], checked.pop("trigger"), own, method, domain.watched)
    parts = checked | {"domain": domain.name} | ({"trigger": trigger} if trigger else {})
    return OmegaConf.create(parts, flags={"readonly": True})


def create_method(domain: Domain, settings: dict[str, Any]) -> Method:
    """Return the method of these settings. Raises UserError if they are wrong or it does not run in this domain."""
    name = settings.get("name")
    if not isinstance(name, str):
        raise UserError(f"method.name={name!r}: choose a method as in method=fire")
    try:
        method = create(**settings)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"method={name}: {error}") from error
    if why := domain.why_not(method):
        raise UserError(f"method={name} does not run in {domain.name}: {why}")
    if method.variant not in domain.variants:
        has = ", ".join(domain.variants)
        raise UserError(f"method.variant={method.variant} does not run in {domain.name}, which has {has}")
    return method


def is_hydra(override: Override) -> bool:
    """Return whether the override is a setting of Hydra itself."""
    return override.key_or_group.split("/")[0].split(".")[0] == "hydra"


def is_group(override: Override) -> bool:
    """Return whether the override chooses a file of `conf/<group>/`, or a method."""
    group = override.key_or_group
    return group == "method" or any((folder / group).is_dir() for folder in folders())


def options(group: str) -> list[str]:
    """Return the names that can be chosen from a group: its files, without .yaml, and all methods."""
    names = {path.stem for folder in folders() for path in (folder / group).glob("*.yaml")}
    return sorted(names | set(available() if group == "method" else ()))


def file_of(group: str, option: str) -> Path:
    """Return the file of an option of a group, of which there must be one."""
    return next(path for folder in folders() if (path := folder / group / f"{option}.yaml").is_file())


def domain_of(experiment: str) -> str:
    """Return the name of the domain of an experiment."""
    return str(in_file(experiment, "domain") or "")


def in_file(experiment: str, key: str) -> Any:
    """Return a key of an experiment's file, or of the file of the experiment it builds on; None if neither has it."""
    content = read_yaml(file_of("experiment", experiment))
    base = base_of(content)
    return in_file(base, key) if base and key not in content else content.get(key)


def base_of(content: dict[str, Any]) -> str:
    """Return the name of the experiment that the file of an experiment builds on, "" if there is none."""
    bases = [base for base in content.get("defaults", []) if isinstance(base, str) and base != "_self_"]
    return bases[0] if bases else ""


def sweeps(experiment: str) -> bool:
    """Return whether an experiment, if it exists, says itself what `-m` sweeps."""
    return experiment in options("experiment") and "sweeper" in (in_file(experiment, "hydra") or {})


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file, {} if it is empty. Files that have not changed are not read again."""
    return _content(path, path.stat().st_mtime_ns)


@functools.cache
def _content(path: Path, changed: int) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))  # reads 1e-3 as a number, as Hydra does
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        reason = " ".join(str(error).replace('"<unicode string>", ', "").split())
        raise UserError(f"{path} is no YAML: {reason}") from error
    if not isinstance(content, dict) or not isinstance(content.get("at", {}), dict):
        raise UserError(f"{path} is no file of settings: it, and `at` in it, must hold `key: value` lines")
    return content
