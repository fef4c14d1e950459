"""A campaign: the sweeps of a file of conf/campaign, started one after another as multiruns of their scripts.

    python -m harness.campaign medium --plan         # what would run, and for how long; starts nothing
    python -m harness.campaign medium --budget 8h

The file has `size`, `parts` and `options`, settings of every sweep. A part is a list of sweeps. A sweep is what follows
`-m` on the command line of a script, as a mapping; a list means several values. One seed of every sweep of a part comes
before the second seed of any; a list within the list of seeds stays in one sweep. `jobs` is no setting, but the number of
runs that the launcher trains at a time. For plans, the file may have `minutes`, {experiment: minutes of a run}, and
`assumed`, what they are true for; otherwise they come from the experiments' files.

A sweep skips runs that are finished and resumes the others, so the same command resumes a campaign.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.util
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml

from fire_core.errors import UserError, did_you_mean, print_error, reader_may_leave
from harness.config import CONF, domain_of, in_file, options, parse
from harness.domains import find
from harness.launch import BAD_INPUT
from harness.naming import changes, label
from harness.overrides import check_overrides, typed_values
from harness.runs.folders import find_folders, read_meta
from harness.runs.signals import STOPPED
from harness.settings import keys
from harness.stop import SIGNALS

KEYS = ("size", "parts", "options", "minutes", "assumed")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LAUNCHERS = {  # name -> (package, target of make)
    "basic": ("hydra", "install"),
    "ray": ("hydra_plugins.hydra_ray_launcher", "install-ray"),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "install-slurm"),
    "submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "install-slurm"),
}
FIRST_SWEEPS = 12  # of a plan that are printed


@dataclass(frozen=True)
class Sweep:
    """One multirun: the script's domain, its overrides, and how many runs are trained at a time (None: not said)."""

    domain: str
    overrides: tuple[str, ...]
    jobs: int | None

    def runs(self) -> list[dict[str, str]]:
        """Return the settings of each run, {key: value as typed}, in the order of training."""
        axes = [typed_values(override) for override in parse(list(self.overrides))]
        return [dict(text.split("=", 1) for text in line) for line in itertools.product(*axes)]


@dataclass(frozen=True)
class Campaign:
    """A campaign's sweeps in their order, and what its file says about the duration of runs."""

    name: str
    size: str
    sweeps: list[Sweep]
    minutes: Mapping[str, float]
    assumed: str


# ---------------------------------------------------------------------------------------------- the file
def load(name: str, root: str, more: Sequence[str] = ()) -> Campaign:
    """Return the campaign conf/campaign/<name>.yaml, or that of the file `name` if that ends in .yaml.

    Args:
        root: folder of all runs.
        more: overrides for every sweep whose script has the key; they replace those of the file.
    Raises: UserError for a file, experiment or key that does not exist, or an override that no script has.
    """
    path = Path(name) if name.endswith(".yaml") else CONF / "campaign" / f"{name}.yaml"
    if not os.path.isfile(path):  # unlike Path.is_file, False for a path that is too long
        raise UserError(f"there is no campaign {name!r}{did_you_mean(name, options('campaign'))}")
    wanted = {key: f"{key}={value}" for key, _, value in (text.partition("=") for text in more)}
    used = set[str]()
    try:
        content = yaml.safe_load(path.read_text())
        if unknown := [key for key in content if key not in KEYS]:
            raise UserError(f"key {unknown[0]!r} is unknown{did_you_mean(unknown[0], KEYS)}")
        common, size = content.get("options", {}), content["size"]
        each = [pair for part in content["parts"] for pair in _one_seed_at_a_time(part)]
        sweeps = [
            _sweep({**common, **one, "size": size, "seed": seed}, root, wanted, used) for one, seed in each
        ]
        minutes = dict[str, float](content.get("minutes", {}))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is no campaign: {error!r}; compare conf/campaign/smoke.yaml") from error
    if left := [key for key in wanted if key not in used]:
        raise UserError(f"{wanted[left[0]]}: no script of this campaign has this key; write key=value")
    return Campaign(path.stem, size, sweeps, minutes, content.get("assumed", ""))


