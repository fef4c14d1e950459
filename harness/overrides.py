"""Checks of command lines against the schema and `conf/`; errors name the nearest key or file that exists."""

from __future__ import annotations

import argparse
import difflib
import functools
import itertools
import math
from collections.abc import Callable, Sequence

from hydra.core.override_parser.types import Glob, Override
from omegaconf import DictConfig

from fire_core.errors import UserError
from fire_core.methods import available
from harness.config import (
    compose,
    config_groups,
    domain_of,
    file_of,
    is_group,
    is_hydra,
    options,
    parse,
    read_yaml,
    resolve,
)
from harness.domains import find
from harness.settings import Domain, keys

CONFIG_DIR = "--config-dir"
# common names of keys that have another name here
ALIASES = {
    "lr": "learning_rate", "wd": "weight_decay", "bs": "batch_size", "bsz": "batch_size", "gamma": "discount",
    "dataset": "data", "arch": "model", "net": "model", "exp": "experiment", "algo": "method", "optim": "optimizer_state",
    "dtype": "precision", "amp": "precision", "output_dir": "run.root", "out_dir": "run.root", "workers": "threads",
    "logger": "run.tracker", "tracker": "run.tracker",
}  # fmt: skip
OUR_FOLDERS = [
    f"hydra.{key}" for key in ("run.dir", "sweep.dir", "sweep.subdir", "job.chdir", "output_subdir")
]
MOST_COMBINATIONS = 300


