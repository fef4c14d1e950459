"""What a setting is, and what a training script declares about itself.

A script's keys are dataclasses: one for each group, with the type, range and meaning of each key. Their values are in
`conf/`. `check` compares a composed config with them, and `--help` prints them. Keys marked `numbers=False` do not
define a run: a run is the same one whatever their values. Among them are paths, and device and threads, which change
numbers by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fire_core.errors import UserError
from fire_core.methods import NEEDS, PUBLISHED, Method
from fire_core.optim_state import POLICIES

CONF = Path(__file__).resolve().parents[1] / "conf"


@dataclass(frozen=True)
class Domain:
    """What a training script declares about itself in the `settings.py` beside it, and hands to `launch`.

    name: its config is `conf/<name>.yaml`, and its experiments say `domain: <name>`.
    script: its path in the repository.
    keys: the dataclass of all its settings, a subclass of Keys.
    shown: the keys that name the data and the network of a run, the data first.
    at_boundary: groups and keys, beside `method` and `optimizer_state`, that take effect at a boundary and never before.
        Runs that differ only in them share phase 0.
    gives: what its loop gives to methods, of `fire_core.methods.NEEDS`.
    refuses: {name of a method that cannot run here for another reason: why}.
    variants: the variants of methods that can run here.
    phases: returns the number of phases of a run.
    check: raises UserError for settings that contradict one another.
    needs: modules without which the script does not start.
    watched: metrics recorded again and again that `trigger=plateau` can observe.
    extras: extras of pyproject.toml; the first one installs `needs`, the others serve some features.
    results: keys of summary.json that a sweep shows when a run ends.
    conf: the folder of its YAML files.
    """

    name: str
    script: str
    keys: type
    shown: tuple[str, ...]
    at_boundary: tuple[str, ...] = ()
    gives: frozenset[str] = frozenset(NEEDS)
    refuses: Mapping[str, str] = field(default_factory=dict)
    variants: tuple[str, ...] = (PUBLISHED,)
    phases: Callable[[DictConfig], int] = lambda cfg: 2
    check: Callable[[DictConfig], object] = lambda cfg: None
    needs: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    conf: Path = CONF

    def why_not(self, method: Method) -> str:
        """Return why a method cannot run here, "" if it can."""
        needs = [f"it needs {NEEDS[need].partition(':')[0]}" for need in sorted(method.needs - self.gives)]
        return self.refuses.get(method.name) or "; ".join(needs)


def key(
    meaning: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    choices: tuple[Any, ...] = (),
    each: type | None = None,
    form: str = "",
    numbers: bool | Callable[[dict[str, Any]], bool] = True,
    added: bool = False,
) -> Any:
    """Return the dataclass field of one key.

    Args:
        meaning: the phrase that `--help` prints.
        least, most: smallest and largest value allowed. above: values must be larger than this. choices: all values.
        each: for keys of type Any, which hold one value of this type or a list of them.
        form: what a value must be, if type and range do not say it.
        numbers: whether the key is part of a run's identity, or a function of the config that says so.
        added: whether runs exist that are older than the key. The value null is then not part of a run's identity, so
            that these runs keep their folders.
    """
    metadata = {"meaning": meaning, "least": least, "above": above, "most": most, "choices": choices}
    metadata |= {"each": each, "form": form, "numbers": numbers, "added": added}
    return field(default=MISSING, metadata=metadata)


def group(cls: type, *, without_nulls: bool = False) -> Any:
    """Return the dataclass field of a group of keys. `without_nulls` leaves keys that are null out of the config."""
    return field(default_factory=cls, metadata={"without_nulls": without_nulls})


@dataclass
class RunKeys:
    root: str = key("folder of all runs", form="give the folder that all runs go to", numbers=False)
    trunk: bool = key("share phase 0 between methods that do nothing in it", numbers=False)
    checkpoint_seconds: float = key("seconds between checkpoints", least=0, numbers=False)
    checkpoint_steps: int = key("steps between checkpoints; 0: by time only", least=0, numbers=False)
    checkpoint_share: float = key(
        "largest share of the time spent on saving; if saving takes longer, checkpoints become rarer",
        above=0,
        most=1,
        numbers=False,
    )
    jobs: int = key("runs of a sweep that this machine trains at a time", least=1, numbers=False)
    keep: int = key("number of checkpoints that are kept", least=1, numbers=False)
    progress: bool = key("show a progress bar in a terminal", numbers=False)
    tracker: str = key(
        "tracker that gets a copy of metrics.jsonl",
        choices=("none", "trackio", "wandb"),
        numbers=False,
    )
    data_root: str = key("folder of downloaded and prepared data", numbers=False)


@dataclass
class TriggerKeys:
    """Settings of the trigger. Those that the chosen trigger does not have stay null."""

    name: str = key("when the method acts: one of conf/trigger; boundary: at boundaries")
    metric: str | None = key("plateau: the logged metric")
    mode: str | None = key(
        "plateau: min if smaller values are better, max if larger ones are", choices=(None, "min", "max")
    )
    patience: int | None = key("plateau: records to wait for an improvement", least=1)
    min_change: float | None = key("plateau: smallest change that counts as an improvement", least=0)
    level: float | None = key("dormancy, dfi: the method acts above this value", least=0)
    share: float | None = key(
        "rank, gradient: the method acts below this share of the highest value", above=0, most=1
    )
    steps: int | None = key("every, shifted: steps between two interventions", least=1)
    first: int | None = key("shifted: step of the first intervention", least=1)
    cooldown: int | None = key("smallest number of steps between two interventions", least=0)


@dataclass
class Keys:
    """The keys that all scripts share."""

    experiment: str = key("file of conf/experiment")
    size: str = key("a size that the experiment has")
    seed: int = key(
        "seed of all random numbers",
        least=0,
        most=2**63 - 1,
        form="give a whole number, 0 or more and below 2**63",
    )
    method: dict[str, Any] = key("what happens between phases; settings as in conf/method")
    trigger: TriggerKeys = group(TriggerKeys)
    optimizer_state: str = key("what happens to the optimizer state at a boundary", choices=POLICIES)
    batch_size: int = key("samples per step", least=1)
    learning_rate: float = key("peak learning rate", above=0)
    device: str = key("device to train on: auto, cpu, cuda, cuda:<n> or mps", numbers=False)
    compile: bool = key("train through torch.compile")
    threads: int = key("CPU threads", least=1, numbers=False)
    minutes: float | None = key("expected duration of a run on a CPU", numbers=False)
    run: RunKeys = group(RunKeys)


def unset(cls: type) -> dict[str, Any]:
    """Return the keys of a dataclass as Hydra composes them: null where null is a value, else ??? (not set yet)."""
    return {
        name: unset(kind) if is_dataclass(kind) else None if type(None) in get_args(kind) else MISSING
        for name, (_, kind) in _entries(cls).items()
        if get_origin(kind) is not dict
    }


def keys(domain: Domain) -> dict[str, tuple[Field, Any]]:
    """Return {dotted key: (its field, its type)} of a script."""
    return dict(_walk(domain.keys, ""))


def _walk(cls: type, prefix: str) -> Iterator[tuple[str, tuple[Field, Any]]]:
    for name, (entry, kind) in _entries(cls).items():
        if is_dataclass(kind):
            yield from _walk(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", (entry, kind)


def _entries(cls: type) -> dict[str, tuple[Field, Any]]:
    """Return {name: (field, its type)} of a dataclass."""
    hints = get_type_hints(cls)
    return {entry.name: (entry, hints[entry.name]) for entry in fields(cls)}


def numbers_only(domain: Domain, config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a checked config that defines the numbers of a run; its hash is the run's identity."""

    def part(cls: type, node: dict[str, Any]) -> dict[str, Any]:
        kept, entries = {}, _entries(cls)
        for name, value in node.items():
            entry, kind = entries[name]
            if is_dataclass(kind):
                kept |= {name: inner} if (inner := part(kind, value)) else {}
                continue
            numbers = entry.metadata["numbers"]
            counts = numbers(config) if callable(numbers) else numbers
            if counts and not (entry.metadata["added"] and value is None):
                kept[name] = value
        return kept

    return part(domain.keys, config)


