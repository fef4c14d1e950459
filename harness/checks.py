"""Checks of a config against the schema, and the part of a config that can change the numbers of a run."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fire_core.errors import UserError
from harness.schema import SCHEMAS


def keys(domain: str) -> dict[str, Field]:
    """Return {dotted key: its field} of a script."""
    return {name: entry for name, entry, _ in _walk(SCHEMAS[domain], "")}


def wanted_values(domain: str) -> dict[str, str]:
    """Return {dotted key: what its value must be, in words} of a script."""
    return {name: wanted(entry, kind) for name, entry, kind in _walk(SCHEMAS[domain], "")}


def _walk(cls: type, prefix: str) -> Iterator[tuple[str, Field, Any]]:
    for name, (entry, kind) in _entries(cls).items():
        if is_dataclass(kind):
            yield from _walk(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", entry, kind


def _entries(cls: type) -> dict[str, tuple[Field, Any]]:
    """Return {name: (field, its type)} of a dataclass."""
    hints = get_type_hints(cls)
    return {entry.name: (entry, hints[entry.name]) for entry in fields(cls)}


def numbers_only(domain: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a checked config that can change the numbers of a run; its hash is the run's identity.

    `data.folder` differs between machines and is left out, except for data=image_folder, whose only name it is.
    """
    own_images = config.get("data", {}).get("name") == "image_folder"
    hidden = {
        name
        for name, entry in keys(domain).items()
        if not entry.metadata["numbers"] or (entry.metadata["added"] and _at(config, name) is None)
    }
    return _without(config, hidden - {"data.folder"} if own_images else hidden, "")


def _at(config: dict[str, Any], name: str) -> Any:
    """Return the value of a dotted key, None if any part of it is missing."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _without(node: dict[str, Any], hidden: set[str], prefix: str) -> dict[str, Any]:
    kept = {}
    for name, value in node.items():
        if isinstance(value, dict) and (inner := _without(value, hidden, f"{prefix}{name}.")):
            kept[name] = inner
        elif not isinstance(value, dict) and f"{prefix}{name}" not in hidden:
            kept[name] = value
    return kept


def check(domain: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with each value in its type (1 becomes 1.0 where a float is wanted).

    Raises UserError for the first value that has another type, is out of range or not set, and for an unknown key.
    """
    return _checked(SCHEMAS[domain], config, "")


def _checked(cls: type, config: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(config, dict):
        name = prefix.rstrip(".")
        raise UserError(f"{name}={config!r}: {name} is a group of settings; give one, as in {name}.<name>=")
    entries = _entries(cls)
    for name in config:
        if name not in entries:
            raise UserError(
                f"{prefix}{name} is not a key of this script; check that env, data and method belong to this script"
            )
    typed = _typed(cls)
    result = {}
    for name, (entry, kind) in entries.items():
        value = config.get(name, {} if is_dataclass(kind) else MISSING)
        if is_dataclass(kind):
            result[name] = _checked(kind, value, f"{prefix}{name}.")
        else:
            result[name] = _value(typed, entry, kind, value, f"{prefix}{name}")
    return result


@functools.cache
def _typed(cls: type) -> DictConfig:
    """Return a node that converts values to the types of `cls`: set a value, then read it."""
    return OmegaConf.structured(cls)


def _value(typed: Any, entry: Field, kind: Any, value: Any, path: str) -> Any:
    if isinstance(value, str) and value == MISSING:
        raise UserError(f"{path} is not set by the experiment: {wanted(entry, kind)}")
    refused = UserError(f"{path}={value!r}: {wanted(entry, kind)}")
    try:
        typed[entry.name] = value
    except OmegaConfBaseException:
        raise refused from None
    value = typed[entry.name]
    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    rules = entry.metadata
    parts = list(_flat(value))
    if rules["each"] is not None:
        nested = isinstance(value, list) and any(isinstance(part, list) for part in value)
        kinds = (int, float) if rules["each"] is float else (int,)
        if nested or not parts or any(isinstance(p, bool) or not isinstance(p, kinds) for p in parts):
            raise refused
    if value == "" or (rules["choices"] and value not in rules["choices"]):
        raise refused
    for part in parts:
        if isinstance(part, int | float) and not isinstance(part, bool) and not _in_range(part, rules):
            raise refused
    return value


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def _in_range(value: float, rules: Any) -> bool:
    """Return whether a value is in range; NaN is not."""
    above = rules["above"] is None or value > rules["above"]
    return above and (rules["least"] is None or value >= rules["least"]) and value <= rules["most"]


def wanted(entry: Field, kind: Any) -> str:
    """Return what a value must be, in words, as error messages and `--help` print it."""
    rules = entry.metadata
    kinds = {list} if get_origin(kind) is list else set(get_args(kind) or (kind,))
    null = " or null" if type(None) in kinds else ""
    if rules["form"]:
        return rules["form"]
    if rules["choices"]:
        return "choose one of " + ", ".join("null" if c is None else str(c) for c in rules["choices"])
    if bool in kinds:
        return "give true or false" + null
    if list in kinds:
        return "give a list of whole numbers" + _range(rules)
    if int in kinds or float in kinds:
        return f"give a {'whole number' if int in kinds else 'number'}{_range(rules)}{null}"
    return "give a name" + null


def _range(rules: Any) -> str:
    most = "" if rules["most"] == math.inf else f"{rules['most']:g}"
    if rules["above"] is not None:
        return f" above {rules['above']:g}" + (f" and at most {most}" if most else "")
    if rules["least"] is None:
        return ""
    return f" from {rules['least']:g} to {most}" if most else f", {rules['least']:g} or more"