def _one_seed_at_a_time(part: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], Any]]:
    """Return (sweep, seed or list of seeds) of one part: the first of every sweep, then the second of every sweep."""
    seeds = [one["seed"] if isinstance(one["seed"], list) else [one["seed"]] for one in part]
    turns = itertools.zip_longest(*seeds)
    return [(one, seed) for turn in turns for one, seed in zip(part, turn, strict=True) if seed is not None]


def _sweep(settings: dict[str, Any], root: str, more: Mapping[str, str], used: set[str]) -> Sweep:
    """Return one sweep after checking its keys. The keys of `more` that its script has are added to `used`."""
    names = settings["experiment"] if isinstance(settings["experiment"], list) else [settings["experiment"]]
    for name in names:
        if name not in (known := options("experiment")):
            raise UserError(f"experiment {name!r} does not exist{did_you_mean(name, known)}")
    domain = find(domain_of(names[0]))
    first = {key: settings[key] for key in ("experiment", "size", "method", "seed")}
    texts = {key: f"{key}={_text(value)}" for key, value in {**first, **settings}.items() if key != "jobs"}
    mine = {key: text for key, text in more.items() if key in keys(domain)}
    used.update(mine)
    overrides = [*(texts | mine).values(), f"run.root={root}"]
    check_overrides(domain, overrides)
    return Sweep(domain.name, tuple(overrides), settings.get("jobs"))


def _text(value: Any) -> str:
    """Return a value as it is typed after `key=`: 1,2 for a list, true and null as in YAML."""
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n")[0]


# ---------------------------------------------------------------------------------------------- commands
def launcher_words(launcher: str) -> list[str]:
    """Return the name of a launcher and its settings. Raises UserError for an unknown one."""
    words = shlex.split(launcher) or [""]
    if words[0] not in LAUNCHERS:
        raise UserError(f"--launcher {words[0]} is unknown{did_you_mean(words[0], LAUNCHERS)}")
    return words


def launcher_overrides(launcher: str, jobs: int) -> list[str]:
    """Return the overrides that choose a launcher with `jobs` runs at a time; "ray hydra.launcher.ray..." has settings.

    Raises UserError for an unknown launcher, a missing plugin, and several runs at a time with the basic launcher.
    """
    name, *settings = launcher_words(launcher)
    plugin, target = LAUNCHERS[name]
    if importlib.util.find_spec(plugin.split(".")[0]) is None or importlib.util.find_spec(plugin) is None:
        raise UserError(f"--launcher {name} needs a plugin of Hydra: make {target}")
    if name == "basic":
        return settings
    ours = [f"hydra/launcher={name}"]
    if name == "ray":
        settings_of_ray = {"num_cpus": jobs, "include_dashboard": "false", "logging_level": "error"}
        ours += [f"+hydra.launcher.ray.init.{key}={value}" for key, value in settings_of_ray.items()]
        if torch.cuda.is_available():  # Ray hides the GPU from jobs that do not ask for a share of it
            ours.append(f"+hydra.launcher.ray.remote.num_gpus={1 / jobs:g}")
    else:
        ours.append(f"hydra.launcher.array_parallelism={jobs}")
    return [*ours, *settings]


def command(sweep: Sweep, launcher: str, jobs: int | None) -> list[str]:
    """Return the command line of a sweep."""
    script = os.path.relpath(CONF.parent / find(sweep.domain).script)
    chosen = launcher_overrides(launcher, at_a_time(sweep, launcher, jobs))
    return [sys.executable, script, "-m", *sweep.overrides, *chosen]


def at_a_time(sweep: Sweep, launcher: str, jobs: int | None) -> int:
    """Return how many runs of a sweep are trained at a time: `jobs`, else what its file says, else one."""
    return 1 if launcher == "basic" else jobs or sweep.jobs or 1


