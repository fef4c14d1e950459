"""What a setting is, and what a training script declares about itself: its keys, a dataclass for each group, with the type,
range and meaning of each. `check` compares a composed config with them, and `--help` prints them."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fire_core.errors import UserError, first_line
from fire_core.methods import NEEDS, Method
from fire_core.optim_state import POLICIES

CONF = Path(__file__).resolve().parents[1] / "conf"
KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Domain:
    """What a training script declares about itself in the `settings.py` beside it, and hands to `launch`."""

    name: str  # its config is conf/<name>.yaml, and its experiments say `domain: <name>`
    script: str  # its path in the repository
    keys: type  # the dataclass of all its settings, a subclass of Keys
    shown: tuple[str, ...]  # the keys that name the data and the network of a run, the data first
    # beside `method` and `optimizer_state`, what takes effect at boundaries only: runs that differ in it share phase 0
    at_boundary: tuple[str, ...] = ()
    gives: frozenset[str] = frozenset(NEEDS)  # what its loop gives to methods
    refuses: Mapping[str, str] = field(default_factory=dict)  # {method that cannot run otherwise: why}
    check: Callable[[DictConfig], object] = lambda cfg: None  # raises UserError for contradictory settings
    needs: tuple[str, ...] = ()  # modules without which the script does not start
    watched: tuple[str, ...] = ()  # metrics recorded again and again that `trigger=plateau` can observe
    extras: tuple[str, ...] = ()  # of pyproject.toml; the first one installs `needs`
    results: tuple[str, ...] = ()  # keys of summary.json that a sweep shows when a run ends
    conf: Path = CONF  # the folder of its YAML files

    def why_not(self, method: Method) -> str:
        """Return why a method cannot run here, "" if it can."""
        needs = [f"it needs {NEEDS[need].partition(':')[0]}" for need in sorted(method.needs - self.gives)]
        return self.refuses.get(method.name) or "; ".join(needs)


@dataclass(frozen=True)
class Key:
    """One setting: what it means, and which values it may have."""

    meaning: str  # the phrase that `--help` prints
    least: float = -math.inf
    above: float = -math.inf  # values must be larger than this
    most: float = math.inf
    choices: tuple[Any, ...] = ()
    # for keys of type Any: one value of this type, or a list of them, one for each phase
    each: type | None = None
    # Whether it is part of a run's identity, or a function of the config that says so. Paths are not, nor device and
    # threads, which change numbers by rounding.
    numbers: bool | Callable[[dict[str, Any]], bool] = True
    added: bool = False  # later than some runs, which keep their identity: null is not part of it
    kind: Any = Any  # the type that its field is annotated with

    def allows(self, value: Any) -> bool:
        """Return whether a value of the right type, or each part of a list, is in range; NaN is not."""
        parts = value if isinstance(value, list) else [value]
        if self.each and not (parts and all(type(part) in (int, self.each) for part in parts)):
            return False
        if parts is value:
            return all(map(self.allows, parts))
        if value == "" or (self.choices and value not in self.choices):
            return False
        return not isinstance(value, int | float) or (value > self.above and self.least <= value <= self.most)

    @property
    def nullable(self) -> bool:
        return type(None) in get_args(self.kind)

    def wanted(self) -> str:
        """Return what a value must be, in words, as error messages and `--help` print it."""
        if self.choices:
            return "choose one of " + ", ".join("null" if c is None else str(c) for c in self.choices)
        kinds = {self.each or self.kind, *get_args(self.kind)}
        what = next((text for kind, text in KINDS.items() if kind in kinds), "a name")
        if get_origin(self.kind) is list:
            what = "a list of numbers"
        limits = {"above": self.above, "at least": self.least, "at most": self.most}
        told = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if abs(limit) < math.inf)
        phases = ", or one for each phase as in [2,1]" if self.each else ""
        return f"give {what} {told}".rstrip() + (" or null" if self.nullable else "") + phases


def key(meaning: str, **rules: Any) -> Any:
    """Return the dataclass field of one key; `rules` are the other attributes of `Key`."""
    return field(default=MISSING, metadata={"key": Key(meaning, **rules)})


def group(cls: type, *, without_nulls: bool = False) -> Any:
    """Return the dataclass field of a group of keys. `without_nulls` leaves keys that are null out of the config."""
    return field(default_factory=cls, metadata={"without_nulls": without_nulls})


@dataclass
class RunKeys:
    root: str = key("folder of all runs", numbers=False)
    trunk: bool = key("share phase 0 between methods that do nothing in it", numbers=False)
    checkpoint_seconds: float = key("seconds between checkpoints", least=0, numbers=False)
    checkpoint_steps: int = key("steps between checkpoints; 0: by time only", least=0, numbers=False)
    jobs: int = key("runs of a sweep that this machine trains at a time", least=1, numbers=False)
    keep: int = key("number of checkpoints that are kept", least=1, numbers=False)
    progress: bool = key("show a progress bar in a terminal", numbers=False)
    data_root: str = key("folder of downloaded and prepared data", numbers=False)


@dataclass
class TriggerKeys:
    """Settings of the trigger. Those that the chosen trigger does not have stay null."""

    name: str = key("when the method acts: one of conf/trigger; boundary: at boundaries")
    metric: str | None = key("plateau: the logged metric")
    mode: str | None = key("plateau: min if smaller is better, max if larger", choices=(None, "min", "max"))
    patience: int | None = key("plateau: records to wait for an improvement", least=1)
    min_change: float | None = key("plateau: smallest change that counts as an improvement", least=0)
    level: float | None = key("dormancy, dfi: the method acts above this value", least=0)
    share: float | None = key("rank, gradient: it acts below this share of the highest", above=0, most=1)
    steps: int | None = key("every, shifted: steps between two interventions", least=1)
    first: int | None = key("shifted: step of the first intervention", least=1)
    cooldown: int | None = key("smallest number of steps between two interventions", least=0)


@dataclass
class Keys:
    """The keys that all scripts share."""

    experiment: str = key("file of conf/experiment")
    size: str = key("a size that the experiment has")
    seed: int = key("seed of all random numbers", least=0, most=2**63 - 1)
    method: dict[str, Any] = key("what happens between phases; its settings are the fields of its class")
    trigger: TriggerKeys = group(TriggerKeys)
    optimizer_state: str = key("what happens to the optimizer state at a boundary", choices=POLICIES)
    batch_size: int = key("samples per step", least=1)
    learning_rate: float = key("peak learning rate", above=0)
    device: str = key("device to train on: auto, cpu, cuda or cuda:<n>", numbers=False)
    compile: bool = key("train through torch.compile")
    threads: int = key("CPU threads", least=1, numbers=False)
    minutes: float | None = key("expected duration of a run on a CPU", numbers=False)
    run: RunKeys = group(RunKeys)


def keys(domain: Domain) -> dict[str, Key]:
    """Return {dotted name: key} of a script."""
    return _keys(domain.keys)


@functools.cache
def _keys(cls: type, prefix: str = "") -> dict[str, Key]:
    found, hints = {}, get_type_hints(cls)
    for entry in fields(cls):
        name, kind = prefix + entry.name, hints[entry.name]
        if is_dataclass(kind):
            found |= _keys(kind, f"{name}.")
        else:
            found[name] = replace(entry.metadata["key"], kind=kind)
    return found


def check(domain: Domain, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with each value in its type (1 becomes 1.0). Raises UserError for the first wrong one."""
    known = keys(domain)
    try:
        checked = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(domain.keys), config))
    except OmegaConfBaseException as error:
        name = str(error.full_key) or "the config"
        if name not in known:
            raise UserError(f"{name} does not fit the keys of this script: {first_line(error)}") from None
        value = OmegaConf.select(OmegaConf.create(config), name)
        raise UserError(f"{name}={value!r}: {known[name].wanted()}") from None
    for name, each in known.items():
        value = functools.reduce(dict.__getitem__, name.split("."), checked)
        if value == MISSING:
            raise UserError(f"{name} is not set by the experiment: {each.wanted()}")
        if not each.allows(value):
            raise UserError(f"{name}={value!r}: {each.wanted()}")
    for entry in fields(domain.keys):
        if entry.metadata.get("without_nulls"):
            checked[entry.name] = {k: v for k, v in checked[entry.name].items() if v is not None}
    return checked
