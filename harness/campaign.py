"""A campaign: the sweeps of a file of conf/campaign, started one after another as multiruns of their scripts.

    python -m harness.campaign medium --plan         # what would run, and for how long; starts nothing
    python -m harness.campaign medium run.jobs=2 --budget 8h

The file has `size`, `options` of all sweeps, and `parts`: lists of sweeps, each a mapping of what follows `-m` on a command
line. One seed of every sweep of a part comes before the second of any; a list within the list of seeds stays in one sweep.
In plans, `work` {experiment: [kind, amount]} and `rates` {kind: amount a second} replace the minutes of the experiments.
"""

import argparse
import itertools
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from fire_core.errors import UserError, clean_exit, did_you_mean, first_line
from harness.config import CONF, SIZES, content_of, domain_of, options, runs_of
from harness.domains import find
from harness.naming import changes, label
from harness.overrides import check_overrides
from harness.pool import Pool, was_stopped
from harness.settings import Domain, keys

WRONG_FILE = (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, yaml.YAMLError)


class Sweep(NamedTuple):
    """One multirun: its domain, its command line after `python`, and the overrides of each run, {key: value as typed}."""

    domain: Domain
    words: list[str]
    runs: list[dict[str, str]]

    def is_done(self, run: dict[str, str]) -> bool:
        """Return whether a run is finished, if no setting has changed since its start."""
        name = label(run["method"], changes(self.domain, [f"{key}={run[key]}" for key in run]))
        folder = Path(run.get("run.root", "runs"), run["experiment"], run["size"], name)
        return (folder / f"seed_{run['seed']}" / "DONE").exists()


def load(name: str, more: Sequence[str] = ()) -> tuple[dict[str, Any], list[Sweep]]:
    """Return content and sweeps of conf/campaign/<name>.yaml or of a .yaml file, with `more` where a script has the key."""
    path = Path(name) if name.endswith(".yaml") else CONF / "campaign" / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"there is no campaign {name!r}{did_you_mean(name, options('campaign'))}")
    typed, sweeps = {text.partition("=")[0]: text for text in more}, []
    try:
        content = yaml.safe_load(path.read_text())
        common = content.get("options", {}) | {"size": content["size"]}
        for part in content["parts"]:
            seeds = [one["seed"] if isinstance(one["seed"], list) else [one["seed"]] for one in part]
            for turn in itertools.zip_longest(*seeds):
                for one, seed in zip(part, turn, strict=True):
                    made = None if seed is None else _sweep(common | one | {"seed": seed}, typed)
                    sweeps += [made] if made not in (None, *sweeps) else []  # a typed seed makes equal ones
        for run in (run for sweep in sweeps for run in sweep.runs):
            minutes_of(run, content), int(run.get("run.jobs", 1))  # raise what they raise
    except WRONG_FILE as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        why = f"{kind}{first_line(error)}; compare conf/campaign/smoke.yaml"
        raise UserError(f"{path} cannot be used: {why}") from error
    for text in typed.values():
        if not any(text in sweep.words for sweep in sweeps):
            raise UserError(f"{text}: no script of this campaign has this key; method keys go into its file")
    return content, sweeps


def _sweep(settings: dict[str, Any], typed: dict[str, str]) -> Sweep:
    """Return one sweep after checking its keys, with the typed overrides that its script has."""
    values = {key: value if isinstance(value, list) else [value] for key, value in settings.items()}
    name, *others = {domain_of(each) for each in values["experiment"]}
    if others:
        raise UserError(f"experiment={values['experiment']}: one sweep has experiments of one script")
    domain, texts = find(name), {}
    for key in dict.fromkeys(["experiment", "size", "method", "seed", *values]):
        words = (each if isinstance(each, str) else json.dumps(each) for each in values[key])
        texts[key] = f"{key}={','.join(words)}"
    texts |= {key: text for key, text in typed.items() if key in keys(domain) or "hydra" in key}
    check_overrides(domain, overrides := list(texts.values()))
    ours = [text for key, text in texts.items() if "hydra" not in key]
    runs = [dict(text.split("=", 1) for text in line) for line in runs_of(ours)]
    for key, choices in (("size", SIZES), ("method", options("method"))):
        if unknown := [run[key] for run in runs if run[key] not in choices]:
            raise UserError(f"{key}={unknown[0]} does not exist{did_you_mean(unknown[0], choices)}")
    return Sweep(domain, [os.path.relpath(CONF.parent / domain.script), "-m", *overrides], runs)