def check(domain: Domain, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with each value in its type (1 becomes 1.0 where a float is wanted).

    Raises UserError for the first value that has another type, is out of range or not set, and for an unknown key.
    """
    return _checked(domain.keys, config, "")


def _checked(cls: type, config: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(config, dict):
        name = prefix.rstrip(".")
        raise UserError(f"{name}={config!r}: {name} is a group of settings; give one, as in {name}.<name>=")
    entries, typed, result = _entries(cls), OmegaConf.structured(cls), {}
    if unknown := [name for name in config if name not in entries]:
        raise UserError(
            f"{prefix}{unknown[0]} is not a key of this script; check that env, data and method belong to this script"
        )
    for name, (entry, kind) in entries.items():
        if not is_dataclass(kind):
            result[name] = _value(typed, entry, kind, config.get(name, MISSING), f"{prefix}{name}")
            continue
        values = _checked(kind, config.get(name, {}), f"{prefix}{name}.")
        sparse = entry.metadata["without_nulls"]
        result[name] = {k: v for k, v in values.items() if v is not None} if sparse else values
    return result


def _value(typed: Any, entry: Field, kind: Any, value: Any, path: str) -> Any:
    """Return a value in the type of its key; `typed` is a node that converts what is assigned to it."""
    if isinstance(value, str) and value == MISSING:
        raise UserError(f"{path} is not set by the experiment: {wanted(entry, kind)}")
    refused = UserError(f"{path}={value!r}: {wanted(entry, kind)}")
    if bool in (kind, *get_args(kind)) and not (value is None or isinstance(value, bool)):
        raise refused  # a number would be taken for true
    try:
        typed[entry.name] = value
    except OmegaConfBaseException:
        raise refused from None
    value = typed[entry.name]
    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    parts = value if isinstance(value, list) else [value]
    if not all(_allowed(part, entry.metadata) for part in parts) or (entry.metadata["each"] and not parts):
        raise refused
    return value


def _allowed(value: Any, rules: Mapping[str, Any]) -> bool:
    """Return whether a value, or a part of a list, is one of the choices, of the type `each` and in range; NaN is not."""
    if isinstance(value, list):
        return rules["each"] is None and all(_allowed(part, rules) for part in value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if rules["each"] is not None and not (number and isinstance(value, (rules["each"], int))):
        return False
    if value == "" or (rules["choices"] and value not in rules["choices"]):
        return False
    return not number or (value > rules["above"] and rules["least"] <= value <= rules["most"])


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


def _range(rules: Mapping[str, Any]) -> str:
    least, above, most = (rules[name] for name in ("least", "above", "most"))
    if above > -math.inf:
        return f" above {above:g}" + (f" and at most {most:g}" if most < math.inf else "")
    if least == -math.inf:
        return ""
    return f" from {least:g} to {most:g}" if most < math.inf else f", {least:g} or more"