# ---------------------------------------------------------------------------------------------- the plan
def plan(campaign: Campaign, root: str, launcher: str, jobs: int | None) -> str:
    """Return the plan: the first sweeps with their runs and hours, the total, and what the hours are based on."""
    measured = measure(root, campaign.size)
    lines, total, work, finished = [], 0.0, 0.0, 0
    sources = Counter[str]()
    for number, sweep in enumerate(campaign.sweeps, 1):
        runs = sweep.runs()
        left = [run for run in runs if not (folder_of(sweep, run, root) / "DONE").exists()]
        durations = [duration_of(run["experiment"], run["method"], campaign, measured) for run in left]
        hours = sum(minutes for minutes, _ in durations) / 60
        sources.update(source for _, source in durations)
        finished, work = finished + len(runs) - len(left), work + hours
        total += hours / max(1, min(len(left), at_a_time(sweep, launcher, jobs)))
        experiments, methods, seeds = (
            ",".join(dict.fromkeys(run[key] for run in runs)) for key in ("experiment", "method", "seed")
        )
        lines.append(
            f"{number:4}  {len(left):4} runs  {hours:7.1f} h  done after {total:7.1f} h  "
            f"{experiments} | {methods} | seed {seeds}"
        )
    if len(lines) > FIRST_SWEEPS:
        more = len(lines) - FIRST_SWEEPS
        lines[FIRST_SWEEPS:] = [f"      and {more} more sweeps; --commands prints them all"]
    based = {
        "measured": f"as finished runs of the same experiment in {root} took",
        "campaign": f"minutes in the campaign's file, for {campaign.assumed}",
        "experiment": "minutes in the experiments' files, on a CPU and from scratch; sharing a first phase saves time",
        "unknown": "0 hours, because nothing is known about their duration",
    }
    return "\n".join(
        [
            f"campaign {campaign.name}, size={campaign.size}: {sources.total()} runs in {len(campaign.sweeps)} sweeps; "
            f"{finished} runs are finished",
            "",
            *lines,
            "",
            f"total: {total:.1f} hours; {work:.1f} hours of runs with --launcher {launcher}",
            *(
                f"  assumed of {sources[source]} runs: {text}"
                for source, text in based.items()
                if sources[source]
            ),
        ]
    )


def folder_of(sweep: Sweep, run: Mapping[str, str], root: str) -> Path:
    """Return the folder of a run whose settings have not changed since its start."""
    others = tuple(f"{key}={run[key]}" for key in run if key not in ("experiment", "size", "method", "seed"))
    name = label(run["method"], _changes(sweep.domain, others))
    return Path(root) / run["experiment"] / run["size"] / name / f"seed_{run['seed']}"


@functools.cache
def _changes(domain: str, overrides: tuple[str, ...]) -> list[str]:
    """Return the overrides that are in the name of a run's folder. Hydra is slow at reading them."""
    return changes(find(domain), parse(list(overrides)))


def duration_of(
    experiment: str, method: str, campaign: Campaign, measured: Mapping[tuple[str, str], float]
) -> tuple[float, str]:
    """Return (minutes of a run, where they come from). A measured run of the same method comes first, then any other."""
    own = [minutes for key, minutes in measured.items() if key == (experiment, method)]
    others = [minutes for (name, _), minutes in measured.items() if name == experiment]
    if found := own or others:
        return sum(found) / len(found), "measured"
    if experiment in campaign.minutes:
        return campaign.minutes[experiment], "campaign"
    minutes = (in_file(experiment, "minutes") or {}).get(campaign.size)
    return (0.0, "unknown") if minutes is None else (minutes, "experiment")


def measure(root: str, size: str) -> dict[tuple[str, str], float]:
    """Return {(experiment, method): mean minutes} of the finished runs that were never stopped."""
    found: dict[tuple[str, str], list[float]] = {}
    for folder in find_folders(root, size=size) if os.path.isdir(root) else []:
        meta, done = read_meta(folder), folder / "DONE"
        if done.exists() and not meta.get("earlier"):
            try:
                began = datetime.datetime.fromisoformat(meta["started"]).timestamp()
            except (KeyError, TypeError, ValueError):  # lost or damaged
                continue
            key = (str(meta.get("experiment")), str(meta.get("method")))
            found.setdefault(key, []).append((done.stat().st_mtime - began) / 60)
    return {key: sum(minutes) / len(minutes) for key, minutes in found.items()}


