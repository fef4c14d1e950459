"""A campaign: the sweeps of a file of conf/campaign, started one after another as multiruns of their scripts.

    python -m harness.campaign medium --plan         # what would run, and for how long; starts nothing
    python -m harness.campaign medium run.jobs=2 --budget 8h

The file has `size`, `parts` and `options`, settings of every sweep. A part is a list of sweeps, each what follows `-m` on
the command line of a script, as a mapping; a list means several values. One seed of every sweep of a part comes before the
second seed of any; a list within the list of seeds stays in one sweep. In plans, `work`, {experiment: [kind, amount]}, and
`rates`, {kind: amount a second}, replace the minutes of the experiments' files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from fire_core.errors import UserError, did_you_mean, first_line, print_error, reader_may_leave
from harness.config import CONF, content_of, domain_of, options, runs_of
from harness.domains import find
from harness.launch import BAD_INPUT
from harness.naming import changes, label
from harness.overrides import check_overrides
from harness.pool import Pool, was_stopped
from harness.runs.record import RunName
from harness.runs.signals import STOPPED
from harness.settings import keys


class Sweep(NamedTuple):
    """One multirun: the script's domain and the overrides."""

    domain: str
    overrides: list[str]

    def command(self, python: str = sys.executable) -> list[str]:
        """Return its command line."""
        return [python, os.path.relpath(CONF.parent / find(self.domain).script), "-m", *self.overrides]

    def runs(self) -> list[dict[str, str]]:
        """Return the settings of each run, {key: value as typed}, in the order of training."""
        ours = [text for text in self.overrides if not text.lstrip("+").startswith("hydra")]
        return [dict(text.split("=", 1) for text in line) for line in runs_of(ours)]

    def name(self, run: dict[str, str]) -> RunName:
        """Return the name of a run whose settings have not changed since its start."""
        changed = changes(find(self.domain), [f"{key}={value}" for key, value in run.items()])
        where = run.get("run.root", "runs"), run["experiment"], run["size"]
        return RunName(*where, label(run["method"], changed), int(run["seed"]))


def load(name: str, more: Sequence[str] = ()) -> tuple[dict[str, Any], list[Sweep]]:
    """Return the content and the sweeps of conf/campaign/<name>.yaml, or of the file `name` if that ends in .yaml.

    `more` are overrides for every sweep whose script has the key; they replace those of the file. Raises UserError for
    names that do not exist, and for an override that no script has.
    """
    path = Path(name) if name.endswith(".yaml") else CONF / "campaign" / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"there is no campaign {name!r}{did_you_mean(name, options('campaign'))}")
    typed = {text.partition("=")[0]: text for text in more}
    try:
        content = yaml.safe_load(path.read_text())
        common = content.get("options", {}) | {"size": content["size"]}
        sweeps = [
            _sweep(common | one, typed) for part in content["parts"] for one in _one_seed_at_a_time(part)
        ]
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{path} is no campaign: {reason}; compare conf/campaign/smoke.yaml") from error
    for text in typed.values():
        if not any(text in sweep.overrides for sweep in sweeps):
            raise UserError(f"{text}: no script of this campaign has this key; write key=value")
    return content, sweeps


