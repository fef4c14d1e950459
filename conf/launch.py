"""The way into every training script: strict keys, resolved config, run folder, one line per mistake.

    @launch("vision")
    def train(cfg): ...

    if __name__ == "__main__":
        train()

`conf/<domain>.yaml` is composed with Hydra. Mistakes in the command line are found in `overrides`, in values in `values`.
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
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.overrides import CONF, check_overrides, compose, overrides_in
from conf.values import check_values
from fire_core.errors import UserError
from fire_core.methods import Method
from fire_core.runs import Run

SIZES = ("smoke", "small", "paper")
BAD_INPUT = 2
# Names the file in which the jobs of a sweep, in whatever process, note failures.
FAILURES = "FIRE_SWEEP_FAILURES"
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
            arguments, multirun = sys.argv[1:], ("-m", "--multirun")
            sys.argv[1:] = sorted(arguments, key=lambda a: a not in multirun)  # wherever it was typed
            try:
                check_overrides(domain, overrides_in(arguments), sweep=any(a in multirun for a in arguments))
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
    if type(cfg.seed) is not int or not 0 <= cfg.seed < 2**63:
        raise UserError(f"seed={cfg.seed!r}: give a whole number, 0 or more and below 2**63")
    if not isinstance(cfg.at, DictConfig):
        raise UserError(
            f"at={cfg.at!r}: at holds the settings of every size; give one, as in at.{cfg.size}.<name>="
        )
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


def open_run(cfg: DictConfig, method: Method, at_boundary: tuple[str, ...] = (), **meta: Any) -> Run:
    """The run of this config, in runs/<experiment>/<size>/<method><-overrides>/seed_<n>/.

    `at_boundary` names further keys of this script that act at a boundary only, so that runs share phase 0 in which
    they differ. `meta` goes into meta.json.
    """
    config = OmegaConf.to_container(cfg)
    assert isinstance(config, dict)
    if cfg.domain not in method.domains:
        raise UserError(
            f"method={method.name} does not run in {cfg.domain} ({', '.join(method.domains)} only)"
        )
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


def check_first_phase(method: Method, phases: int) -> None:
    """Refuse a method that would begin after the last phase, and so never."""
    if method.first_phase >= phases and method.name != "none":
        raise UserError(
            f"method.first_phase={method.first_phase}: the phases of this run are 0 to {phases - 1}, so {method.name} would "
            "never act"
        )


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


def _run(task: Callable[[DictConfig], None], cfg: DictConfig) -> None:
    sweep = HydraConfig.get().mode is not None and HydraConfig.get().mode.name == "MULTIRUN"
    line = " ".join(OmegaConf.to_container(HydraConfig.get().overrides.task))  # as typed, ${...} and all
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
        notes = os.environ.get(FAILURES)
        if notes is None or not Path(notes).parent.is_dir():
            raise  # a job on another machine: its launcher tells
        with open(notes, "a") as handle:
            handle.write(f"  {line}: {str(error).splitlines()[0] if str(error) else type(error).__name__}\n")


def _announce(cfg: DictConfig) -> None:
    long = f", about {cfg.minutes:g} min a run on a CPU" if cfg.minutes else ""
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
