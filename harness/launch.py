"""The entry point of every training script: checked overrides and config, run folder, exit codes.

    @launch(DOMAIN)  # which the script's settings.py declares
    def train(cfg): ...

    if __name__ == "__main__":
        train()

Hydra composes `conf/<script>.yaml`. Before anything is written, `overrides` checks the command line and `settings` every
value of the config. Each mistake is reported in one line.
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import os
import runpy
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fire_core.errors import UserError, print_error, reader_may_leave
from fire_core.files import write_atomic
from fire_core.methods import Method, create
from harness import stop, sweep
from harness.config import CONF, add_folder, compose, more_folders, parse, resolve, typed_in
from harness.device import check_machine, pick_device
from harness.malloc import keep_freed_memory
from harness.manual import about, manual
from harness.naming import identity, is_sweep, name_run
from harness.overrides import CONFIG_DIR, check_overrides, check_sweep, read_line
from harness.pool import Pool
from harness.runs import Run
from harness.runs.folders import fingerprint, state_of
from harness.runs.machine import requirements, versions
from harness.runs.record import FinishedElsewhere
from harness.runs.stack import take_turns
from harness.settings import Domain

BAD_INPUT = 2
APART = ("seed", "method", "optimizer_state")  # keys in which runs that train together may differ
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG, errno.ENOENT)


def launch(domain: Domain) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Return a decorator that turns `train(cfg)` into a command, which reads overrides from `sys.argv`.

    Exit codes: 0 done; 1 failed (the traceback is in the run's FAILED file), or a run of a sweep failed; 2 bad input;
    75 stopped by a signal after saving; 128 + the signal's number (130 Ctrl-C, 143 SIGTERM) stopped without saving.
    """

    def decorate(task: Callable[[DictConfig], None]) -> Callable[[], None]:
        script = Path(task.__code__.co_filename).resolve()

        @functools.wraps(task)
        def command() -> None:
            stop.exit_at_once()  # nothing is open yet, and an exception would be lost in what Hydra calls
            try:
                _command(domain, Job(script, task.__name__), sys.argv[1:])
            except UserError as error:
                print_error(error)
                sys.exit(BAD_INPUT)
            except KeyboardInterrupt as interrupt:
                number = interrupt.args[0] if interrupt.args else signal.SIGINT
                stop.say_stopped()
                sys.exit(128 + number)

        command.domain = domain  # type: ignore[attr-defined]
        return command

    return decorate


