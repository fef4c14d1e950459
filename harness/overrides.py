"""Checks of command lines against the schema and `conf/`; errors name the nearest key or file that exists."""

from __future__ import annotations

import argparse
import difflib
import itertools
from collections.abc import Callable, Sequence

from hydra.core.override_parser.types import Glob, Override
from omegaconf import DictConfig, OmegaConf

from fire_core.errors import UserError
from fire_core.methods import available
from harness.config import (
    compose,
    domain_of,
    file_of,
    is_group,
    is_hydra,
    options,
    parse,
    read_yaml,
    resolve,
    settings_of,
    values_of,
)
from harness.domains import find
from harness.settings import Domain, keys

CONFIG_DIR = "--config-dir"
RUN_FOLDER = (
    "a run's folder is run.root/<experiment>/<size>/<method>/seed_<n>, so that the same command resumes; choose its root "
    "with run.root=FOLDER"
)
OUR_FOLDERS = dict.fromkeys(
    ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.chdir", "hydra.output_subdir"),
    RUN_FOLDER,
) | {"hydra.searchpath": f"name a folder of more experiments with {CONFIG_DIR} FOLDER"}


def read_line(arguments: list[str]) -> argparse.Namespace:
    """Return `overrides`, `multirun`, `help`, `cfg` and `config_dir` of a command line, in which they may be mixed.

    Raises UserError for another option.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-h", "--help", nargs="?", const="")  # --help all
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument(CONFIG_DIR, action="append", default=[])
    try:
        line, unknown = parser.parse_known_intermixed_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error} (--help lists what there is)") from None
    if unknown:
        raise UserError(
            f"{unknown[0]} is not an option: settings are written as key=value, as in learning_rate=1e-3 (--help lists them)"
        )
    return line


def compose_config(name: str, overrides: list[str]) -> DictConfig:
    """Return the checked config of a command line of the script of a domain, for tests, notebooks and benchmarks."""
    domain = find(name)
    check_overrides(domain, overrides)
    return resolve(domain, compose(domain, overrides))


def check_overrides(domain: Domain, overrides: list[str], sweep: bool = True) -> None:
    """Raise UserError for keys and files that do not exist, and for several values of one key without `sweep`."""
    parsed, methods = parse(overrides), available()
    chosen = [name for o in parsed if o.key_or_group == "method" for name in values_of(o)] or ["fire"]
    own = {f"method.{key}" for name in chosen if name in methods for key in settings_of(methods[name])}
    known = [*(name for name in keys(domain) if name != "minutes"), *sorted(own), *choosable(domain)]
    for override in parsed:
        key, typed = override.key_or_group, override.input_line
        if key in OUR_FOLDERS:
            raise UserError(f"{typed}: {OUR_FOLDERS[key]}")
        if key.startswith("hydra.sweeper.params"):
            raise UserError(f"{typed}: what a sweep varies is written directly, as in -m seed=1,2")
        if is_hydra(override):
            if override.is_sweep_override():
                raise UserError(f"{typed}: settings of Hydra have one value; sweep over seed, method, ...")
        elif override.is_add() or override.is_force_add() or override.is_delete():
            near = "" if key in known else nearest(key, known)
            raise UserError(f"{typed}: keys can only be set, as in {key}=...{near}")
        elif override.is_sweep_override() and not sweep:
            raise UserError(f"{typed}: several values need a sweep; add -m")
        elif override.is_interval_sweep() or (isinstance(override.value(), Glob) and not is_group(override)):
            # Hydra's own sweeper cannot list the values of these
            raise UserError(f"{typed}: list the values, as in -m {key}=a,b or {key}=range(1,4)")
        elif is_group(override):
            _check_choice(domain, override, sweep)
        elif key not in known and key not in {name.rpartition(".")[0] for name in known}:
            raise UserError(f"key {key!r} does not exist{nearest(key, known)}")


def nearest(word: str, known: Sequence[str]) -> str:
    """Return the end of a message about `word`, which is not in `known`: the likely name, or the nearest four."""
    names = {name.rpartition(".")[2]: name for name in known} | {name: name for name in known}
    for part in (word.lower(), word.lower().rpartition(".")[2]):
        if close := difflib.get_close_matches(part, names, n=1):
            return f"; did you mean {names[close[0]]!r}?"
    return f"; the nearest are {', '.join(difflib.get_close_matches(word, known, n=4, cutoff=0))}"


def _check_choice(domain: Domain, override: Override, sweep: bool) -> None:
    """Raise UserError if the override names a file of a group that does not exist or does not fit, or a list of them."""
    group, typed, chosen = override.key_or_group, override.input_line, values_of(override)
    if isinstance(override.value(), list):
        several = ",".join(map(str, override.value()))
        raise UserError(f"{typed}: a run has one {group}; for several, start a sweep: -m {group}={several}")
    if group not in choosable(domain):
        [first, *_] = [*(name for name in keys(domain) if name.startswith(f"{group}.")), f"{group}.<name>"]
        raise UserError(f"{typed}: this script has no files of {group}; give its keys, as in {first}=")
    if not chosen:
        raise UserError(f"{typed}: no {group} has such a name")
    if group == "search" and not sweep:
        raise UserError(f"{typed}: a search is a sweep over the values of a method; add -m")
    for name in chosen:
        if name in ("null", "None") and group not in ("experiment", "method"):
            continue
        if name not in options(group):
            if group == "method" and name == "all":
                raise UserError(
                    "method=all does not exist: list the methods, as in -m method=none,fire, or run "
                    f"make {domain.name}-sweep METHODS=all"
                )
            raise UserError(f"{group}={name} does not exist{nearest(name, files(domain, group))}")
        if group == "experiment" and (owner := domain_of(name)) != domain.name:
            raise UserError(f"experiment={name} belongs to {owner}, this script trains {domain.name}")
        if name not in (known := files(domain, group)):
            raise UserError(f"{group}={name} is not for this script: choose one of {', '.join(known)}")


def check_sweep(
    domain: Domain, overrides: list[str], check_run: Callable[[DictConfig], object] = lambda cfg: None
) -> list[tuple[list[str], DictConfig]]:
    """Return the overrides and the config of each run of a sweep, [] if another sweeper than Hydra's own chooses them.

    Raises UserError if the config of a run is wrong, or `check_run` refuses it; every mistake is named once.
    """
    parsed = parse(overrides)
    sweeper = compose(domain, [o.input_line for o in parsed if not o.is_sweep_override()]).hydra.sweeper
    if not str(sweeper.get("_target_", "")).endswith("BasicSweeper"):
        return []
    typed = {o.key_or_group for o in parsed}
    own = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items() if key not in typed]
    axes = {o.key_or_group: typed_values(o) for o in parse([*own, *overrides]) if not is_hydra(o)}
    hydras = [o.input_line for o in parsed if is_hydra(o)]
    seeds = [[seed] for seed in axes.pop("seed", [])] or [[]]
    runs, mistakes = [], []
    for number, line in enumerate(itertools.product(*axes.values())):
        try:
            # whether a seed is valid does not depend on other values
            for seed in reversed(seeds if number == 0 else seeds[:1]):
                cfg = resolve(domain, compose(domain, [*line, *seed, *hydras]))
            check_run(cfg)
        except UserError as error:
            mistakes.append(str(error))
            continue
        for seed in seeds:
            value = int(seed[0].partition("=")[2]) if seed else cfg.seed
            runs.append(([*line, *seed], OmegaConf.merge(cfg, {"seed": value})))
    if mistakes:
        raise UserError("\nerror: ".join(dict.fromkeys(mistakes)))
    return runs


def typed_values(override: Override) -> list[str]:
    """Return `key=value` for each value of one override, written as Hydra passes it to a run."""
    if not override.is_sweep_override():
        return [f"{override.get_key_element()}={override.get_value_element_as_str()}"]
    return [f"{override.get_key_element()}={value}" for value in values_of(override)]


def files(domain: Domain, group: str) -> list[str]:
    """Return the names that a script can choose from a group: those whose keys it has."""
    if group == "experiment":
        return [name for name in options(group) if domain_of(name) == domain.name]
    if group in ("method", "search"):
        return options(group)
    known = {key.split(".")[1] for key in keys(domain) if key.startswith(f"{group}.")}
    return [name for name in options(group) if known >= set(read_yaml(file_of(group, name)))]


def choosable(domain: Domain) -> list[str]:
    """Return the groups of conf/ from which a command line of this script can choose."""
    defaults = read_yaml(domain.conf / f"{domain.name}.yaml")["defaults"]
    return [
        name for entry in defaults if isinstance(entry, dict) for name in entry if name not in ("at", "size")
    ]
