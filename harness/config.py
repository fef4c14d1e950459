"""From a command line to the config of one run. Hydra composes the defaults list of `conf/<script>.yaml`: beside files, the
keys of the script from its dataclasses (`<script>_keys`), the section `at.<size>` of the experiment's file, as
`at/<experiment>/<size>`, and each method as the settings of its class. `resolve` then checks every value."""

import functools
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fire_core.errors import UserError, did_you_mean, first_line
from fire_core.methods import Method, available, create, without_added
from harness.settings import CONF, Domain, check, keys
from harness.trigger import check_trigger

FOLDERS = [CONF]  # of YAML files; `launch` adds that of a domain with a folder of its own
SIZES = ("smoke", "small", "medium", "paper")
TABLES = ("at", "tuned", "domain", "declared_in", "hydra")  # keys of the composed config, but not of a run

# for `compile: ${compilable:${method.name}}`: compiled nets hide training passes from the hooks that a method has
OmegaConf.register_new_resolver("compilable", lambda name: "activations" not in create(name).needs)


def compose(domain: Domain, overrides: list[str]) -> DictConfig:
    """Return what Hydra composes, with its node `hydra`, before `resolve`. Raises UserError if it cannot."""
    defaults = read_yaml(domain.conf / f"{domain.name}.yaml")["defaults"]
    chosen = [entry["experiment"] for entry in defaults if isinstance(entry, dict) and "experiment" in entry]
    chosen += [str(o.value()) for o in parse(overrides) if o.key_or_group == "experiment"]
    store(domain, chosen[-1])
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(domain.conf), version_base="1.3"):
            return hydra.compose(domain.name, [*overrides, *search_path(domain)], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, AssertionError) as error:
        if missing := getattr(error, "missing_cfg_file", None):
            group, _, name = missing.rpartition("/")
            group, near = group if group[:3] != "at/" else "size", did_you_mean(name, error.options or ())
            raise UserError(f"{group}={name} does not exist{near}") from error
        other = " The chosen method has no such setting." * ("override 'method." in str(error))
        raise UserError(f"cannot compose the config: {first_line(error)}{other}") from error


def search_path(domain: Domain) -> list[str]:
    """Return the override that makes Hydra search all folders beside the domain's own, [] if there are none."""
    others = ", ".join(f"'file://{folder}'" for folder in FOLDERS if folder != domain.conf)
    return [f"hydra.searchpath=[{others}]"] if others else []


def store(domain: Domain, experiment: str) -> None:
    """Tell Hydra what it composes beside the files of conf/. It copies all of it each time, so it gets one experiment."""
    configs = ConfigStore.instance()
    unset = OmegaConf.create()  # null where null is a value, else ??? (not set yet)
    for name, each in keys(domain).items():
        if name != "method":
            OmegaConf.update(unset, name, None if each.nullable else MISSING)
    configs.store(name=f"{domain.name}_keys", node=unset)
    for method in available().values():
        configs.store(group="method", name=method.name, node=settings_of(method))
    for size, section in content_of(experiment)["at"].items():
        configs.store(group="size", name=size, node={"size": size}, package="_global_")
        configs.store(group=f"at/{experiment}", name=size, node=section, package="_global_")


@functools.cache
def settings_of(cls: type[Method]) -> dict[str, Any]:
    """Return the settings of a method: as tuned (conf/tuned.yaml says under which name), else the defaults of its class."""
    at_boundaries = cls.treat is not Method.treat or cls.optimizer_state or cls.changes_structure
    elsewhere = {"first_phase": "first_phase"} if not at_boundaries and cls.name != "none" else {}
    elsewhere |= read_yaml(CONF / "tuned.yaml").get(cls.name, {})
    method, node = cls(), {"name": cls.name}
    for name in (*(["variant"] if "variant" in elsewhere else []), *(each.name for each in fields(cls))):
        text = json.dumps(getattr(method, name))
        for tuned in (elsewhere.get(name), f"{cls.name}.{name}"):
            text = f"${{oc.select:tuned.{tuned},{text}}}" if tuned else text
        node[name] = text
    return node