def _command(domain: Domain, job: Job, arguments: list[str]) -> None:
    add_folder(domain.conf)
    line = read_line(arguments)
    for folder in map(Path, line.config_dir):
        if not os.path.isdir(folder) or not any(folder.glob("*/*.yaml")):
            raise UserError(
                f"{CONFIG_DIR} {folder}: there is no file like experiment/<name>.yaml in this folder"
            )
        add_folder(folder)
    if line.help is not None:
        _help(domain, line.help)
        return
    if line.multirun and line.cfg:
        raise UserError("--cfg job shows the config of one run: leave out -m and give one value of each key")
    overrides = line.overrides
    check_overrides(domain, overrides, sweep=line.multirun)
    if any(o.startswith("hydra/launcher=ray") for o in overrides) and not importlib.util.find_spec("ray"):
        raise UserError("hydra/launcher=ray needs Ray: make install-ray")
    # processes that a launcher starts find our packages whatever their working directory is
    paths = [str(CONF.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.argv[1:] = [*overrides, *more_folders(domain), *(["-m"] if line.multirun else [])]
    start = hydra.main(version_base="1.3", config_path=str(domain.conf), config_name=domain.name)(job)
    if line.multirun:
        _sweep(domain, job, overrides, start)
        return
    composed = compose(domain, overrides)
    if line.cfg:
        print(OmegaConf.to_yaml(resolve(domain, composed)), end="")
    else:
        start()


def _sweep(domain: Domain, job: Job, overrides: list[str], start: Callable[[], None]) -> None:
    """Check all runs of a sweep, then train them, several at a time, and show how they proceed."""

    def check_run(cfg: DictConfig) -> None:
        check_machine(cfg, create(**cfg.method))
        check_settings(domain, cfg)

    runs = check_sweep(domain, overrides, check_run)
    names, minutes = [], [cfg.minutes or 0.0 for _, cfg in runs]
    for typed, cfg in runs:
        own = fingerprint(identity(domain, cfg, create(**cfg.method))[0])
        names.append(name_run(domain, cfg, parse(typed), own, sweep=True)[0].free_for(own))
    stop.raise_interrupt()
    stop.name_driver()
    here = not any(o.startswith("hydra/launcher=") for o in overrides)
    jobs = min(max(cfg.run.jobs for _, cfg in runs), len(runs)) if runs else 1
    at_a_time = min(jobs * max((cfg.get("stack", 1) for _, cfg in runs), default=1), max(len(runs), 1))
    for name in list(dict.fromkeys(str(cfg.experiment) for _, cfg in runs))[:3]:
        print(f"{name}: {about(name)}")
    print(
        f"sweep of {len(runs) or 'several'} runs{f', {at_a_time} at a time' if here else ''}"
        + (f", each at most {max(minutes):g} min on a CPU" if minutes and all(minutes) else "")
        + f"; {sweep.LOG} in the folder of a run has its output",
        flush=True,
    )
    with sweep.Display(names, domain.results) as display:
        if here:
            with Pool(jobs, job.modules()) as Job.pool:
                start()
                for stack in Job.stacks.values():
                    Job.pool.start(job.train, *stack)
        else:
            start()
    code = Job.pool.exit_code() if Job.pool else 0
    unfinished = [name for folder, name in display.names.items() if display.state[folder] != "done"]
    if code not in (0, 1):
        stop.say_stopped()
    elif unfinished:
        print(f"not done: {'; '.join(unfinished[:10])}", file=sys.stderr)
    sys.exit(code or int(bool(unfinished)))


@dataclass(frozen=True)
class Job:
    """A run of a script's function. Workers receive the names of both and import the script themselves."""

    script: Path
    function: str

    pool: ClassVar[Pool | None] = None  # that trains the runs of a sweep on this machine
    stacks: ClassVar[dict[str, list[Any]]] = {}  # runs that wait for others to train with, by what they share

    def __call__(self, cfg: DictConfig) -> None:
        run = cfg, HydraConfig.get()
        if Job.pool is not None:
            shared = {key: value for key, value in OmegaConf.to_container(cfg).items() if key not in APART}
            stack = Job.stacks.setdefault(fingerprint(shared), [])
            stack.append(run)
            if len(stack) == cfg.get("stack", 1):
                Job.pool.start(self.train, *Job.stacks.pop(fingerprint(shared)))
        elif (code := self.train(run)) and not is_sweep():
            sys.exit(code)

    def train(self, *runs: tuple[DictConfig, DictConfig]) -> int:
        """Train one run, or several as a stack, and return the exit code."""
        stop.raise_interrupt()
        stop.end_with_driver()
        command = runpy.run_path(str(self.script))[self.function]
        trainings = [functools.partial(_run, command.domain, command.__wrapped__, *run) for run in runs]
        if len(runs) == 1:
            return trainings[0]()
        torch.set_num_threads(runs[0][0].threads)  # of this thread, which computes what the runs share
        return take_turns(trainings)

    def modules(self) -> list[str]:
        """Return the modules that a process needs for a run: the script's, and what PyTorch imports at the first step."""
        ours = self.script.is_relative_to(CONF.parent)
        path = self.script.relative_to(CONF.parent).with_suffix("").parts if ours else ()
        return [*filter(None, [".".join(path)]), "harness.launch", "torch._dynamo"]


def _help(domain: Domain, what: str = "") -> None:
    with reader_may_leave():
        print(manual(domain, everything=what == "all"))


def needs(domain: Domain) -> None:
    """Exit with code 2 and one line if packages of a script are missing, but print its help without them.

    A script calls this before it imports the packages.
    """
    missing = [package for package in domain.needs if importlib.util.find_spec(package) is None]
    if missing and {"-h", "--help"} & set(sys.argv):
        _help(domain)
        sys.exit()
    if missing:
        print_error(f"{domain.script} needs {', '.join(missing)}: make install-{domain.extras[0]}")
        sys.exit(BAD_INPUT)


def open_run(domain: Domain, cfg: DictConfig, method: Method, **meta: Any) -> Run:
    """Return the run of this config, in <run.root>/<experiment>/<size>/<method><-overrides>/seed_<n>/.

    meta: further entries of meta.json. Raises UserError for a device or compiler that is not there.
    """
    check_machine(cfg, method)
    numbers, trunk = identity(domain, cfg, method)
    typed = typed_in(HydraConfig.get())
    name, changed = name_run(domain, cfg, typed, fingerprint(numbers), sweep=is_sweep())
    facts = {"method": cfg.method.name, "domain": domain.name, "script": domain.script, "overrides": changed}
    facts |= {"data": OmegaConf.select(cfg, domain.shown[0])} | meta
    facts |= {"versions": versions(requirements(*domain.extras))}
    return Run.open(numbers, name, trunk=trunk, meta=facts, saving=SimpleNamespace(**cfg.run))


def check_settings(domain: Domain, cfg: DictConfig) -> None:
    """Raise UserError for settings that contradict one another, and for a method whose first phase comes after the last
    one, so that it would never act."""
    domain.check(cfg)
    method, phases = create(**cfg.method), domain.phases(cfg)
    if method.first_phase >= phases and method.name != "none":
        raise UserError(
            f"method.first_phase={method.first_phase}: the phases of this run are 0 to {phases - 1}, so {method.name} would "
            "never act"
        )


def _run(domain: Domain, task: Callable[[DictConfig], None], cfg: DictConfig, node: DictConfig) -> int:
    """Train one run and return its exit code. A run of a sweep writes what it prints to its folder."""
    HydraConfig.instance().cfg = OmegaConf.create({"hydra": node})
    with ExitStack() as stack:
        folder = None
        try:
            cfg = resolve(domain, cfg, node)
            check_settings(domain, cfg)
            if is_sweep():
                own = fingerprint(identity(domain, cfg, create(**cfg.method))[0])
                name, _ = name_run(domain, cfg, typed_in(node), own, sweep=True)
                folder = name.free_for(own).folder
                if state_of(folder) == "done":
                    return 0
                stack.enter_context(sweep.output_in(folder))
            torch.set_num_threads(cfg.threads)
            keep_freed_memory()
            _announce(domain, cfg)
            task(cfg)
        except FinishedElsewhere as end:
            print(end, flush=True)
        except Exception as caught:
            error = _about_disk(caught, cfg) or caught
            user_error = isinstance(error, UserError)
            text = str(error) if user_error else traceback.format_exc()
            print_error(text) if user_error else print(text, file=sys.stderr, flush=True)
            if folder is not None:
                with suppress(OSError):
                    write_atomic(folder / "FAILED", f"{error}\n\n{traceback.format_exc()}")
            return BAD_INPUT if user_error else 1
    if not is_sweep():
        root = "" if cfg.run.root == "runs" else f" --root {shlex.quote(cfg.run.root)}"
        print(f"table: python -m analysis tables --experiment {cfg.experiment} --size {cfg.size}{root}")
    return 0


def _about_disk(error: Exception, cfg: DictConfig) -> UserError | None:
    """Return a UserError of one line if a disk is full, a name too long or the run's folder gone, else None."""
    if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
        return None
    where = str(error.filename or cfg.run.root)
    if error.errno == errno.ENOENT and not Path(where).is_relative_to(cfg.run.root):
        return None
    return UserError(
        f"cannot write {where[:200]} ({error.strerror}): free space, choose a shorter name or restore the folder, and run "
        "the same command again; earlier checkpoints are intact"
    )


def _announce(domain: Domain, cfg: DictConfig) -> None:
    long = f", about {cfg.minutes:g} min a run on a CPU" if cfg.minutes else ""
    names = [f"{key.removesuffix('.name')}={OmegaConf.select(cfg, key)}" for key in domain.shown]
    print(
        f"{cfg.experiment} | size={cfg.size} | method={cfg.method.name} | seed={cfg.seed} | "
        f"{' | '.join(names)} | device={pick_device(cfg.device)}{long}",
        flush=True,
    )
