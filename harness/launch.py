"""The entry point of every training script: `@launch(DOMAIN) def train(cfg)`, with the DOMAIN of the script's settings.py.

Before anything is written, `overrides` checks the command line and `settings` every value of the config.
"""

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
from typing import Any, ClassVar

import hydra
import torch
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fire_core.errors import UserError, clean_exit, first_line, print_error
from fire_core.files import write_atomic
from fire_core.methods import Method
from harness import stop, sweep_display
from harness.config import FOLDERS, compose, parse, resolve, search_path
from harness.device import check_machine, keep_freed_memory, pick_device
from harness.manual import about, manual
from harness.naming import changes, identity, named_folder, numbers_only, own_folder
from harness.overrides import check_overrides, check_sweep
from harness.pool import Pool
from harness.runs import Run
from harness.runs.folders import FolderLock, fingerprint, state_of
from harness.runs.machine import ROOT, versions
from harness.runs.run import FinishedElsewhere
from harness.runs.stack import take_turns
from harness.settings import Domain

BAD_INPUT = 2
APART = ("seed", "method", "optimizer_state")  # keys in which runs that train together may differ


def launch(domain: Domain) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Return a decorator that turns `train(cfg)` into a command, which reads overrides from `sys.argv`.

    Exit codes: 0 done; 1 failed (the traceback is in the run's FAILED file), or a run of a sweep failed; 2 bad input;
    75 stopped by a signal after saving; 128 + the signal's number (130 Ctrl-C, 143 SIGTERM) stopped without saving.
    """

    def decorate(task: Callable[[DictConfig], None]) -> Callable[[], None]:
        script = Path(task.__code__.co_filename).resolve()
        FOLDERS.extend({domain.conf} - set(FOLDERS))

        @functools.wraps(task)
        def command() -> None:
            stop.handle(stop.exit_at_once)  # nothing is open yet; Hydra would lose an exception
            try:
                _command(domain, Job(script, task.__name__), sys.argv[1:])
            except (UserError, HydraException) as error:
                print_error(error if isinstance(error, UserError) else first_line(error))
                sys.exit(BAD_INPUT)
            except KeyboardInterrupt as interrupt:
                stop.say_stopped()
                sys.exit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))

        command.domain = domain  # type: ignore[attr-defined]
        return command

    return decorate


def _command(domain: Domain, job: "Job", arguments: list[str]) -> None:
    line = get_args_parser().parse_intermixed_args(arguments)
    overrides = line.overrides
    if line.help:
        with clean_exit():
            print(manual(domain, everything="all" in overrides))
        return
    if line.config_dir:
        FOLDERS.append(Path(line.config_dir).absolute())
    check_overrides(domain, overrides)
    if line.multirun:  # Hydra composes what is not swept with the default method, which may lack a setting
        fixed = [o.input_line for o in parse(overrides) if not o.is_sweep_override()]
        own = {text for text in fixed if text.startswith("method.")}
        overrides = [f"{o.replace('=', '=choice(', 1)})" if o in own else o for o in overrides]
    if line.multirun and line.cfg:
        raise UserError(f"--cfg={line.cfg} shows the config of one run: leave out -m")
    if not line.multirun and any(o.startswith("search=") for o in overrides):
        raise UserError("search= is a sweep over the values of a method: add -m")
    # processes that a launcher starts find our packages whatever their working directory is
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    others = [word for word in arguments if word not in line.overrides]
    sys.argv[1:] = [*overrides, *search_path(domain), *others]
    start = hydra.main(version_base="1.3", config_path=str(domain.conf), config_name=domain.name)(job)
    if line.multirun:
        _sweep(domain, job, overrides, start)
        return
    composed = compose(domain, overrides)
    if line.cfg == "job":
        print(OmegaConf.to_yaml(resolve(domain, composed)), end="")
    else:
        start()


def _sweep(domain: Domain, job: "Job", overrides: list[str], start: Callable[[], None]) -> None:
    """Check all runs of a sweep, then train them, several at a time, and show how they proceed."""
    runs = check_sweep(domain, overrides)
    configs = [cfg for _, cfg in runs]
    folders = [own_folder(domain, cfg, typed) for typed, cfg in runs]
    if len(set(folders)) < len({fingerprint(numbers_only(domain, cfg)) for cfg in configs}):
        wrong = "two runs of this sweep would have one folder, whose name leaves out folders of data"
        raise UserError(f"{wrong}: start them one after the other, each with a run.root of its own")
    moved = [own for own, (typed, cfg) in zip(folders, runs) if own != named_folder(domain, cfg, typed)]
    if moved:
        note = f"{len(moved)} of {len(runs)} runs have another config than earlier ones of their label, and tables leave out"
        note += f" the later: move the earlier folders elsewhere and rename {moved[0].parent} to theirs, or set run.root"
        print(note, flush=True)
    stop.handle(stop.interrupt)
    if "hydra/launcher=submitit_slurm" not in overrides:  # its jobs outlive this process
        stop.name_driver()
    here = not any(text.startswith("hydra/launcher=") for text in overrides)
    jobs = min(max(cfg.run.jobs for cfg in configs), len(runs))
    at_a_time = min(jobs * max(cfg.get("stack", 1) for cfg in configs), len(runs))
    minutes = [cfg.minutes or 0.0 for cfg in configs]
    for name in list(dict.fromkeys(str(cfg.experiment) for cfg in configs))[:3]:
        print(f"{name}: {about(name)}")
    told = f", {at_a_time} at a time" if here else ""
    told += f", each at most {max(minutes):g} min on a CPU" if all(minutes) else ""
    print(f"sweep of {len(runs)} runs{told}; output: {sweep_display.LOG} in the runs' folders", flush=True)
    with sweep_display.Display(folders, domain.results) as display:
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
        run = cfg, (node := HydraConfig.get())
        if Job.pool is not None:
            shared = fingerprint({k: v for k, v in OmegaConf.to_container(cfg).items() if k not in APART})
            stack = Job.stacks.setdefault(shared, [])
            stack.append(run)
            if len(stack) == cfg.get("stack", 1):
                Job.pool.start(self.train, *Job.stacks.pop(shared))
        elif (code := self.train(run)) and node.mode == RunMode.RUN:
            sys.exit(code)

    def train(self, *runs: tuple[DictConfig, DictConfig]) -> int:
        """Train one run, or several as a stack, and return the exit code."""
        stop.handle(stop.interrupt)
        stop.end_with_driver()
        command = runpy.run_path(str(self.script))[self.function]
        trainings = [functools.partial(_run, command.domain, command.__wrapped__, *run) for run in runs]
        if len(runs) == 1:
            return trainings[0]()
        torch.set_num_threads(runs[0][0].threads)  # of this thread, which computes what the runs share
        return take_turns(trainings)

    def modules(self) -> list[str]:
        """Return the modules that a process needs for a run: the script's, and what PyTorch imports at the first step."""
        ours = self.script.is_relative_to(ROOT)
        script = [".".join(self.script.relative_to(ROOT).with_suffix("").parts)] if ours else []
        return [*script, "harness.launch", "torch._dynamo"]


def needs(domain: Domain) -> None:
    """Exit if packages of a script are missing, but print its help. A script calls this before it imports the packages."""
    missing = [package for package in domain.needs if importlib.util.find_spec(package) is None]
    if missing and {"-h", "--help"} & set(sys.argv):
        with clean_exit():
            print(manual(domain))
        sys.exit()
    if missing:
        print_error(f"{domain.script} needs {', '.join(missing)}: make install-{domain.extras[0]}")
        sys.exit(BAD_INPUT)


def open_run(domain: Domain, cfg: DictConfig, method: Method, **meta: Any) -> Run:
    """Return the run of this config; `meta` are further entries of meta.json. Raises UserError for a missing device."""
    check_machine(cfg)
    numbers, trunk = identity(domain, cfg, method)
    typed = list(HydraConfig.get().overrides.task)
    facts = {"method": cfg.method.name, "domain": domain.name, "overrides": changes(domain, typed)}
    facts |= {"data": OmegaConf.select(cfg, domain.shown[0]), **meta, "versions": versions(*domain.extras)}
    return Run(numbers, named_folder(domain, cfg, typed), saving=cfg.run, trunk=trunk, **facts)


def _run(domain: Domain, task: Callable[[DictConfig], None], cfg: DictConfig, node: DictConfig) -> int:
    """Train one run and return its exit code. A run of a sweep writes what it prints to its folder."""
    HydraConfig.instance().cfg = OmegaConf.create({"hydra": node})
    with ExitStack() as stack:
        folder = None
        try:
            cfg = resolve(domain, cfg)
            domain.check(cfg)
            folder = own_folder(domain, cfg, list(node.overrides.task))
            if node.mode == RunMode.MULTIRUN:
                if state_of(folder) == "done":
                    return 0
                stack.enter_context(sweep_display.output_in(folder))
            torch.set_num_threads(cfg.threads)
            keep_freed_memory()
            shown = [f"{key.removesuffix('.name')}={OmegaConf.select(cfg, key)}" for key in domain.shown]
            run = f"{cfg.experiment} | size={cfg.size} | method={cfg.method.name} | seed={cfg.seed}"
            long = f", about {cfg.minutes:g} min a run on a CPU" if cfg.minutes else ""
            print(" | ".join([run, *shown, f"device={pick_device(cfg.device)}{long}"]), flush=True)
            task(cfg)
        except FinishedElsewhere as end:
            print(end, flush=True)
        except Exception as caught:
            error, text = _about_disk(caught, cfg) or caught, traceback.format_exc()
            user_error = isinstance(error, UserError)
            print_error(error) if user_error else print(text, file=sys.stderr, flush=True)
            if folder is not None and folder.is_dir() and os.environ.get("RANK", "0") == "0":
                with suppress(OSError, UserError):
                    if (lock := FolderLock(folder)).acquire(wait=False):  # no other process trains it
                        stack.callback(lock.release)
                        if not (folder / "DONE").exists():
                            write_atomic(folder / "FAILED", f"{error}\n\n{text}")
            return BAD_INPUT if user_error else 1
    if node.mode == RunMode.RUN:
        root = "" if cfg.run.root == "runs" else f" --root {shlex.quote(cfg.run.root)}"
        print(f"table: python -m analysis tables --experiment {cfg.experiment} --size {cfg.size}{root}")
    return 0


def _about_disk(error: Exception, cfg: DictConfig) -> UserError | None:
    """Return a UserError of one line if a disk is full or a name too long, else None."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG):
        return None
    wrong = f"cannot write {str(error.filename or cfg.run.root)[:200]} ({error.strerror})"
    remedy = "free space or choose a shorter name, and run the same command again"
    return UserError(f"{wrong}: {remedy}; earlier checkpoints are intact")