# ---------------------------------------------------------------------------------------------- training
def train(commands: Sequence[Sequence[str]], budget: float = float("inf")) -> int:
    """Run sweeps one after another and return the exit code: 0 done, 1 if a sweep failed, 75 or 128 + signal if stopped.

    A sweep that fails or is stopped does not keep the others from starting. None starts after `budget` seconds, or after a
    signal, which the running sweep receives.
    """
    began, ends = time.monotonic(), dict[str, int]()
    asked: list[int] = []  # the signals that have come

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    with ExitStack() as restored:
        for kind in SIGNALS:
            restored.callback(signal.signal, kind, signal.signal(kind, note))
        for number, words in enumerate(commands, 1):
            if time.monotonic() - began >= budget:
                print(f"the budget is used up before sweep {number} of {len(commands)}", flush=True)
                break
            line = shlex.join(words)
            print(f"\nsweep {number} of {len(commands)}: {line}", flush=True)
            # in a session of its own, so that Ctrl-C reaches it once, through us
            process, passed_on = subprocess.Popen(words, start_new_session=True), 0
            # polled: a signal just before a blocking wait() would not be noted until the sweep ends
            while (code := process.poll()) is None:
                for kind in asked[passed_on:]:
                    process.send_signal(kind)
                    passed_on += 1
                time.sleep(0.1)
            if code:
                ends[line] = code
            if asked:
                return code if code == STOPPED else 128 + asked[-1]
    stopped = (STOPPED, *(128 + number for number in SIGNALS), *(-number for number in SIGNALS))
    for line, code in ends.items():
        what = "stopped" if code in stopped else f"failed (exit code {code})"
        print(f"{what}: {line}", file=sys.stderr)
    if any(code not in stopped for code in ends.values()):
        return 1
    return STOPPED if ends else 0


# ---------------------------------------------------------------------------------------------- command line
def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(prog="python -m harness.campaign", description=__doc__.splitlines()[0])
    result.add_argument("campaign", help="paper, medium, smoke or a YAML file like those in conf/campaign")
    result.add_argument(
        "override",
        nargs="*",
        default=[],
        help="for every sweep whose script has the key, as in precision=bf16",
    )
    result.add_argument(
        "--plan", action="store_true", help="print runs, hours and what they assume; start nothing"
    )
    result.add_argument(
        "--commands", action="store_true", help="print the command of each sweep; start nothing"
    )
    result.add_argument("--budget", metavar="TIME", help="start no sweep after this time, as in 30h or 20m")
    result.add_argument("--root", default="runs", help="folder of all runs (runs)")
    result.add_argument(
        "--launcher",
        default="basic",
        help="launcher of Hydra and its settings: basic (one run after another), ray, submitit_local, or "
        "'submitit_slurm hydra.launcher.partition=gpu'",
    )
    result.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time; default: `jobs` of each sweep, or one"
    )
    return result


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Bad input raises UserError."""
    asked = parser().parse_intermixed_args(given)
    if asked.jobs is not None and asked.jobs < 1:
        raise UserError(f"--jobs {asked.jobs}: give a number of runs, 1 or more")
    if asked.jobs is not None and asked.launcher == "basic":
        raise UserError(
            f"--jobs {asked.jobs} needs a launcher that trains several runs at a time, as in --launcher ray"
        )
    budget = duration(asked.budget) if asked.budget else float("inf")
    campaign = load(asked.campaign, asked.root, asked.override)
    if asked.plan:
        print(plan(campaign, asked.root, launcher_words(asked.launcher)[0], asked.jobs))
        return 0
    commands = [command(sweep, asked.launcher, asked.jobs) for sweep in campaign.sweeps]
    if asked.commands:
        print("\n".join(map(shlex.join, commands)))
        return 0
    return train(commands, budget)


def duration(text: str) -> float:
    """Return the seconds of a time such as 90s, 20m, 1.5h or 2d. Raises UserError for other text."""
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)):
        raise UserError(f"--budget {text}: give a number and s, m, h or d, as in 20m or 30h")
    return float(match[1]) * UNITS[match[2]]


if __name__ == "__main__":
    try:
        with reader_may_leave():
            sys.exit(main())
    except UserError as error:
        print_error(error)
        sys.exit(BAD_INPUT)
