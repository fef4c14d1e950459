"""Command lines against `conf/`: every key, group and option must exist, or one line names the nearest that does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from fire_core.errors import UserError, did_you_mean
from fire_core.methods import available

CONF = Path(__file__).resolve().parent
# options of Hydra whose next word is their value
TAKE_A_VALUE = (
    "-c", "--cfg", "-p", "--package", "-cn", "--config-name", "-cp", "--config-path", "-cd", "--config-dir",
)  # fmt: skip


def compose(domain: str, overrides: list[str]) -> DictConfig:
    """Hydra's composition, interpolations not filled in yet, keys not checked."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(domain, overrides)


def overrides_in(arguments: list[str]) -> list[str]:
    """The arguments that are neither options of Hydra nor their values."""
    values = {i + 1 for i, argument in enumerate(arguments) if argument in TAKE_A_VALUE}
    return [a for i, a in enumerate(arguments) if not a.startswith("-") and i not in values]


def check_overrides(domain: str, overrides: list[str], sweep: bool = True) -> None:
    """Refuse keys, groups and options that do not exist, `+key` and `~key` included; name the nearest that does.

    Also refused: a list of values without `sweep`, and keys that this command line would never read.
    """
    try:
        parsed = [o for o in OverridesParser.create().parse_overrides(overrides) if not _is_hydra(o)]
    except HydraException as error:
        raise UserError(f"cannot read the command line: {str(error).splitlines()[0]}") from error
    groups = _groups()
    sizes = [v for o in parsed if o.key_or_group == "size" for v in _values(o)] or ["small"]
    for override in parsed:
        if override.is_choice_sweep() and not sweep:
            raise UserError(f"{override.input_line}: several values need a sweep; add -m")
        _check_is_read(override.key_or_group, sizes)
        if override.key_or_group == "domain":
            raise UserError(
                f"{override.input_line}: this script trains {domain}; each domain has a script of its own"
            )
        if override.is_add() or override.is_delete() or override.is_force_add():
            key = override.input_line.lstrip("+~").split("=")[0]
            known = sorted(_keys(domain, parsed, groups) | set(groups))
            raise UserError(
                f"{override.input_line!r}: keys cannot be added or removed{did_you_mean(key, known)}"
            )
        if override.key_or_group in groups:
            for option in _values(override):
                if option not in groups[override.key_or_group]:
                    if override.key_or_group == "method" and option in available():
                        raise UserError(f"method={option} has no settings: write conf/method/{option}.yaml")
                    raise UserError(
                        f"{override.key_or_group}={option} does not exist"
                        f"{did_you_mean(option, groups[override.key_or_group])}"
                    )
    for experiment in [v for o in parsed if o.key_or_group == "experiment" for v in _values(o)]:
        owner = compose(domain, [f"experiment={experiment}"]).domain
        if owner != domain:
            raise UserError(f"experiment={experiment} belongs to {owner}, this script trains {domain}")
    known = _keys(domain, parsed, groups)
    read = sorted(
        k for k in known if k.split(".")[0] not in ("at", "tuned") or k.split(".")[1:2] == sizes[:1]
    )
    for override in parsed:
        key = override.key_or_group
        if key not in groups and key not in known:
            raise UserError(f"key {key!r} does not exist{did_you_mean(key, read)}")


def _check_is_read(key: str, sizes: list[str]) -> None:
    """`at` holds the settings of every size and `tuned` those of every method: most of them belong to other runs."""
    table, *rest = key.split(".")
    if table == "at" and rest and rest[0] not in sizes:
        raise UserError(
            f"{key}: this run has size={','.join(sizes)}; give at.{'.'.join([sizes[0], *rest[1:]])}"
        )
    if table == "tuned":
        raise UserError(
            f"{key}: tuned values are what a method starts from; give method.{rest[-1] if rest else '...'}"
        )


def _keys(domain: str, parsed: list[Override], groups: dict[str, list[str]]) -> set[str]:
    """Every dotted key that exists under any combination of the group options of this command line."""
    keys: set[str] = set()
    chosen = [(o.key_or_group, _values(o)) for o in parsed if o.key_or_group in groups and not o.is_add()]
    experiments = [f"experiment={v}" for key, values in chosen if key == "experiment" for v in values[:1]]
    base = _flatten(compose(domain, experiments))
    for key, values in chosen:
        for value in values:
            extra = [] if key == "experiment" else experiments
            keys |= _flatten(compose(domain, [*extra, f"{key}={value}"]))
    replaced = {key for key, _ in chosen if key != "experiment"}
    return keys | {k for k in base if k.split(".")[0] not in replaced}


def _flatten(node: Any, prefix: str = "") -> set[str]:
    keys = set()
    for key in node:
        name = f"{prefix}{key}"
        keys.add(name)
        value = node._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none() and not value._is_interpolation():
            keys |= _flatten(value, f"{name}.")
    return keys


def _groups() -> dict[str, list[str]]:
    """Config groups and their options: folders of conf/ and the YAML files in them."""
    return {
        folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


def _values(override: Override) -> list[str]:
    if override.is_choice_sweep():
        return [str(v) for v in override.sweep_iterator()]
    return [str(override.value())]


def _is_hydra(override: Override) -> bool:
    return override.key_or_group.split("/")[0].split(".")[0] == "hydra"