def plan(name: str, more: Sequence[str] = ()) -> str:
    """Return the plan: the sweeps with their unfinished runs and hours, the total, and what the hours assume."""
    content, sweeps = load(name, more)
    lines, unfinished, total, work, unknown = [], 0, 0.0, 0.0, 0
    for sweep in sweeps:
        left = [run for run in sweep.runs if not sweep.is_done(run)]
        minutes = [minutes_of(run, content) for run in left]
        hours, unknown = sum(minutes) / 60, unknown + minutes.count(0)
        unfinished, work = unfinished + len(left), work + hours
        total += hours / max(1, min(len(left), int(sweep.runs[0].get("run.jobs", 1))))
        counts = f"{len(left):3} of {len(sweep.runs):3} runs left"
        lines.append(f"{counts}, done after {total:7.1f} h: python {shlex.join(sweep.words)}")
    assumed = content.get("assumed", "minutes of the experiments' files: a CPU, from scratch")
    hours_left = f"{total:.1f} hours, {work:.1f} if one at a time; assumed: {assumed}"
    hours_left += f"; {unknown} runs without a known time count as 0" if unknown else ""
    sizes = ",".join(dict.fromkeys(run["size"] for sweep in sweeps for run in sweep.runs))
    return "\n".join([*lines, f"{name}, size={sizes}: {unfinished} runs left, {hours_left}"])


def minutes_of(run: dict[str, str], content: dict[str, Any]) -> float:
    """Return the minutes that a run takes in this campaign, 0 if nothing tells them."""
    if run["size"] != content["size"] or run["experiment"] not in content.get("work", {}):
        return content_of(run["experiment"]).get("minutes", {}).get(run["size"], 0.0)
    kind, amount = content["work"][run["experiment"]]
    return amount / content["rates"][kind] / 60


def train(commands: Sequence[Sequence[str]], budget: float = math.inf) -> int:
    """Run command lines, none after `budget` seconds; return 0, 1 if one failed, 75 or 128 + signal if stopped."""
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
    ends = [(code, shlex.join(words)) for words, code in zip(commands, pool.codes) if code]
    for code, line in ends:
        print(f"{'stopped' if was_stopped(code) else f'failed (exit code {code})'}: {line}", file=sys.stderr)
    return pool.exit_code() if all(was_stopped(code) for code, _ in ends) else 1


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("campaign", help="a name of conf/campaign, as paper or medium, or a YAML file")
    parser.add_argument("override", nargs="*", default=[], help="for every sweep whose script has the key")
    parser.add_argument("--plan", action="store_true", help="print sweeps, runs and hours; start nothing")
    parser.add_argument("--budget", type=pd.Timedelta, help="start no sweep after this time, as in 30h, 20m")
    asked = parser.parse_intermixed_args()
    if asked.budget is not None and asked.budget < pd.Timedelta("1s"):  # 30 alone would be nanoseconds
        parser.error("--budget needs a unit, as in 30h or 20m")
    if asked.plan:
        print(plan(asked.campaign, asked.override))
        return 0
    commands = [[sys.executable, *sweep.words] for sweep in load(asked.campaign, asked.override)[1]]
    return train(commands, asked.budget.total_seconds() if asked.budget else math.inf)


if __name__ == "__main__":
    with clean_exit():
        sys.exit(main())
