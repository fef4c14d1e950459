"""The way into every training script: strict keys, resolved config, run folder, one line per mistake.

    @launch("vision")
    def train(cfg): ...

    if __name__ == "__main__":
        train()

`conf/<domain>.yaml` is composed with Hydra; every key given on the command line must exist.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fire_core.errors import UserError, did_you_mean
from fire_core.methods import Method
from fire_core.runs import Run

CONF = Path(__file__).resolve().parent
SIZES = ("smoke", "small", "paper")
BAD_INPUT = 2
FAILURES = (
    "FIRE_SWEEP_FAILURES"  # names the file in which the jobs of a sweep, in whatever process, note failures
)
# keys of any script that must be at least 1
WHOLE_NUMBERS = (
    "accumulation", "batch_size", "epsilon_steps", "eval_batch_size", "eval_episodes", "eval_every", "eval_limit",
    "log_every", "metrics_samples", "random_episodes", "replay", "replay_capacity", "steps", "target_every",
    "threads", "total_steps",
)  # fmt: skip
GROUPS = ("actor", "boundary", "corpus", "critic", "data", "env", "method", "model", "network", "protocol")
# keys of any script that are true or false
YES_NO = (
    "channels_last", "compile", "tf32", "run.trunk", "run.progress", "run.video", "run.curvature", "model.bias",
    "model.tied",
)  # fmt: skip
# options of Hydra whose next word is their value
TAKE_A_VALUE = (
    "-c", "--cfg", "-p", "--package", "-cn", "--config-name", "-cp", "--config-path", "-cd", "--config-dir",
)  # fmt: skip
# Not part of a run's identity. Device and threads change rounding only; meta.json says where a run was made.
NOT_NUMBERS = ("run", "at", "tuned", "minutes", "hydra", "domain", "experiment", "size", "device", "threads")


# What acts at a boundary and never before one: runs that differ there share phase 0.
AT_BOUNDARY = ("method", "optimizer_state", "boundary")


def launch(domain: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Turn `train(cfg)` into a command: Hydra overrides in, exit code out.

    0: done; 1: failed (a traceback is in the run's FAILED file); 2: bad input; 75: stopped by a signal after saving.
    """

    def decorate(task: Callable[[DictConfig], None]) -> Callable[[], None]:
        script = Path(task.__code__.co_filename).resolve()

        @functools.wraps(task)
        def command() -> None:
            arguments = sys.argv[1:]
            sys.argv[1:] = sorted(
                arguments, key=lambda a: a not in ("-m", "--multirun")
            )  # wherever it was typed
            try:
                check_overrides(
                    domain, overrides_in(arguments), sweep=sys.argv[1:2] in (["-m"], ["--multirun"])
                )
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                sys.exit(BAD_INPUT)
            # processes that a launcher starts find our packages wherever they begin
            paths = [str(CONF.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            with tempfile.TemporaryDirectory() as folder:
                failures = Path(folder) / "failures.txt"
                os.environ[FAILURES] = str(failures)
                job = Job(script, task.__name__)
                hydra.main(version_base="1.3", config_path=str(CONF), config_name=domain)(job)()
                if failures.exists():
                    print(f"\nfailed:\n{failures.read_text()}", file=sys.stderr)
                    sys.exit(1)

        return command

    return decorate


@dataclass(frozen=True)
class Job:
    """One run of a script's function; travels to worker processes as two names, not as code."""

    script: Path
    function: str

    def __call__(self, cfg: DictConfig) -> None:
        spec = importlib.util.spec_from_file_location(
            f"{self.script.parent.name}_{self.script.stem}", self.script
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _run(getattr(module, self.function).__wrapped__, cfg)


def needs(extra: str, *packages: str) -> None:
    """End with one line where packages of an extra are missing; scripts call it before what imports them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        print(
            f"error: {Path(sys.argv[0]).name} needs {', '.join(missing)}: pip install -e '.[{extra}]'",
            file=sys.stderr,
        )
        sys.exit(BAD_INPUT)


def compose_config(domain: str, overrides: list[str]) -> DictConfig:
    """The resolved config of a command line, for tests, notebooks and analysis."""
    check_overrides(domain, overrides)
    return resolve(compose(domain, overrides))


def resolve(cfg: DictConfig) -> DictConfig:
    """All interpolations filled in, the tables they came from dropped; read-only from here on."""
    if cfg.size not in SIZES:
        raise UserError(f"size={cfg.size!r}: choose one of {', '.join(SIZES)}")
    if not isinstance(cfg.seed, int) or cfg.seed < 0:
        raise UserError(f"seed={cfg.seed!r}: give a whole number, 0 or more")
    if cfg.size not in cfg.at:
        raise UserError(f"experiment has no size {cfg.size!r}; it has {', '.join(map(str, cfg.at))}")
    try:
        plain = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(
            f"config cannot be resolved: {str(error).splitlines()[0]}; are env, data and method those of this script?"
        ) from error
    assert isinstance(plain, dict)
    check_values(plain)
    plain["minutes"] = plain.get("minutes", {}).get(cfg.size)
    resolved = OmegaConf.create({k: v for k, v in plain.items() if k not in ("at", "tuned")})
    OmegaConf.set_readonly(resolved, True)
    return resolved


def check_values(plain: dict[str, Any]) -> None:
    """One line for a number that no script can work with, and for a word where a group of settings belongs."""
    for key in WHOLE_NUMBERS:
        value = plain.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{key}={value!r}: give a whole number, 1 or more")
    rate = plain.get("learning_rate", 1.0)
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < float("inf"):
        raise UserError(f"learning_rate={rate!r}: give a number above 0")
    nested = OmegaConf.create(plain)
    for key in YES_NO:
        value = OmegaConf.select(nested, key)
        if value not in (None, True, False):
            raise UserError(f"{key}={value!r}: give true or false")
    sizes = plain.get("at", {}).get(plain.get("size"), {})
    for key in GROUPS:
        if not isinstance(plain.get(key, {}), dict):
            path = f"at.{plain['size']}.{key}" if isinstance(sizes.get(key), dict) else key
            raise UserError(
                f"{key}={plain[key]!r}: {key} is a group of settings; give one, as in {path}.<name>="
            )


def check_numbers(cfg: DictConfig, whole: dict[str, int], between: dict[str, tuple[float, float]]) -> None:
    """One line for the first setting that is not a whole number of at least so much, or not a number in its range.

    Also for an `env` of another domain, which lacks some of the keys.
    """
    for key in (*whole, *between):
        value = OmegaConf.select(cfg, key)
        if value is None and key.startswith("env."):
            raise UserError(
                f"env={cfg.env.get('name')!r} has no {key}: that env belongs to another script than {cfg.domain}'s"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in whole and not (number and isinstance(value, int) and value >= whole[key]):
            raise UserError(f"{key}={value!r}: give a whole number, {whole[key]} or more")
        if key in between and not (number and between[key][0] <= value <= between[key][1]):
            raise UserError("{}={!r}: give a number from {:g} to {:g}".format(key, value, *between[key]))


def open_run(cfg: DictConfig, method: Method, at_boundary: tuple[str, ...] = (), **meta: Any) -> Run:
    """The run of this config, in runs/<experiment>/<size>/<method><-overrides>/seed_<n>/.

    `at_boundary` names further keys of this script that act at a boundary only, so that runs share phase 0 in which
    they differ. `meta` goes into meta.json.
    """
    config = OmegaConf.to_container(cfg)
    assert isinstance(config, dict)
    if method.watches_training and config.get("compile"):
        raise UserError(
            f"compile=true with method={method.name}: it watches activations, which compiled nets hide; use compile=false"
        )
    if config.get("compile") and pick_device(cfg.device).type == "cpu" and (compiler := missing_compiler()):
        raise UserError(
            f"compile=true needs a C++ compiler, and there is no {compiler!r} here: install it, set CXX to the one that "
            "is there, or use compile=false"
        )
    numbers = {k: v for k, v in config.items() if k not in NOT_NUMBERS}
    shared = {k: v for k, v in numbers.items() if k not in (*AT_BOUNDARY, *at_boundary)}
    run = Run.open(
        config={"experiment": experiment_name(), "size": cfg.size, **numbers},
        root=cfg.run.root,
        experiment=experiment_name(),
        size=cfg.size,
        label=_label(cfg.method.name),
        seed=cfg.seed,
        trunk={"domain": cfg.domain, **shared} if cfg.run.trunk and method.first_phase >= 1 else None,
        meta={"method": cfg.method.name, "domain": cfg.domain, **meta},
        checkpoint_seconds=cfg.run.checkpoint_seconds,
        checkpoint_steps=cfg.run.checkpoint_steps,
        keep=cfg.run.keep,
        tracker=cfg.run.tracker,
    )
    return run


def missing_compiler() -> str:
    """Name of the C++ compiler that torch.compile calls on a CPU, "" where it is installed."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    name = os.environ.get("CXX", usual)
    return "" if shutil.which(name) else name


def experiment_name() -> str:
    """Name of the chosen experiment file."""
    return str(HydraConfig.get().runtime.choices["experiment"])


def pick_device(name: str) -> torch.device:
    """`auto`: the GPU where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device={name!r} cannot be used here ({reason}); try device=cpu") from error
    return device


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
        if override.is_add() or override.is_delete() or override.is_force_add():
            key = override.input_line.lstrip("+~").split("=")[0]
            known = sorted(_keys(domain, parsed, groups) | set(groups))
            raise UserError(
                f"{override.input_line!r}: keys cannot be added or removed{did_you_mean(key, known)}"
            )
        if override.key_or_group in groups:
            for option in _values(override):
                if option not in groups[override.key_or_group]:
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


def _run(task: Callable[[DictConfig], None], cfg: DictConfig) -> None:
    sweep = HydraConfig.get().mode is not None and HydraConfig.get().mode.name == "MULTIRUN"
    line = " ".join(HydraConfig.get().overrides.task)
    try:
        cfg = resolve(cfg)
        torch.set_num_threads(cfg.threads)
        _announce(cfg)
        task(cfg)
    except Exception as error:
        known = isinstance(error, UserError)
        print(f"error: {error}" if known else traceback.format_exc(), file=sys.stderr, flush=True)
        if not sweep:
            sys.exit(BAD_INPUT if known else 1)
        with open(os.environ[FAILURES], "a") as handle:
            handle.write(f"  {line}: {str(error).splitlines()[0] if str(error) else type(error).__name__}\n")


def _announce(cfg: DictConfig) -> None:
    long = f", about {cfg.minutes:g} min a run on 2 CPU cores" if cfg.minutes else ""
    print(
        f"{experiment_name()} | size={cfg.size} | method={cfg.method.name} | seed={cfg.seed} | "
        f"{_what(cfg)} | device={pick_device(cfg.device)}{long}",
        flush=True,
    )


def _what(cfg: DictConfig) -> str:
    parts = [
        f"{key}={cfg[key].name}"
        for key in ("data", "corpus", "env", "model")
        if key in cfg and "name" in cfg[key]
    ]
    return " | ".join(parts)


def _label(method: str) -> str:
    """Method name, then what the command line changed beside experiment, size, method, seed, run.* and where data lies."""
    changed = []
    for item in HydraConfig.get().overrides.task:
        key, _, value = item.partition("=")
        if key not in ("method", "seed", "data.folder", *NOT_NUMBERS) and not key.startswith("run."):
            changed.append(f"{key.removeprefix('method.')}={value}")
    text = "-".join([method, *sorted(changed)])
    return "".join(c if c.isalnum() or c in "-_=.,+" else "_" for c in text)


def compose(domain: str, overrides: list[str]) -> DictConfig:
    """Hydra's composition, interpolations not filled in yet, keys not checked."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(domain, overrides)


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