def parse(overrides: list[str]) -> list[Override]:
    """Return `key=value` arguments as Hydra reads them. Raises UserError for anything else."""
    return [_parse(text) for text in overrides]


@functools.cache
def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_overrides([text])[0]
    except HydraException as error:
        how = "settings are written as key=value, as in learning_rate=1e-3"
        raise UserError(f"cannot read the command line ({first_line(error)}): {how}") from error


def runs_of(overrides: list[str]) -> list[list[str]]:
    """Return the command lines of the runs that Hydra makes of a sweep, in its order."""
    [runs] = BasicSweeper.split_arguments(parse(overrides), None)
    return runs


def resolve(domain: Domain, cfg: DictConfig) -> DictConfig:
    """Return the read-only config of one run from what Hydra composed. Raises UserError for the first wrong value."""
    experiment = (cfg.hydra if "hydra" in cfg else HydraConfig.get()).runtime.choices["experiment"]
    try:
        plain = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
        composed: Any = OmegaConf.to_container(plain, resolve=True)
    except (OmegaConfBaseException, RecursionError, TypeError) as error:
        raise UserError(f"the config cannot be resolved: {first_line(error)}") from error
    if (owner := composed["domain"]) != domain.name:
        raise UserError(f"experiment={experiment} belongs to {owner}, this script trains {domain.name}")
    if isinstance(composed["experiment"], dict):
        raise UserError(f"{file_of('experiment', experiment)} needs the first line # @package _global_")
    shared = {path for names in read_yaml(CONF / "tuned.yaml").values() for path in names.values()}
    for name, values in (composed.get("tuned") or {}).items():
        if name not in {*shared, "trigger", "variants"}:
            try:
                create(name, **(values if isinstance(values, dict) else {name: values}))
            except (UserError, TypeError) as error:  # for a wrong name, whose value no method would read
                raise UserError(f"experiment={experiment}: tuned.{name}={values}: {error}") from error
    settings = {key: value for key, value in composed.items() if key not in TABLES}
    minutes = (composed.get("minutes") or {}).get(composed["size"])
    checked = check(domain, settings | {"experiment": experiment, "minutes": minutes})
    method = create(**checked["method"])
    if why := domain.why_not(method):
        raise UserError(f"method={method.name} does not run in {domain.name}: {why}")
    checked["method"] = without_added(method, checked["method"])
    if (trigger := check_trigger(checked.pop("trigger"), method, domain.watched)) is not None:
        checked["trigger"] = trigger
    return OmegaConf.create(checked | {"domain": domain.name}, flags={"readonly": True})


def options(group: str) -> list[str]:
    """Return the names that can be chosen from a group: its files, without .yaml, and all methods."""
    files = {path.stem for folder in FOLDERS for path in (folder / group).glob("*.yaml")}
    return sorted(available() if group == "method" else files)


def file_of(group: str, option: str) -> Path:
    """Return the file of an option of a group. Raises UserError if there is none."""
    for folder in FOLDERS:
        if (path := folder / group / f"{option}.yaml").is_file():
            return path
    raise UserError(f"{group}={option} does not exist{did_you_mean(option, options(group))}")


def domain_of(experiment: str) -> str:
    return content_of(experiment).get("domain", "")


@functools.cache
def content_of(experiment: str) -> dict[str, Any]:
    """Return the content of an experiment's file, with what it inherits from the one that it builds on."""
    content = read_yaml(path := file_of("experiment", experiment))
    if "at" not in content and not content.get("defaults"):
        raise UserError(f"{path} has no section `at` with the sizes (docs: CONTRIBUTING.md)")
    bases = [base for base in content.get("defaults", []) if isinstance(base, str) and base != "_self_"]
    return OmegaConf.to_container(OmegaConf.merge(*map(content_of, bases), content))  # type: ignore[return-value]


@functools.cache
def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file of settings. Raises UserError if it is none."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[return-value]  # reads 1e-3 as Hydra does
    except (yaml.YAMLError, OSError) as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