def read_line(arguments: list[str]) -> argparse.Namespace:
    """Return `overrides`, `multirun`, `help`, `cfg` and `config_dir` of a command line, in which they may be mixed.

    Raises UserError for another option.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
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


def nearest(word: str, known: Sequence[str]) -> str:
    """Return the end of a message about `word`, which is not in `known`: the likely name, or the nearest four."""
    names = {name.rpartition(".")[2]: name for name in known} | {name: name for name in known}
    word = ALIASES.get(word.lower(), word.lower())
    for part in (word, word.rpartition(".")[2]):
        if close := difflib.get_close_matches(part, names, n=1):
            return f"; did you mean {names[close[0]]!r}?"
    near = difflib.get_close_matches(word, known, n=4, cutoff=0)
    return f"; the nearest are {', '.join(near)}" if near else ""


def compose_config(name: str, overrides: list[str]) -> DictConfig:
    """Return the checked config of a command line of the script of a domain, for tests, notebooks and benchmarks."""
    domain = find(name)
    check_overrides(domain, overrides)
    return resolve(domain, compose(domain, overrides))


def check_overrides(domain: Domain, overrides: list[str], sweep: bool = True) -> None:
    """Raise UserError for keys and files that do not exist, and for several values of one key without `sweep`."""
    parsed = parse(overrides)
    for override in parsed:
        typed, key, glob = override.input_line, override.key_or_group, isinstance(override.value(), Glob)
        # Hydra's own sweeper cannot list the values of these
        if override.is_interval_sweep() or (glob and not is_group(override)):
            raise UserError(f"{typed}: list the values, as in -m {key}=a,b or {key}=range(1,4)")
        if glob and not _values(override):
            raise UserError(f"{typed}: no file of conf/{key} has such a name")
    methods = [v for o in parsed if o.key_or_group == "method" for v in _values(o)] or ["fire"]
    of_methods = [
        name for method in methods if method in options("method") for name in keys_in("method", method)
    ]
    known = [*keys(domain), *(f"method.{name}" for name in of_methods), *choosable(domain)]
    for override in parsed:
        key, typed = override.key_or_group, override.input_line
        if reason := _reserved(domain, key):
            raise UserError(f"{typed}: {reason}")
        if is_hydra(override):
            if override.is_sweep_override():
                raise UserError(f"{typed}: settings of Hydra have one value; sweep over seed, method, ...")
        elif override.is_sweep_override() and not sweep:
            raise UserError(f"{typed}: several values need a sweep; add -m")
        elif override.is_delete():
            raise UserError(f"{typed}: keys cannot be removed, only set, as in {key}=...")
        elif override.is_add() or override.is_force_add():
            hint = f"; write {typed.lstrip('+')}" if key in known else nearest(key, known)
            raise UserError(f"{typed}: keys cannot be added{hint}")
        elif key in config_groups():
            _check_choice(domain, override, sweep)
        elif key not in known and key not in {name.rpartition(".")[0] for name in known}:
            raise UserError(f"key {key!r} does not exist{nearest(key, known)}")


def _reserved(domain: Domain, key: str) -> str:
    """Return why a key cannot be set although it exists, and what to write instead; "" if it can be."""
    first, *rest = key.split(".")
    if key in OUR_FOLDERS:
        return (
            "a run's folder is run.root/<experiment>/<size>/<method>/seed_<n>, so that the same command resumes; choose "
            "its root with run.root=FOLDER"
        )
    if key == "hydra.searchpath":
        return f"name a folder of more experiments with {CONFIG_DIR} FOLDER"
    if key == "domain":
        return f"this script trains {domain.name}; each domain has a script of its own"
    if first == "at":
        return f"at is where experiments keep their sizes; write {'.'.join(rest[1:]) or '<name>'}="
    return "tuned values are what a method starts from; write method.<name>=" if first == "tuned" else ""


def _check_choice(domain: Domain, override: Override, sweep: bool) -> None:
    """Raise UserError for a file of a group that does not exist, and for several of them without `sweep`."""
    group, typed = override.key_or_group, override.input_line
    if isinstance(override.value(), list):
        several = ",".join(map(str, override.value()))
        raise UserError(f"{typed}: a run has one {group}; for several, start a sweep: -m {group}={several}")
    for value in _values(override):
        _check_option(domain, group, value)
    if group == "search" and not sweep:
        raise UserError(f"{typed}: a search is a sweep over the values of a method; add -m")


def check_sweep(
    domain: Domain, overrides: list[str], check_run: Callable[[DictConfig], object] = lambda cfg: None
) -> int:
    """Return the number of runs of a sweep, 0 if a sweeper other than Hydra's own chooses them.

    Raises:
        UserError: the config of a run is wrong, or `check_run` refuses it; every mistake is named once. Checked are the
            first MOST_COMBINATIONS combinations of values, and every seed with the first of them.
    """
    parsed = parse(overrides)
    sweeper = compose(domain, [o.input_line for o in parsed if not o.is_sweep_override()]).hydra.sweeper
    if not str(sweeper.get("_target_", "")).endswith("BasicSweeper"):
        return 0
    typed = {o.key_or_group for o in parsed}
    own = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items() if key not in typed]
    axes = {o.key_or_group: typed_values(o) for o in parse([*own, *overrides])}
    runs = math.prod(len(values) for values in axes.values())
    # whether a seed is valid does not depend on other values, so each is checked once
    seeds, first = axes.pop("seed", []), [values[0] for values in axes.values()]
    lines = [*itertools.islice(itertools.product(*axes.values()), MOST_COMBINATIONS)]
    lines += [(*first, seed) for seed in seeds]
    composed = functools.cache(lambda *chosen: compose(domain, list(chosen)))
    mistakes = []
    for line in lines:
        values = parse(list(line))
        try:  # only chosen files and the size need Hydra; `resolve` sets the values
            needed = (o for o in values if is_group(o) or is_hydra(o) or o.key_or_group == "size")
            cfg = composed(*(o.input_line for o in needed))
            check_run(resolve(domain, cfg, typed=values))
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UserError("\nerror: ".join(dict.fromkeys(mistakes)))
    return runs


def typed_values(override: Override) -> list[str]:
    """Return `key=value` for each value of one override."""
    if not override.is_sweep_override():
        return [override.input_line or ""]
    return [f"{override.get_key_element()}={value}" for value in _values(override)]


def _check_option(domain: Domain, group: str, option: str) -> None:
    if group not in choosable(domain):
        [first, *_] = [*(name for name in keys(domain) if name.startswith(f"{group}.")), f"{group}.<name>"]
        raise UserError(
            f"{group}={option}: this script has no files of {group}; give its keys, as in {first}="
        )
    if option in ("null", "None") and group not in ("experiment", "method"):
        return
    if option not in options(group):
        if group == "method" and option == "all":
            raise UserError(
                "method=all does not exist: list the methods, as in -m method=none,fire, or run "
                f"make {domain.name}-sweep METHODS=all"
            )
        if group == "method" and option in available():
            raise UserError(f"method={option} has no settings: write conf/method/{option}.yaml")
        raise UserError(f"{group}={option} does not exist{nearest(option, files(domain, group))}")
    if group == "experiment" and (owner := domain_of(option)) != domain.name:
        raise UserError(f"experiment={option} belongs to {owner}, this script trains {domain.name}")
    if option not in (known := files(domain, group)):
        raise UserError(f"{group}={option} is not for this script: choose one of {', '.join(known)}")


def files(domain: Domain, group: str) -> list[str]:
    """Return the files of a group that a script can use: those whose keys it has."""
    if group == "experiment":
        return [name for name in options(group) if domain_of(name) == domain.name]
    if group not in choosable(domain):
        return []
    if group in ("method", "search"):
        return options(group)
    known = {key.split(".")[1] for key in keys(domain) if key.startswith(f"{group}.")}
    return [name for name in options(group) if known >= keys_in(group, name)]


def keys_in(group: str, option: str) -> set[str]:
    """Return the keys of the file of an option of a group."""
    return set(read_yaml(file_of(group, option)))


def choosable(domain: Domain) -> list[str]:
    """Return the groups of conf/ from which a command line of this script can choose files."""
    defaults = read_yaml(domain.conf / f"{domain.name}.yaml")["defaults"]
    return [name for entry in defaults if isinstance(entry, dict) for name in entry]


def _values(override: Override) -> list[str]:
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(options(override.key_or_group))
    if override.is_sweep_override():
        return [str(value) for value in override.sweep_string_iterator()]
    return [str(value)]