def _one_seed_at_a_time(part: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the sweeps of one part with their first seed (or list of seeds), then with their second, ..."""
    for turn in itertools.zip_longest(*(_list(one["seed"]) for one in part)):
        yield from (one | {"seed": seed} for one, seed in zip(part, turn, strict=True) if seed is not None)


def _sweep(settings: dict[str, Any], typed: dict[str, str]) -> Sweep:
    """Return one sweep after checking its keys, with the typed overrides that its script has."""
    domain = find(domain_of(_list(settings["experiment"])[0]))
    first = {key: settings[key] for key in ("experiment", "size", "method", "seed")}
    texts = {}
    for key, values in (first | settings).items():
        words = (value if isinstance(value, str) else json.dumps(value) for value in _list(values))
        texts[key] = f"{key}={','.join(words)}"
    has = [key for key in typed if key in keys(domain) or key.lstrip("+").startswith("hydra")]
    overrides = list((texts | {key: typed[key] for key in has}).values())
    check_overrides(domain, overrides)
    return Sweep(domain.name, overrides)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def plan(name: str, more: Sequence[str] = ()) -> str:
    """Return the plan: the sweeps with their unfinished runs and hours, the total, and what the hours assume."""
    content, sweeps = load(name, more)
    lines, unfinished, total, work = [], 0, 0.0, 0.0
    for sweep in sweeps:
        runs = sweep.runs()
        left = [run for run in runs if not (sweep.name(run).folder / "DONE").exists()]
        hours = sum(minutes_of(run["experiment"], content) for run in left) / 60
        unfinished, work = unfinished + len(left), work + hours
        total += hours / max(1, min(len(left), int(runs[0].get("run.jobs", 1))))
        command = shlex.join(sweep.command("python"))
        lines.append(f"{len(left):3} of {len(runs):3} runs left, done after {total:7.1f} h: {command}")
    assumed = content.get("assumed", "minutes of the experiments' files: a CPU, from scratch")
    hours_left = f"{total:.1f} hours, {work:.1f} if one at a time; assumed: {assumed}"
    return "\n".join([*lines, f"{name}, size={content['size']}: {unfinished} runs left, {hours_left}"])


def minutes_of(experiment: str, content: dict[str, Any]) -> float:
    """Return the minutes that a run of an experiment takes in this campaign, 0 if nothing tells them."""
    if experiment in content.get("work", {}):
        kind, amount = content["work"][experiment]
        return amount / content["rates"][kind] / 60
    return content_of(experiment).get("minutes", {}).get(content["size"], 0.0)


def train(commands: Sequence[Sequence[str]], budget: float = math.inf) -> int:
    """Run sweeps one after another and return the exit code: 0 done, 1 if a sweep failed, 75 or 128 + signal if stopped.

    A sweep that fails does not keep the others from starting. None starts after `budget` seconds, or after a signal, which
    the running sweep receives.
    """
    began = time.monotonic()
    with Pool(1, []) as pool:
        for number, words in enumerate(commands, 1):
            if time.monotonic() - began >= budget:
                print(f"the budget is used up before sweep {number} of {len(commands)}", flush=True)
                break
            print(f"\nsweep {number} of {len(commands)}: {shlex.join(words)}", flush=True)
            pool.start(os.execv, words[0], words)
            pool.wait()
            if pool.asked:
                return pool.exit_code()
    ends = {shlex.join(words): code for words, code in zip(commands, pool.codes) if code}
    for line, code in ends.items():
        print(f"{'stopped' if was_stopped(code) else f'failed (exit code {code})'}: {line}", file=sys.stderr)
    return 1 if not all(map(was_stopped, ends.values())) else STOPPED if ends else 0


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Bad input raises UserError."""
    parser = argparse.ArgumentParser(prog="python -m harness.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("campaign", help="paper, medium, smoke or a YAML file like those in conf/campaign")
    parser.add_argument("override", nargs="*", default=[], help="for every sweep whose script has the key")
    parser.add_argument("--plan", action="store_true", help="print sweeps, runs and hours; start nothing")
    parser.add_argument(
        "--budget", type=pd.Timedelta, help="start no sweep after this time, as in 30h or 20m"
    )
    asked = parser.parse_intermixed_args(given)
    if asked.plan:
        print(plan(asked.campaign, asked.override))
        return 0
    commands = [sweep.command() for sweep in load(asked.campaign, asked.override)[1]]
    return train(commands, asked.budget.total_seconds() if asked.budget else math.inf)


if __name__ == "__main__":
    try:
        with reader_may_leave():
            sys.exit(main())
    except UserError as error:
        print_error(error)
        sys.exit(BAD_INPUT)
