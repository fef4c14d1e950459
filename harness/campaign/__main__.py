"""Plan and train the runs of a manifest: python -m harness.campaign paper --plan"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fire_core.errors import UserError, did_you_mean
from harness.campaign import preflight
from harness.campaign.manifest import SCRIPTS, Manifest, load
from harness.campaign.plan import describe, leaders, once, seconds_of
from harness.campaign.rates import measure, one_of_each, probes_in, rate_of
from harness.campaign.schedule import simulate, within
from harness.campaign.training import Stopped, command, train
from harness.campaign.work import assumed
from harness.domains import find
from harness.launch import BAD_INPUT
from harness.runs.signals import STOPPED
from harness.settings import keys

LAUNCHERS = {  # name -> package, target of make
    "ray": ("hydra_plugins.hydra_ray_launcher", "install-ray"),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "install-slurm"),
    "submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "install-slurm"),
}
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(prog="python -m harness.campaign", description=__doc__)
    result.add_argument("manifest", help="paper, medium, smoke or a YAML file like those in conf/campaign")
    result.add_argument("--plan", action="store_true", help="print what would be trained; start nothing")
    result.add_argument(
        "--commands", action="store_true", help="print the command of each run; start nothing"
    )
    result.add_argument(
        "--budget",
        metavar="TIME",
        help="train only the first runs that fit into this time, as in 30h or 20m",
    )
    result.add_argument(
        "--probe",
        type=float,
        nargs="?",
        const=60.0,
        metavar="SECONDS",
        help="first measure every cell that has no rate yet (60 s each)",
    )
    result.add_argument(
        "--precision",
        help="precision of training in every domain that has it; default: that of the experiment",
    )
    result.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override for every run that has the key, as in 'data.folder=/data/${data.name}'; may be repeated",
    )
    result.add_argument("--root", default="runs", help="folder of all runs (runs)")
    result.add_argument("--gpus", type=int, default=1, help="GPUs of a language run, through torchrun (1)")
    result.add_argument(
        "--launcher",
        default="",
        help="Hydra launcher of every run and its settings, as in 'submitit_slurm hydra.launcher.partition=gpu' or ray; "
        "Slurm jobs continue when the campaign stops; cancel them with scancel",
    )
    result.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time in every domain; default: as in the manifest"
    )
    result.add_argument(
        "--no-preflight", action="store_true", help="skip the check that trains one step of each cell"
    )
    return result


def main() -> int:
    """Run the command line and return the exit code: 0 done, 1 runs failed, 75 stopped. Bad input raises UserError."""
    options = parser().parse_args()
    budget = duration(options.budget) if options.budget else None
    root = Path(options.root)
    check_options(options.option)
    launcher = launcher_of(options.launcher, options.gpus)
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: give a number of runs, 1 or more")
    manifest = load(
        options.manifest,
        options.root,
        lambda domain: (*precision(domain, options.precision), *options_of(domain, options.option)),
    )
    if options.jobs is not None:
        manifest = at_a_time(manifest, options.jobs)
    waiting = [job for job in once(manifest.jobs) if not job.done]
    if options.commands:
        for job in waiting:
            print(shlex.join(command(job, options.gpus, launcher)))
        return 0
    path = root / "campaign" / "rates.json"
    if options.probe:
        probes = measure(waiting, path, manifest.at_a_time, options.probe)
    else:
        probes = probes_in(path)
    if manifest.size == "paper" and not torch.cuda.is_available() and not probes:
        print(f"There is no GPU here: this is the plan for {assumed()['machine']}.\n")
        manifest = on_assumed_machine(manifest)
    rates = {
        job.experiment: rate_of(job, probes, manifest.at_a_time[job.domain]) for job in one_of_each(waiting)
    }
    seconds = seconds_of(waiting, rates)
    trunks = {job.trunk for job in waiting if job.trunk and (job.trunk / "DONE").exists()}
    chosen = waiting
    if budget is not None:
        chosen = within(waiting, seconds, manifest.at_a_time, budget, trunks)
        print(f"--budget {options.budget} takes {len(chosen)} of {len(waiting)} runs.\n")
    forecast = simulate(chosen, seconds, manifest.at_a_time, manifest.delete_trunks, trunks)
    used = {job.experiment: rates[job.experiment] for job in chosen}
    done = len(manifest.jobs) - len(waiting)
    print(describe(manifest, chosen, done, used, seconds, forecast, leaders(chosen, trunks)), flush=True)
    if options.plan:
        return 0
    wrong = preflight.check_machine(forecast, root)
    if not options.no_preflight and not wrong:
        wrong = preflight.check_cells(chosen)
    if wrong:
        raise UserError("\nerror: ".join(wrong))
    try:
        failed, stopped = train(manifest, chosen, root, budget, options.gpus, launcher)
    except Stopped as message:
        print(f"{message}; the same command resumes")
        return STOPPED
    if len(chosen) == len(waiting) and not failed and not stopped:
        for module in manifest.afterwards:
            subprocess.run([sys.executable, "-m", module], check=False)
    for name in failed:
        print(f"failed: {name}, see {root / 'campaign' / 'logs'}", file=sys.stderr)
    for name in stopped:
        print(f"stopped: {name}; the same command resumes it", file=sys.stderr)
    return 1 if failed else STOPPED if stopped else 0


def at_a_time(manifest: Manifest, jobs: int) -> Manifest:
    """Return the manifest with `jobs` runs at a time in every domain."""
    return dataclasses.replace(manifest, at_a_time=dict.fromkeys(manifest.at_a_time, jobs), per_core=())


def launcher_of(text: str, gpus: int) -> tuple[str, ...]:
    """Return the overrides that choose the Hydra launcher `text`; none if `text` is empty.

    Raises UserError for an unknown launcher, a missing plugin, other settings than the launcher's, and `gpus` > 1.
    """
    if not text:
        return ()
    try:
        name, *settings = shlex.split(text)
    except ValueError:  # empty, or an unclosed quotation mark
        raise UserError(
            f"--launcher {text!r}: give a launcher and its settings, as in 'submitit_slurm hydra.launcher.partition=gpu'"
        ) from None
    if name not in LAUNCHERS:
        raise UserError(f"--launcher {name} is unknown{did_you_mean(name, LAUNCHERS)}")
    plugin, target = LAUNCHERS[name]
    try:
        found = importlib.util.find_spec(plugin)
    except ModuleNotFoundError:  # its parent package is missing too
        found = None
    if found is None:
        raise UserError(f"--launcher {name} needs a plugin of Hydra: make {target}")
    if not all(setting.lstrip("+").startswith("hydra.launcher.") for setting in settings):
        raise UserError(f"--launcher {text!r}: settings of a launcher begin with hydra.launcher.")
    if gpus > 1:
        raise UserError(
            f"--gpus {gpus} is torchrun on this machine; with --launcher each run has one process"
        )
    return (f"hydra/launcher={name}", *settings)


def on_assumed_machine(manifest: Manifest) -> Manifest:
    """Return the manifest with the cores of the assumed machine, in the domains that run one process per core."""
    cores = assumed()["cores"]
    jobs = {d: cores if d in manifest.per_core else count for d, count in manifest.at_a_time.items()}
    return dataclasses.replace(manifest, at_a_time=jobs)


def precision(domain: str, name: str | None) -> tuple[str, ...]:
    """Return the override for a precision; none if `name` is None or the domain does not have this precision.

    Raises UserError if no domain has it.
    """
    if name is None:
        return ()
    known = {d: keys(find(d))["precision"].metadata["choices"] for d in SCRIPTS}
    if not any(name in choices for choices in known.values()):
        raise UserError(
            f"--precision {name}: choose one of {', '.join(sorted({c for k in known.values() for c in k}))}"
        )
    return (f"precision={name}",) if name in known[domain] else ()


def options_of(domain: str, options: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides among `options` whose key this domain has."""
    return tuple(option for option in options if option.partition("=")[0] in keys(find(domain)))


def check_options(options: Sequence[str]) -> None:
    """Raise UserError for an override whose key no domain has."""
    known = sorted({key for domain in SCRIPTS for key in keys(find(domain))})
    for option in options:
        key, equals, _ = option.partition("=")
        if not equals or key not in known:
            raise UserError(
                f"--option {option}: give KEY=VALUE with a key of a script{did_you_mean(key, known)}"
            )


def duration(text: str) -> float:
    """Return the seconds of a time such as 90s, 20m, 1.5h or 2d. Raises UserError for other text."""
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)):
        raise UserError(f"--budget {text}: give a number and s, m, h or d, as in 20m or 30h")
    return float(match[1]) * UNITS[match[2]]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
